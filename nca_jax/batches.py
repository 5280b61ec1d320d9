"""What a training step is fed: prompts in every view, and responses of the student or of its teacher."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from nca_jax.assembly import Answering
from nca_jax.data.chat import PackedView
from nca_jax.domains.base import Example
from nca_jax.errors import UserError
from nca_jax.models.decoder import Params, Past
from nca_jax.processes import is_first, of_first, place, wait_for_all
from nca_jax.rollout import Rollout, Sampling, example_keys
from nca_jax.sharding import batch_sharding
from nca_jax.train_step import Teacher, TrainState
from nca_jax.views import Batch, Retained, View

# Folded into the keys of responses under another context, which are drawn at the same steps for the same rows.
_RETAINED = 1 << 20


class Teachers:
    """The teacher as a step needs it, and its sampling; keys and values of a frozen one's contexts are made once.

    Args:
      kind: "frozen", "live" or "ema".
      params: of a frozen teacher; the others are in the state.
      encode: jitted (params, prefix_C) -> list with the prefix's keys and values, as the step takes them.
      answering: samples from the teacher.
      top_k: of the rollouts.
      with_context: the prompts under the context.
      others: the prompts under each context of retention; step k takes the k-th in turn.
    """

    def __init__(
        self,
        kind: str,
        params: Params | None,
        encode: Callable[[Params, jax.Array], list[Past]],
        answering: Answering,
        top_k: int,
        with_context: PackedView,
        others: Sequence[PackedView],
    ):
        self._kind, self._params, self._answering = kind, params, answering
        self.sample = answering.sampler(top_k)
        self.with_context, self.others = with_context, others
        self._prefixes = []
        self._sampling_prefixes: dict[int | None, list[Past]] = {}  # of a frozen teacher, in the decode layout
        if kind == "frozen":
            self._prefixes = [encode(params, jnp.asarray(view.prefix_C)) for view in (with_context, *others)]

    def of_step(self, step: int) -> Teacher:
        """The argument of the training step."""
        if self._kind != "frozen":
            return Teacher()
        return Teacher(self._params, self._prefixes[0], self._prefixes[1 + self.turn(step)] if self.others else None)

    def turn(self, step: int) -> int:
        """Which context of retention step `step` takes."""
        return (step - 1) % len(self.others) if self.others else 0

    def now(self, state: TrainState | None, other: int | None = None) -> tuple[Params, list[Past]]:
        """Weights for sampling, and the encoded prefix of the context or of a context of retention."""
        params = {"frozen": self._params, "live": state and state.params, "ema": state and state.ema}[self._kind]
        params = self._answering.layout(params)
        if other in self._sampling_prefixes:
            return params, self._sampling_prefixes[other]
        view = self.with_context if other is None else self.others[other]
        prefix = self._answering.encode(params, jnp.asarray(view.prefix_C))
        if self._kind == "frozen":
            self._sampling_prefixes[other] = prefix
        return params, prefix


class Drawn(NamedTuple):
    """What was drawn for a step."""

    batch: Batch
    detail: Any  # the responses, for `show`
    metrics: dict[str, float | jax.Array]  # of the rollout


class Shown(NamedTuple):
    """Samples to look at; the records are made when they are called for, so that the device need not wait."""

    ready: Any  # array that is there when they are drawn; None: they are
    records: Callable[[], list[dict[str, str]]]


class Batches:
    """Draws the step's responses with the training parameters and lays out the batch on the mesh.

    Args:
      config: of the job.
      mesh: of the job.
      answering: samples from the student.
      decode: response ids -> text.
      examples: those that fit.
      no_context, with_context: their prompts.
      teachers: the teacher.
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
    ):
        self._answering, self._sample = answering, answering.sampler(config.rollout.top_k)
        self._decode, self._examples, self._teachers = decode, examples, teachers
        self._no_context, self._with_context = no_context, with_context
        self._seed, self._shown = config.seed, min(config.log.samples, config.batch_size)
        self._policy, self._batch_size = config.rollout.policy, config.batch_size
        self._retention = bool(config.retention.gamma)
        self._sampling = Sampling(float(config.rollout.temperature), float(config.rollout.top_p))
        self._sharding = batch_sharding(mesh)
        self._cache: list[tuple[np.ndarray, np.ndarray]] = []

    def batch(self, state: TrainState, index_B: np.ndarray, step: int) -> Drawn:
        """The batch of a step; nothing of it comes to the host."""
        rows_x, rows_c = self._no_context.rows(index_B), self._with_context.rows(index_B)
        keys = example_keys(self._seed, step, jnp.arange(len(index_B)))
        if self._policy == "student":
            rollout = self._answer(state.params, rows_x, keys)
        else:
            rollout = self._draw(self._teachers.sample, *self._teachers.now(state), rows_c, keys)
        retained = self._retained(state, index_B, step, keys) if self._retention else None
        metrics = {"rollout/truncated": rollout.truncated_B.mean()}
        batch = Batch(self._place(rows_x), self._place(rows_c), *self._placed(rollout), retained)
        return Drawn(batch, rollout, metrics)

    def show(self, state: TrainState, index_B: np.ndarray, step: int, drawn: Drawn) -> Shown:
        """The first few prompts with a response in each view, for people to look at.

        The responses with the context are drawn now, with the student that drew the others.
        """
        index = index_B[: self._shown]
        keys = example_keys(self._seed, step, jnp.arange(len(index)))
        with_context = self._answer(state.params, self._with_context.rows(index), keys)

        def records() -> list[dict[str, str]]:
            found = []
            for i, x, c in zip(index, self._texts(drawn.detail), self._texts(with_context), strict=True):
                example = self._examples[i]
                found.append({"id": example.id, "prompt": example.prompt, "no_context": x, "with_context": c})
            return found

        return Shown(with_context.truncated_B, records)

    def cache_retained(self, path: epath.Path) -> None:
        """Draws the teacher's response to every example under every context of retention, or reads them if they are
        there: a run that is continued goes on with the same ones."""
        if not of_first(path.exists()):
            arrays = {}
            for i, other in enumerate(self._teachers.others):
                E = len(other.prompt_length_E)
                drawn = [self._all_of(other, i, first) for first in range(0, E, self._batch_size)]
                for name, parts in zip(("response", "mask"), zip(*drawn, strict=True), strict=True):
                    arrays[f"{name}_{i}"] = np.concatenate(parts)[:E]
            if is_first():
                temporary = path.with_name(path.name + ".tmp")
                with temporary.open("wb") as file:
                    np.savez(file, **arrays)
                temporary.replace(path)
            wait_for_all("responses of retention are written")
        try:
            with path.open("rb") as file:
                saved = np.load(file)
                self._cache = [(saved[f"response_{i}"], saved[f"mask_{i}"]) for i in range(len(self._teachers.others))]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path} cannot be read ({error}); delete it, and it is made again.") from error

    def _all_of(self, other: PackedView, i: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        # Rows past the end repeat the last example: same shapes, and nothing of them is kept.
        index_B = np.minimum(np.arange(first, first + self._batch_size), len(other.prompt_length_E) - 1)
        keys = retained_keys(example_keys(self._seed, 0, jnp.asarray(index_B)))
        params, prefix = self._teachers.now(None, i)
        rollout = self._draw(self._teachers.sample, params, prefix, other.rows(index_B), keys)
        return jax.device_get((rollout.response_BxR, rollout.mask_BxR))

    def _retained(self, state: TrainState, index_B: np.ndarray, step: int, keys: jax.Array) -> Retained:
        i = self._teachers.turn(step)
        rows = self._teachers.others[i].rows(index_B)
        if self._cache:
            response, mask = (x[index_B] for x in self._cache[i])
            sharding = self._sharding.retained
            cached = place((response, mask), (sharding.response_BxR, sharding.response_mask_BxR))
            return Retained(self._place(rows), *cached)
        params, prefix = self._teachers.now(state, i)
        rollout = self._draw(self._teachers.sample, params, prefix, rows, retained_keys(keys))
        return Retained(self._place(rows), *self._placed(rollout))

    def _answer(self, params: Params, rows: PackedView, keys: jax.Array) -> Rollout:
        """Responses of the student."""
        params = self._answering.layout(params)
        prefix = self._answering.encode(params, jnp.asarray(rows.prefix_C))
        return self._draw(self._sample, params, prefix, rows, keys)

    def _draw(self, sample, params: Params, prefix: list[Past], rows: PackedView, keys: jax.Array) -> Rollout:
        active_B = np.ones(len(rows.prompt_length_E), bool)
        return sample(params, prefix, rows.prompt_ExP, rows.prompt_length_E, active_B, keys, self._sampling)

    def _placed(self, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
        """Responses and masks where the step wants them."""
        where = (self._sharding.response_BxR, self._sharding.response_mask_BxR)
        return jax.device_put((rollout.response_BxR, rollout.mask_BxR), where)

    def _texts(self, rollout: Rollout) -> list[str]:
        response_BxR, mask_BxR = jax.device_get((rollout.response_BxR[: self._shown], rollout.mask_BxR[: self._shown]))
        return [self._decode(response[mask]) for response, mask in zip(response_BxR, mask_BxR, strict=True)]

    def _place(self, rows: PackedView) -> View:
        view = View(rows.prefix_C, rows.prompt_ExP, rows.prompt_length_E)
        return place(view, self._sharding.no_context)


def retained_keys(keys: jax.Array) -> jax.Array:
    """The keys of the same rows' responses under another context."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, _RETAINED)
