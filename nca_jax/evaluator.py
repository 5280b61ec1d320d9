"""Paired evaluation: the same items and seeds in every view, a batch of items at a time."""

import abc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nca_jax.data.chat import PackedView
from nca_jax.domains.base import Domain, Example, Probe
from nca_jax.items import NO_CONTEXT, ItemResult
from nca_jax.models.decoder import Params, Past
from nca_jax.rollout import Rollout, Sampling, example_keys
from nca_jax.view_divergence import ViewDivergence
from nca_jax.views import View

Results = dict[str, list[ItemResult]]


class Part(NamedTuple):
    """A piece of an evaluation that is done in one go, in all views: these items, this response of each."""

    sample: int
    items: range


class PairedEvaluator(abc.ABC):
    """What evaluations of questions and of games have in common.

    Args:
      probes: view name -> its context and scoring, the no-context view first, where there is None.
      examples: the items.
      batch_size: items in a part.
      samples: responses of each item in each view.
    """

    def __init__(self, probes: Mapping[str, Probe | None], examples: Sequence[Example], batch_size: int, samples: int):
        self._probes, self._examples = probes, examples
        self._batch_size, self._samples = batch_size, samples

    @property
    def views(self) -> list[str]:
        """Names of the views."""
        return list(self._probes)

    @property
    def parts(self) -> list[Part]:
        """All of an evaluation, in the order in which it is done; what they give does not depend on that."""
        starts = range(0, len(self._examples), self._batch_size)
        ends = [min(start + self._batch_size, len(self._examples)) for start in starts]
        return [
            Part(sample, range(start, end))
            for sample in range(self._samples)
            for start, end in zip(starts, ends, strict=True)
        ]

    def __call__(
        self, params: Params, views: Sequence[str] | None = None, before: Callable[[str], None] = lambda view: None
    ) -> Results:
        """View name -> its results, in the order of the samples and items.

        Args:
          params: in the decode layout.
          views: some of them only; default: all.
          before: called before each view of each part, with its name.
        """
        results: Results = {name: [] for name in views or self.views}
        for part in self.parts:
            for name, items in self.part(params, part, views, before):
                results[name] += items
        return results

    def part(
        self,
        params: Params,
        part: Part,
        views: Sequence[str] | None = None,
        before: Callable[[str], None] = lambda view: None,
    ) -> Iterator[tuple[str, list[ItemResult]]]:
        """The results of one part in one view after the other; arguments as `__call__`."""
        return self._part(params, part, views or self.views, before)

    @abc.abstractmethod
    def _part(
        self, params: Params, part: Part, views: Sequence[str], before: Callable[[str], None]
    ) -> Iterator[tuple[str, list[ItemResult]]]: ...

    def _expected(self, view: str, example: Example) -> str:
        probe = self._probes[view]
        return probe.expected(example) if probe and probe.expected else example.answer


class Evaluator(PairedEvaluator):
    """Samples and scores every view; holds compiled functions and prompts, no results.

    Args:
      sample: from `rollout.make_sampler`.
      encode: jitted (params, prefix_C) -> list with the prefix's keys and values.
      divergence: from `view_divergence.make_view_divergence`.
      compared: the views whose divergence from the no-context view is measured.
      decode: response ids, EOS included -> text without special tokens.
      domain: scores the view without a context.
      examples, views: the items, and their prompts in each view.
      probes: as in PairedEvaluator.
      batch_size: rows sampled at once; the last batch is filled up with rows that are not counted.
      samples: responses of each item.
      seed, sampling: the same in every view and at every step.
    """

    def __init__(
        self,
        *,
        sample: Callable[..., Rollout],
        encode: Callable[[Params, jax.Array], list[Past]],
        divergence: ViewDivergence,
        compared: Collection[str],
        decode: Callable[[Sequence[int]], str],
        domain: Domain,
        examples: Sequence[Example],
        views: Mapping[str, PackedView],
        probes: Mapping[str, Probe | None],
        batch_size: int,
        samples: int,
        seed: int,
        sampling: Sampling,
    ):
        super().__init__(probes, examples, batch_size, samples)
        self._sample, self._encode, self._decode = sample, encode, decode
        self._divergence, self._compared = divergence, compared
        self._domain, self._packed, self._seed, self._sampling = domain, views, seed, sampling

    def _part(
        self, params: Params, part: Part, views: Sequence[str], before: Callable[[str], None]
    ) -> Iterator[tuple[str, list[ItemResult]]]:
        # Rows past the end repeat the last item and are inactive: same shapes, and nothing of them is counted.
        item = np.arange(part.items.start, part.items.start + self._batch_size)
        active, index = item < part.items.stop, np.minimum(item, part.items.stop - 1)
        keys = example_keys(self._seed, part.sample, jnp.asarray(item))
        # Of the view without a context: what predicts its response, and the response.
        without: tuple[jax.Array, Rollout] | None = None
        for name in views:
            before(name)
            rows = self._packed[name].rows(index)
            view = View(rows.prefix_C, rows.prompt_ExP, rows.prompt_length_E)
            prefix = self._encode(params, jnp.asarray(rows.prefix_C))
            rollout = jax.device_get(
                self._sample(params, prefix, view.prompt_BxP, view.prompt_length_B, active, keys, self._sampling)
            )
            divergence: list[float | None] = [None] * len(part.items)
            if name == NO_CONTEXT and self._compared:
                without = self._divergence.hidden(params, view, prefix, rollout.response_BxR), rollout
            elif without and name in self._compared:
                x_BxRxD, drawn = without
                c_BxRxD = self._divergence.hidden(params, view, prefix, drawn.response_BxR)
                nats_BxR = jax.device_get(self._divergence.compare(params, x_BxRxD, c_BxRxD, drawn.mask_BxR))
                divergence = [mean_or_none(row[mask]) for row, mask in zip(nats_BxR, drawn.mask_BxR, strict=True)]
            results = [
                self._result(name, part.sample, self._examples[i], rollout, row, divergence[row])
                for row, i in enumerate(part.items)
            ]
            yield name, results

    def _result(self, view: str, sample: int, example: Example, rollout: Rollout, row: int, divergence) -> ItemResult:
        text = self._decode(rollout.response_BxR[row][rollout.mask_BxR[row]])
        probe = self._probes[view]
        correct, answer = (probe or self._domain).score(example, text)
        return ItemResult(
            id=example.id,
            view=view,
            prompt=example.prompt,
            response=text,
            answer=answer,
            correct=correct,
            length=int(rollout.mask_BxR[row].sum()),
            truncated=bool(rollout.truncated_B[row]),
            sample=sample,
            expected=self._expected(view, example),
            group=example.group,
            divergence=divergence,
        )


def mean_or_none(values_N: np.ndarray) -> float | None:
    """The mean of an array; None of an empty one."""
    return float(values_N.mean()) if len(values_N) else None
