"""The evaluation that a config describes, and what a run logs of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ml_collections import ConfigDict

from nca_jax.assembly import Answering
from nca_jax.axes import parts
from nca_jax.data.chat import ChatFormat, Message, PackedView, ViewPair, pack_view
from nca_jax.data.pipeline import encode_pairs, fitting
from nca_jax.domains.base import Domain, Example, Probe
from nca_jax.domains.variants import find_probes
from nca_jax.evaluator import Evaluator, PairedEvaluator
from nca_jax.game_evaluator import GameEvaluator
from nca_jax.items import NO_CONTEXT, WITH_CONTEXT, ItemResult
from nca_jax.metrics import accuracy, paired_metrics
from nca_jax.multi_turn import Player
from nca_jax.rollout import Sampling


def make_evaluator(
    config: ConfigDict,
    domain: Domain,
    chat: ChatFormat,
    answering: Answering,
    decode: Callable[[Sequence[int]], str],
    probes: Sequence[Probe] | None = None,
    prefix_multiple: int = 1,
) -> PairedEvaluator:
    """The evaluation a config describes.

    Args:
      config, domain, chat, answering: of the job.
      decode: response ids -> text to be judged.
      probes: the views with a context; default: the training context and those of config.evaluation.contexts.
      prefix_multiple: shared prefixes are cut to a multiple of so many tokens; what is left leads every prompt. For
        many contexts in turn: fewer lengths, fewer compilations.

    Raises:
      UserError: as `find_probes` and `build_views`, or a split that the domain does not have.
    """
    settings = config.evaluation
    probes = find_probes(domain, settings.contexts) if probes is None else probes
    examples = domain.examples(settings.split)[: settings.max_items]
    multiple = math.lcm(prefix_multiple, parts(answering.mesh, "prefix"))
    devices = parts(answering.mesh, "batch")
    shared = {
        "domain": domain,
        "probes": {NO_CONTEXT: None, **{probe.name: probe for probe in probes}},
        "divergence": answering.divergence,
        "compared": {"none": (), "with_context": (WITH_CONTEXT,), "all": [p.name for p in probes]}[settings.divergence],
        "samples": settings.samples,
        "seed": config.seed,
    }
    drawing = {
        "sample": answering.sampler(settings.top_k),
        "encode": answering.encode,
        "decode": decode,
        "sampling": Sampling(float(settings.temperature), float(settings.top_p)),
    }
    if not domain.is_multi_turn:
        limit = (config.data.max_prompt_tokens, config.data.too_long)
        multiples = (config.data.length_multiple, multiple)
        examples, views = build_views(chat, domain, examples, probes, *limit, *multiples)
        rows = _rows(settings.batch_size, len(examples), devices)
        return Evaluator(**shared, **drawing, examples=examples, views=views, batch_size=rows)
    # What leads the first and the last prompts leads all of them.
    prompts = [prompt(e) for e in examples for prompt in (domain.messages, domain.last_messages)]
    rows = _rows(settings.batch_size, len(examples), devices)
    players = {}
    for name, probe in shared["probes"].items():
        context = probe and probe.context
        ids = [chat.encode(context.apply(messages) if context else messages) for messages in prompts]
        players[name] = Player(
            domain,
            chat,
            context,
            pack_view(ids, prefix_multiple=multiple).prefix_C,
            **drawing,
            rows=rows,
            devices=devices,
            length_multiple=config.data.length_multiple,
            max_prompt_tokens=config.data.max_prompt_tokens,
        )
    return GameEvaluator(**shared, players=players, examples=examples, batch_size=rows)


def build_views(
    chat: ChatFormat,
    domain: Domain,
    examples: Sequence[Example],
    probes: Sequence[Probe],
    max_prompt_tokens: int,
    too_long: str,
    length_multiple: int = 16,
    prefix_multiple: int = 1,
) -> tuple[list[Example], dict[str, PackedView]]:
    """The examples that fit in all views, and their prompts without a context and with that of each probe.

    Args as in `make_evaluator`. An empty context is encoded as it is; all others are proved to be in their view.

    Raises:
      UserError: as `pipeline.fitting`.
    """
    prompts = [domain.messages(example) for example in examples]
    encoded = [_pairs(chat, prompts, probe) for probe in probes]
    kept = fitting(examples, encoded, max_prompt_tokens, too_long)
    pack = partial(pack_view, length_multiple=length_multiple, prefix_multiple=prefix_multiple)
    views = {NO_CONTEXT: pack([encoded[0][i].no_context for i in kept])}
    for probe, pairs in zip(probes, encoded, strict=True):
        views[probe.name] = pack([pairs[i].with_context for i in kept])
    return [examples[i] for i in kept], views


def _pairs(chat: ChatFormat, prompts: Sequence[Sequence[Message]], probe: Probe) -> list[ViewPair]:
    if probe.context.texts():
        return encode_pairs(chat, prompts, probe.context)
    return [ViewPair(chat.encode(messages), chat.encode(probe.context.apply(messages))) for messages in prompts]


def _rows(batch_size: int, items: int, devices: int) -> int:
    """Rows sampled at once, such that the devices can share them out; those too many are inactive."""
    return -(-min(batch_size, items) // devices) * devices


def summarise(results: Mapping[str, Sequence[ItemResult]]) -> dict[str, float]:
    """What a run logs of an evaluation: figures without intervals.

    Returns:
      `metrics.paired_metrics`; the accuracy of each further view by its name; for each view the share of responses that
      were cut ("truncated_…"), and of those that were not cut and hold no answer ("no_answer_…"): neither is the same
      as a wrong answer; and where it is measured the mean over the items of their "divergence_…", nats a token.
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
        if "divergence" in found:
            summary[f"divergence_{name}"] = found["divergence"]
    return summary


def summarise_view(items: Sequence[ItemResult]) -> dict[str, float]:
    """One view alone: "accuracy", its "items", the shares "truncated" (cut) and "no_answer" (not cut, and no answer in
    it), the mean "length" in tokens, and the mean "divergence" where it is known."""
    nats = [r.divergence for r in items if r.divergence is not None]
    return {
        "accuracy": accuracy([r.correct for r in items]),
        "items": len(items),
        "truncated": sum(r.truncated for r in items) / len(items),
        "no_answer": sum(r.answer is None and not r.truncated for r in items) / len(items),
        "length": sum(r.length for r in items) / len(items),
        **({"divergence": sum(nats) / len(nats)} if nats else {}),
    }
