"""Paired evaluation: the same items and seeds in every view, one line per item and view on disk."""

import dataclasses
import json
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from nca_jax.data.chat import ChatFormat, PackedView, pack_view
from nca_jax.data.pipeline import encode_pairs, fitting
from nca_jax.domains.base import Domain, Example, Probe, Score
from nca_jax.metrics import accuracy, paired_metrics
from nca_jax.models.decoder import Params, Past
from nca_jax.rollout import Rollout, Sampling, example_keys

# The two views of the training context, and the probe that is reported as other_context.
NO_CONTEXT, WITH_CONTEXT, IRRELEVANT = "no_context", "with_context", "irrelevant"


@dataclasses.dataclass(frozen=True)
class EvaluationView:
    """Prompts of all items in one view, with this view's idea of a right answer."""

    name: str
    view: PackedView
    score: Callable[[Example, str], Score]


@dataclasses.dataclass(frozen=True)
class ItemResult:
    """What one item's response in one view was."""

    id: str
    view: str
    prompt: str
    response: str
    answer: str | None  # as read from the response
    correct: bool
    length: int  # tokens, EOS included
    truncated: bool


def build_views(
    chat: ChatFormat, domain: Domain, examples: Sequence[Example], max_prompt_tokens: int, too_long: str
) -> tuple[list[Example], list[EvaluationView]]:
    """No context, the training context, and the domain's probes, in this order, over the examples that fit in all.

    Raises:
      UserError: as `pipeline.fitting`.
    """
    probes = [Probe(WITH_CONTEXT, domain.context, domain.score), *domain.probes()]
    encoded = [encode_pairs(chat, domain, examples, probe.context) for probe in probes]
    kept = fitting(examples, encoded, max_prompt_tokens, too_long)
    views = [EvaluationView(NO_CONTEXT, pack_view([encoded[0][i].no_context for i in kept]), domain.score)]
    for probe, pairs in zip(probes, encoded, strict=True):
        views.append(EvaluationView(probe.name, pack_view([pairs[i].with_context for i in kept]), probe.score))
    return [examples[i] for i in kept], views


class Evaluator:
    """Samples and scores every view; holds compiled functions and prompts, no results.

    Args:
      sample: from `rollout.make_sampler`.
      encode: jitted (params, prefix_C) -> list with the prefix's keys and values.
      decode: response ids, EOS included -> text without special tokens.
      examples, views: the items, and their prompts in each view.
      batch_size: rows sampled at once; the last batch is filled up with rows that are not counted.
      seed, sampling: the same in every view and at every step.
    """

    def __init__(
        self,
        *,
        sample: Callable[..., Rollout],
        encode: Callable[[Params, jax.Array], list[Past]],
        decode: Callable[[Sequence[int]], str],
        examples: Sequence[Example],
        views: Sequence[EvaluationView],
        batch_size: int,
        seed: int,
        sampling: Sampling,
    ):
        self._sample, self._encode, self._decode = sample, encode, decode
        self._examples, self._views = examples, views
        self._batch_size, self._seed, self._sampling = batch_size, seed, sampling

    def __call__(self, params: Params) -> dict[str, list[ItemResult]]:
        """View name -> one result per item, in the items' order."""
        return {view.name: self._run_view(params, view) for view in self._views}

    def _run_view(self, params: Params, view: EvaluationView) -> list[ItemResult]:
        prefix = self._encode(params, jnp.asarray(view.view.prefix_C))
        results = []
        for start in range(0, len(self._examples), self._batch_size):
            # Rows past the end repeat the last item and are inactive: same shapes, and nothing of them is counted.
            item = np.arange(start, start + self._batch_size)
            rows = view.view.rows(np.minimum(item, len(self._examples) - 1))
            rollout = jax.device_get(
                self._sample(
                    params,
                    prefix,
                    rows.prompt_ExP,
                    rows.prompt_length_E,
                    item < len(self._examples),
                    example_keys(self._seed, 0, jnp.asarray(item)),
                    self._sampling,
                )
            )
            for i, example in enumerate(self._examples[start : start + self._batch_size]):
                text = self._decode(rollout.response_BxR[i][rollout.mask_BxR[i]])
                correct, answer = view.score(example, text)
                results.append(
                    ItemResult(
                        id=example.id,
                        view=view.name,
                        prompt=example.prompt,
                        response=text,
                        answer=answer,
                        correct=correct,
                        length=int(rollout.mask_BxR[i].sum()),
                        truncated=bool(rollout.truncated_B[i]),
                    )
                )
        return results


def summarise(results: dict[str, list[ItemResult]]) -> dict[str, float]:
    """Metrics of an evaluation, see `metrics.paired_metrics`, and the accuracy of each further view by its name."""
    without, with_context = results[NO_CONTEXT], results[WITH_CONTEXT]
    summary = paired_metrics(
        [r.correct for r in without],
        [r.correct for r in with_context],
        [r.length for r in without],
        [r.length for r in with_context],
    )
    for name, items in results.items():
        if name not in (NO_CONTEXT, WITH_CONTEXT):
            summary[name] = accuracy([r.correct for r in items])
        summary[f"truncated_{name}"] = sum(r.truncated for r in items) / len(items)
    return summary


def write_items(path: epath.Path, results: dict[str, list[ItemResult]]) -> None:
    """One JSON line per item and view, complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(item), ensure_ascii=False) for items in results.values() for item in items]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)
