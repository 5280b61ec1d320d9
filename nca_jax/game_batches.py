"""What a training step is fed where the domain is a game: every turn that was played is a row of the batch."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from nca_jax.assembly import Answering
from nca_jax.axes import parts
from nca_jax.batches import Drawn, Shown, Teachers, retained_keys
from nca_jax.data.chat import ChatFormat, Context, PackedView, pad_prompts
from nca_jax.domains.base import Example
from nca_jax.domains.games import BoardGame
from nca_jax.games.episode import Episode
from nca_jax.multi_turn import Player, TurnTokens, own_tokens, transcript
from nca_jax.processes import place
from nca_jax.rollout import Sampling, example_keys
from nca_jax.settings import rows
from nca_jax.sharding import batch_sharding
from nca_jax.train_step import TrainState
from nca_jax.views import Batch, Retained, View


class GameBatches:
    """Plays a step's games with the training parameters and lays out their turns on the mesh.

    A batch has `batch_size * max_turns` rows. Those of turns that were never played have an empty mask and come last,
    so that micro-batches that hold nothing else are skipped by the step.

    Args:
      config, mesh, answering, decode, examples, teachers: as in `batches.Batches`.
      domain: whose games.
      chat: renders the turns' prompts.
      no_context, with_context: first and last prompts of the games, whose shared prefix leads those of all turns.
      others: contexts of retention, in the order of `teachers.others`.
    """

    def __init__(
        self,
        config: ConfigDict,
        mesh: Mesh,
        answering: Answering,
        decode: Callable[[Sequence[int]], str],
        examples: Sequence[Example],
        no_context: PackedView,
        with_context: PackedView,
        teachers: Teachers,
        *,
        domain: BoardGame,
        chat: ChatFormat,
        others: Sequence[Context],
    ):
        self._chat, self._domain, self._examples, self._teachers = chat, domain, examples, teachers
        self._layout = answering.layout
        self._no_context, self._with_context, self._others = no_context, with_context, others
        self._seed, self._shown, self._rows = config.seed, min(config.log.samples, config.batch_size), rows(config)
        self._policy, self._retention = config.rollout.policy, bool(config.retention.gamma)
        self._length_multiple = config.data.length_multiple
        self._sharding = batch_sharding(mesh)
        player = partial(
            Player,
            domain,
            chat,
            decode=decode,
            sampling=Sampling(float(config.rollout.temperature), float(config.rollout.top_p)),
            rows=config.batch_size,
            devices=parts(answering.mesh, "batch"),
            encode=answering.encode,
            length_multiple=config.data.length_multiple,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
        sample = answering.sampler(config.rollout.top_k)
        self._without = player(None, no_context.prefix_C, sample=sample)
        self._with = player(domain.context, with_context.prefix_C, sample=sample)
        self._teacher = player(domain.context, with_context.prefix_C, sample=teachers.sample)

    def batch(self, state: TrainState, index_B: np.ndarray, step: int) -> Drawn:
        """Plays the games of a step, one for each index, and makes the batch of their turns."""
        examples = [self._examples[i] for i in index_B]
        keys = example_keys(self._seed, step, jnp.arange(len(index_B)))
        if self._policy == "student":
            episodes, turns = self._without.play(self._layout(state.params), examples, keys)
        else:
            params, prefix = self._teachers.now(state)
            episodes, turns = self._teacher.play(params, examples, keys, prefix)
        # In another order, so that no stride through the rows prefers some turn of the games.
        order = np.random.default_rng([self._seed, step]).permutation(len(turns))
        turns = [turns[i] for i in order]
        pairs = [self._chat.view_pair(turn.messages, self._domain.context) for turn in turns]
        view_x = self._view([pair.no_context for pair in pairs], self._no_context)
        view_c = self._view([pair.with_context for pair in pairs], self._with_context)
        responses = self._responses([(turn.response_R, turn.mask_R) for turn in turns])
        retained = self._retained(state, turns, step, keys) if self._retention else None
        batch = Batch(view_x, view_c, *responses, retained)
        return Drawn(batch, episodes, _metrics(episodes, turns))

    def show(self, state: TrainState, index_B: np.ndarray, step: int, drawn: Drawn) -> Shown:
        """The first few games as they were played, and as the student plays them with the context."""
        examples = [self._examples[i] for i in index_B[: self._shown]]
        keys = example_keys(self._seed, step, jnp.arange(len(index_B)))
        with_context, _ = self._with.play(self._layout(state.params), examples, keys)
        records = [
            {"id": e.id, "prompt": e.prompt, "no_context": transcript(x), "with_context": transcript(c)}
            for e, x, c in zip(examples, drawn.detail[: self._shown], with_context, strict=True)
        ]
        return Shown(None, lambda: records)

    def _retained(self, state: TrainState, turns: Sequence[TurnTokens], step: int, keys: jax.Array) -> Retained:
        """The turns' prompts under another context, and the teacher's responses to them."""
        i = self._teachers.turn(step)
        params, prefix = self._teachers.now(state, i)
        view = self._teachers.others[i]
        prompts = [self._chat.view_pair(turn.messages, self._others[i]).with_context for turn in turns]
        game, number = (np.array([getattr(turn, name) for turn in turns]) for name in ("game", "number"))
        turn_keys = jax.vmap(jax.random.fold_in)(retained_keys(keys)[game], number)
        own = [own_tokens(ids, tuple(view.prefix_C.tolist())) for ids in prompts]
        drawn = self._teacher.sample_rows(params, prefix, own, turn_keys)
        responses = self._responses([(response_R, mask_R) for response_R, mask_R, _ in drawn])
        return Retained(self._view(prompts, view), *responses)

    def _responses(self, drawn: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[jax.Array, jax.Array]:
        """Responses and masks [B, R] on the mesh; rows that no turn fills have no token."""
        response_BxR = np.zeros((self._rows, len(drawn[0][0])), np.int32)
        mask_BxR = np.zeros(response_BxR.shape, bool)
        for row, (response_R, mask_R) in enumerate(drawn):
            response_BxR[row], mask_BxR[row] = response_R, mask_R
        where = (self._sharding.response_BxR, self._sharding.response_mask_BxR)
        return place((response_BxR, mask_BxR), where)

    def _view(self, prompts: Sequence[tuple[int, ...]], like: PackedView) -> View:
        """The prompts on the mesh; rows that no turn fills repeat the first.

        P is at least that of `like`, which was made of the longest prompts: a step is compiled for one P and not for
        every length that games come to.
        """
        own = [own_tokens(ids, tuple(like.prefix_C.tolist())) for ids in prompts]
        own += [own[0]] * (self._rows - len(own))
        prompt_BxP, length_B = pad_prompts(own, self._length_multiple, at_least=like.prompt_ExP.shape[1])
        return place(View(like.prefix_C, prompt_BxP, length_B), self._sharding.no_context)


def _metrics(episodes: Sequence[Episode], turns: Sequence[TurnTokens]) -> dict[str, float]:
    made = [turn for episode in episodes for turn in episode.turns]
    return {
        "rollout/won": sum(episode.won for episode in episodes) / len(episodes),
        "rollout/turns": len(made) / len(episodes),
        "rollout/invalid": sum(not turn.valid for turn in made) / len(made),
        "rollout/truncated": sum(turn.truncated for turn in turns) / len(turns),
    }
