"""Paired evaluation of games: every view plays the same ones."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nca_jax.data.chat import pad_prompts
from nca_jax.domains.base import Domain, Example, Probe
from nca_jax.evaluator import PairedEvaluator, Part, mean_or_none
from nca_jax.items import NO_CONTEXT, GameResult, ItemResult
from nca_jax.models.decoder import Params
from nca_jax.multi_turn import Player, TurnTokens, transcript
from nca_jax.rollout import example_keys
from nca_jax.view_divergence import ViewDivergence
from nca_jax.views import View


class GameEvaluator(PairedEvaluator):
    """Plays the same games in every view.

    Args:
      players: view name -> who plays.
      domain: of the games.
      examples: the games.
      divergence, compared: as in Evaluator, over all turns of a game.
      batch_size, samples, probes: as in PairedEvaluator.
      seed: with `rollout.example_keys`, the same keys in every view and at every step.
    """

    def __init__(
        self,
        *,
        players: Mapping[str, Player],
        divergence: ViewDivergence,
        compared: Collection[str],
        domain: Domain,
        examples: Sequence[Example],
        probes: Mapping[str, Probe | None],
        batch_size: int,
        samples: int,
        seed: int,
    ):
        super().__init__(probes, examples, batch_size, samples)
        self._players, self._domain, self._seed = players, domain, seed
        self._divergence, self._compared = divergence, compared

    def _part(
        self, params: Params, part: Part, views: Sequence[str], before: Callable[[str], None]
    ) -> Iterator[tuple[str, list[ItemResult]]]:
        examples = [self._examples[i] for i in part.items]
        keys = example_keys(self._seed, part.sample, jnp.asarray(part.items))
        played: list[TurnTokens] = []  # without a context
        for name in views:
            before(name)
            player, probe = self._players[name], self._probes[name]
            if probe and not probe.plays:
                yield name, self._asked_once(params, name, part.sample, examples, keys)
                continue
            episodes, turns = player.play(params, examples, keys)
            divergence: list[float | None] = [None] * len(examples)
            if name == NO_CONTEXT:
                played = turns
            elif played and name in self._compared:
                divergence = self._game_divergence(params, played, examples, player)
            results = [
                GameResult(
                    id=example.id,
                    view=name,
                    prompt=example.prompt,
                    response=transcript(episode),
                    answer=episode.ending,
                    correct=episode.won,
                    length=sum(int(turn.mask_R.sum()) for turn in turns if turn.game == i),
                    truncated=any(turn.truncated for turn in turns if turn.game == i),
                    sample=part.sample,
                    expected=example.answer,
                    group=example.group,
                    divergence=divergence[i],
                    turns=[
                        {
                            "number": turn.number,
                            "response": turn.response,
                            "action": turn.action,
                            "valid": turn.valid,
                            "board": turn.board_after,
                        }
                        for turn in episode.turns
                    ],
                )
                for i, (example, episode) in enumerate(zip(examples, episodes, strict=True))
            ]
            yield name, results

    def _asked_once(
        self, params: Params, view: str, sample: int, examples: Sequence[Example], keys: jax.Array
    ) -> list[ItemResult]:
        """Responses to the prompts of the first turns, drawn with the keys of these turns."""
        player, results = self._players[view], []
        prompts = [player.prompt_tokens(self._domain.messages(example), example) for example in examples]
        turn_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
        drawn = player.sample_rows(params, player.encoded(params), prompts, turn_keys)
        for example, (response_R, mask_R, truncated) in zip(examples, drawn, strict=True):
            text = player.decode(response_R[mask_R])
            correct, answer = self._probes[view].score(example, text)
            results.append(
                GameResult(
                    id=example.id,
                    view=view,
                    prompt=example.prompt,
                    response=text,
                    answer=answer,
                    correct=correct,
                    length=int(mask_R.sum()),
                    truncated=truncated,
                    sample=sample,
                    expected=self._expected(view, example),
                    group=example.group,
                )
            )
        return results

    def _game_divergence(
        self, params: Params, turns: Sequence[TurnTokens], examples: Sequence[Example], player: Player
    ) -> list[float | None]:
        """Of each game that was played without a context: the mean over the tokens of all its turns."""
        views, prefixes = [], []
        for each in (self._players[NO_CONTEXT], player):
            own = [each.prompt_tokens(turn.messages, examples[turn.game]) for turn in turns]
            views.append(View(np.array(each.prefix, np.int32), *pad_prompts(own, each.length_multiple)))
            prefixes.append(each.encoded(params))
        response_NxR, mask_NxR = (
            np.stack([getattr(turn, name) for turn in turns]) for name in ("response_R", "mask_R")
        )
        of_game: list[list[np.ndarray]] = [[] for _ in examples]
        for row_N, active_N in player.batches(len(turns)):
            x_BxRxD, c_BxRxD = (
                self._divergence.hidden(
                    params, View(v.prefix_C, v.prompt_BxP[row_N], v.prompt_length_B[row_N]), prefix, response_NxR[row_N]
                )
                for v, prefix in zip(views, prefixes, strict=True)
            )
            mask = mask_NxR[row_N] & active_N[:, None]
            nats = jax.device_get(self._divergence.compare(params, x_BxRxD, c_BxRxD, mask))
            for row in np.flatnonzero(active_N):
                of_game[turns[row_N[row]].game].append(nats[row][mask[row]])
        return [mean_or_none(np.concatenate(values)) for values in of_game]
