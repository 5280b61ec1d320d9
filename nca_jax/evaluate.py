"""Paired evaluation: the same items and seeds in every view, one line per item and view on disk."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from nca_jax.assembly import Answering
from nca_jax.axes import parts
from nca_jax.data.chat import ChatFormat, PackedView, pack_view
from nca_jax.data.pipeline import encode_pairs, fitting
from nca_jax.domains.base import Domain, Example, Probe, Score
from nca_jax.files import write_text
from nca_jax.games.episode import Episode
from nca_jax.metrics import accuracy, paired_metrics
from nca_jax.models.decoder import Params, Past
from nca_jax.multi_turn import Player, TurnTokens, transcript
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
    truncated: bool  # cut at the longest response


@dataclasses.dataclass(frozen=True)
class GameResult(ItemResult):
    """What one game in one view was: `prompt` is its board, `answer` its ending, `length` that of all turns."""

    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def all_probes(domain: Domain) -> list[Probe]:
    """The views with a context that every evaluation has: the training context, and the domain's others."""
    return [Probe(WITH_CONTEXT, domain.context, domain.score), *domain.probes()]


def build_views(
    chat: ChatFormat,
    domain: Domain,
    examples: Sequence[Example],
    probes: Sequence[Probe],
    max_prompt_tokens: int,
    too_long: str,
    prefix_multiple: int = 1,
) -> tuple[list[Example], list[EvaluationView]]:
    """No context and then each probe, over the examples that fit in all; arguments as in `make_evaluator`.

    Raises:
      UserError: as `pipeline.fitting`.
    """
    prompts = [domain.messages(example) for example in examples]
    encoded = [encode_pairs(chat, prompts, probe.context) for probe in probes]
    kept = fitting(examples, encoded, max_prompt_tokens, too_long)
    pack = partial(pack_view, prefix_multiple=prefix_multiple)
    views = [EvaluationView(NO_CONTEXT, pack([encoded[0][i].no_context for i in kept]), domain.score)]
    for probe, pairs in zip(probes, encoded, strict=True):
        views.append(EvaluationView(probe.name, pack([pairs[i].with_context for i in kept]), probe.score))
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

    @property
    def views(self) -> list[str]:
        """Names of the views."""
        return [view.name for view in self._views]

    def __call__(self, params: Params) -> dict[str, list[ItemResult]]:
        """View name -> one result per item, in the items' order; the weights are in the decode layout."""
        return {name: self.view(params, name) for name in self.views}

    def view(self, params: Params, name: str) -> list[ItemResult]:
        """One view alone."""
        (view,) = (view for view in self._views if view.name == name)
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


class GameEvaluator:
    """Plays the same games in every view.

    Args:
      players: view name -> who plays.
      examples: the games.
      seed: with `rollout.example_keys`, the same keys in every view and at every step.
    """

    def __init__(self, players: Mapping[str, Player], examples: Sequence[Example], seed: int):
        self._players, self._examples, self._seed = players, examples, seed

    @property
    def views(self) -> list[str]:
        """Names of the views."""
        return list(self._players)

    def __call__(self, params: Params) -> dict[str, list[GameResult]]:
        """View name -> one result per game, in the examples' order; the weights are in the decode layout."""
        return {name: self.view(params, name) for name in self.views}

    def view(self, params: Params, name: str) -> list[GameResult]:
        """One view alone."""
        keys = example_keys(self._seed, 0, jnp.arange(len(self._examples)))
        episodes, turns = self._players[name].play(params, self._examples, keys)
        return [
            _game_result(name, example, episode, [turn for turn in turns if turn.game == i])
            for i, (example, episode) in enumerate(zip(self._examples, episodes, strict=True))
        ]


def make_evaluator(
    config: ConfigDict,
    domain: Domain,
    chat: ChatFormat,
    answering: Answering,
    decode: Callable[[Sequence[int]], str],
    probes: Sequence[Probe] | None = None,
    prefix_multiple: int = 1,
) -> Evaluator | GameEvaluator:
    """The evaluation a config describes.

    Args:
      config, domain, chat, answering: of the job.
      decode: response ids -> text to be judged.
      probes: the views with a context; default: `all_probes`.
      prefix_multiple: shared prefixes are cut to a multiple of so many tokens; what is left leads every prompt. For
        many contexts in turn: fewer lengths, fewer compilations.

    Raises:
      UserError: as `build_views`, or a split that the domain does not have.
    """
    settings = config.evaluation
    probes = all_probes(domain) if probes is None else probes
    examples = domain.examples(settings.split)[: settings.max_items]
    sample = answering.sampler(settings.top_k)
    sampling = Sampling(float(settings.temperature), float(settings.top_p))
    multiple = math.lcm(prefix_multiple, parts(answering.mesh, "prefix"))
    devices = parts(answering.mesh, "batch")
    if not domain.is_multi_turn:
        limit = (config.data.max_prompt_tokens, config.data.too_long)
        examples, views = build_views(chat, domain, examples, probes, *limit, multiple)
        rows = _rows(settings.batch_size, len(examples), devices)
        return Evaluator(
            sample=sample,
            encode=answering.encode,
            decode=decode,
            examples=examples,
            views=views,
            batch_size=rows,
            seed=config.seed,
            sampling=sampling,
        )
    # What leads the first and the last prompts leads all of them.
    prompts = [prompt(e) for e in examples for prompt in (domain.messages, domain.last_messages)]
    players = {}
    for name, context in {NO_CONTEXT: None, **{probe.name: probe.context for probe in probes}}.items():
        ids = [chat.encode(context.apply(messages) if context else messages) for messages in prompts]
        players[name] = Player(
            domain,
            chat,
            context,
            pack_view(ids, prefix_multiple=multiple).prefix_C,
            sample=sample,
            encode=answering.encode,
            decode=decode,
            sampling=sampling,
            rows=_rows(settings.batch_size, len(examples), devices),
            devices=devices,
            length_multiple=config.data.length_multiple,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
    return GameEvaluator(players, examples, config.seed)


def _rows(batch_size: int, items: int, devices: int) -> int:
    """Rows sampled at once, such that the devices can share them out; those too many are inactive."""
    return -(-min(batch_size, items) // devices) * devices


def _game_result(view: str, example: Example, episode: Episode, turns: Sequence[TurnTokens]) -> GameResult:
    return GameResult(
        id=example.id,
        view=view,
        prompt=example.prompt,
        response=transcript(episode),
        answer=episode.ending,
        correct=episode.won,
        length=sum(int(turn.mask_R.sum()) for turn in turns),
        truncated=any(turn.truncated for turn in turns),
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


def summarise(results: dict[str, list[ItemResult]]) -> dict[str, float]:
    """Metrics of an evaluation.

    Returns:
      `metrics.paired_metrics`; the accuracy of each further view by its name; and for each view the share of responses
      that were cut ("truncated_…"), and of those that were not cut and hold no answer ("no_answer_…"). Neither is the
      same as a wrong answer.
    """
    without, with_context = results[NO_CONTEXT], results[WITH_CONTEXT]
    summary = paired_metrics(
        [r.correct for r in without],
        [r.correct for r in with_context],
        [r.length for r in without],
        [r.length for r in with_context],
    )
    for name, items in results.items():
        found = summarise_view(items)
        if name not in (NO_CONTEXT, WITH_CONTEXT):
            summary[name] = found["accuracy"]
        summary[f"truncated_{name}"] = found["truncated"]
        summary[f"no_answer_{name}"] = found["no_answer"]
    return summary


def summarise_view(items: Sequence[ItemResult]) -> dict[str, float]:
    """One view alone: "accuracy", its "items", the shares "truncated" (cut) and "no_answer" (not cut, and no answer in
    it), and the mean "length" in tokens."""
    return {
        "accuracy": accuracy([r.correct for r in items]),
        "items": len(items),
        "truncated": sum(r.truncated for r in items) / len(items),
        "no_answer": sum(r.answer is None and not r.truncated for r in items) / len(items),
        "length": sum(r.length for r in items) / len(items),
    }


def write_items(path: epath.Path, results: dict[str, list[ItemResult]]) -> None:
    """One JSON line per item and view, complete or not there at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(dataclasses.asdict(item), ensure_ascii=False) for items in results.values() for item in items]
    write_text(path, "\n".join(lines) + "\n")
