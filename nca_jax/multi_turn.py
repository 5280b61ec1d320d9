"""Games on the model's side: many played at once, and every turn of them an example of its own.

As in OPCD (arXiv 2602.12275) a turn's prompt is one user message with all observations so far, so a game's history is
inside its prompt and each turn is trained on like any other prompt.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_jax.data.chat import ChatFormat, Context, Message, pad_prompts
from nca_jax.domains.base import Example
from nca_jax.domains.games import BoardGame, turn_messages
from nca_jax.errors import UserError
from nca_jax.games.episode import Episode, play
from nca_jax.models.decoder import Params, Past
from nca_jax.rollout import Rollout, Sampling


class TurnTokens(NamedTuple):
    """What a model was asked and answered in one turn of one game."""

    game: int  # position among the games played together
    number: int  # of the turn, from 1
    messages: list[Message]  # the prompt, without the context
    response_R: np.ndarray
    mask_R: np.ndarray
    truncated: bool


class Player:
    """Plays games with one model in one view.

    Args:
      domain: whose games.
      chat: renders a turn's prompt.
      context: what leads the prompts; None: the no-context view.
      prefix_C: tokens that lead every prompt of this view, encoded once per `play`; may be empty.
      sample: from `rollout.make_sampler`.
      encode: jitted (params, prefix_C) -> list with the prefix's keys and values.
      decode: response ids -> text to be judged.
      sampling: temperature and top-p.
      rows: games answered at once; a quarter of it once no more are left.
      devices: number of rows is kept divisible by it.
      length_multiple: prompts are padded to multiples of so many tokens.
      max_prompt_tokens: of a whole prompt.
    """

    def __init__(
        self,
        domain: BoardGame,
        chat: ChatFormat,
        context: Context | None,
        prefix_C: np.ndarray,
        *,
        sample: Callable[..., Rollout],
        encode: Callable[[Params, jax.Array], list[Past]],
        decode: Callable[[Sequence[int]], str],
        sampling: Sampling,
        rows: int,
        devices: int,
        length_multiple: int,
        max_prompt_tokens: int,
    ):
        self._domain, self._chat, self._context = domain, chat, context
        self.prefix = tuple(int(token) for token in prefix_C)
        self.decode, self.length_multiple = decode, length_multiple
        self._sample, self._encode, self._sampling = sample, encode, sampling
        # Two sizes only, for each is compiled.
        quarter = rows // 4
        self._sizes = [quarter, rows] if quarter and quarter % devices == 0 else [rows]
        self._max_prompt_tokens = max_prompt_tokens

    def play(
        self, params: Params, examples: Sequence[Example], key_B: jax.Array, prefix: list[Past] | None = None
    ) -> tuple[list[Episode], list[TurnTokens]]:
        """Plays one game for each example, to its end.

        Args:
          params: of the model.
          examples: the games.
          key_B: one key for each; turn t of game b draws with fold_in(key_B[b], t), whatever the other games do.
          prefix: keys and values of `prefix_C` under these weights, where they are known already.

        Returns:
          The finished episodes, and every turn of them in the order they were made.
        """
        episodes = [self._domain.episode(example) for example in examples]
        if prefix is None:
            prefix = self.encoded(params)
        tokens = []

        def respond(number: int, games: Sequence[int]) -> list[str]:
            asked = [turn_messages(episodes[g]) for g in games]
            prompts = [self.prompt_tokens(messages, examples[g]) for messages, g in zip(asked, games, strict=True)]
            turn_key_B = jax.vmap(jax.random.fold_in, (0, None))(key_B[np.asarray(games)], number)
            drawn = self.sample_rows(params, prefix, prompts, turn_key_B)
            texts = []
            for game, messages, (response_R, mask_R, truncated) in zip(games, asked, drawn, strict=True):
                tokens.append(TurnTokens(game, number, messages, response_R, mask_R, truncated))
                texts.append(self.decode(response_R[mask_R]))
            return texts

        play(episodes, respond)
        return episodes, tokens

    def sample_rows(
        self, params: Params, prefix: list[Past], prompts: Sequence[Sequence[int]], key_N: jax.Array
    ) -> list[tuple[np.ndarray, np.ndarray, bool]]:
        """A response for each prompt (without the prefix's tokens): ids, mask, and whether it was truncated."""
        prompt_NxP, length_N = pad_prompts(prompts, self.length_multiple)
        drawn = []
        for row, active in self.batches(len(prompts)):
            rollout = self._sample(params, prefix, prompt_NxP[row], length_N[row], active, key_N[row], self._sampling)
            response, mask, truncated = jax.device_get((rollout.response_BxR, rollout.mask_BxR, rollout.truncated_B))
            drawn += [(response[i], mask[i], bool(truncated[i])) for i in np.flatnonzero(active)]
        return drawn

    def batches(self, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, which of them are active) of each batch that so many rows are done in; the last row is repeated,
        inactive, where a batch is not full."""
        start = 0
        while start < count:
            size = next((size for size in self._sizes if size >= count - start), self._sizes[-1])
            row = np.arange(start, start + size)
            yield np.minimum(row, count - 1), row < count
            start += size

    def encoded(self, params: Params) -> list[Past]:
        """Keys and values of the shared prefix under these weights."""
        return self._encode(params, jnp.asarray(self.prefix, jnp.int32))

    def prompt_tokens(self, messages: Sequence[Message], example: Example) -> tuple[int, ...]:
        """A prompt of the game in this player's view, without the tokens of the shared prefix.

        Raises:
          UserError: it is too long, or does not begin with the prefix.
        """
        ids = self._chat.encode(self._context.apply(messages) if self._context else messages)
        if len(ids) > self._max_prompt_tokens:
            raise UserError(
                f"a prompt of game {example.id} has {len(ids)} tokens, more than config.data.max_prompt_tokens="
                f"{self._max_prompt_tokens}; raise it."
            )
        return own_tokens(ids, self.prefix)


def own_tokens(ids: tuple[int, ...], prefix: tuple[int, ...]) -> tuple[int, ...]:
    """What follows the shared prefix, which was found on the prompts of first turns.

    Raises:
      UserError: the tokenizer splits the beginning of a later prompt otherwise.
    """
    if ids[: len(prefix)] != prefix:
        raise UserError("the tokenizer splits the same beginning of two prompts differently; report this model.")
    return ids[len(prefix) :]


def transcript(episode: Episode) -> str:
    """The answers of a game as one text, a line in front of each."""
    return "\n".join(f"[turn {turn.number}] {turn.response}" for turn in episode.turns)
