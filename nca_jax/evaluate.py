"""The command that evaluates any checkpoint in many views.

    python -m nca_jax.evaluate --config=configs/conventions.py --checkpoint=runs/mine
    python -m nca_jax.evaluate --config=configs/medmcqa.py:qwen3_8b --checkpoint=Qwen/Qwen3-8B \\
        --contexts=paraphrased,other_task,mine.txt --config.evaluation.samples=4

The checkpoint is a run's workdir, an exported or imported model, or anything else that config.model.source takes; the
config says task, context, sampling and mesh. Every item is answered without the context, with it, and with each further
context. The same command again continues what was stopped, with the same answers.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict
from tqdm import tqdm

from nca_jax import processes, settings
from nca_jax.command import config_label, parse_with_config, set_up_logging
from nca_jax.domains import domain_of
from nca_jax.domains.base import Probe, context_file
from nca_jax.domains.variants import find_probes, probes_by_name
from nca_jax.environment import environment
from nca_jax.errors import UserError
from nca_jax.evaluation import make_evaluator
from nca_jax.evaluator import PairedEvaluator, Part
from nca_jax.files import is_bucket, write_json, write_text
from nca_jax.items import ItemResult, as_line
from nca_jax.metrics import summary
from nca_jax.session import open_session
from nca_jax.stored_model import StoredModel, find_model

ALL = "all"


@dataclasses.dataclass
class _Lines:
    """The item lines of an evaluation that goes on, part by part; only the first process writes.

    Attributes:
      path: items.jsonl.
      parts: of the whole evaluation.
      views: their number.
      lines: those of finished parts.
      finished: number of these parts.
    """

    path: epath.Path
    parts: Sequence[Part]
    views: int
    lines: list[str] = dataclasses.field(default_factory=list)
    finished: int = 0

    def resume(self) -> None:
        """Reads what there is, and drops what a killed process has left of an unfinished part."""
        if not self.path.exists():
            return
        # A last line without its end is of a process that was killed while it wrote.
        *lines, _unfinished = self.path.read_text().split("\n")
        ends = list(itertools.accumulate(len(part.items) * self.views for part in self.parts))
        self.finished = sum(end <= len(lines) for end in ends)
        self.lines = [line + "\n" for line in lines[: max([0, *ends[: self.finished]])]]
        write_text(self.path, "".join(self.lines))

    def add(self, items: Sequence[ItemResult]) -> None:
        """Writes a finished part."""
        new = [as_line(item) for item in items]
        self.lines += new
        if is_bucket(self.path):  # where nothing can be appended
            write_text(self.path, "".join(self.lines))
            return
        with self.path.open("a") as file:
            file.write("".join(new))


def evaluate(config: ConfigDict, model: StoredModel, contexts: Sequence[str] | None, output: epath.Path) -> str:
    """Evaluates a checkpoint and leaves in `output`: items.jsonl, a line for each item, view and sample; summary.json,
    `metrics.summary` of them; evaluation.json, what was evaluated; and environment.json.

    Args:
      config: of the job.
      model: the checkpoint.
      contexts: further ones, as `variants.find_probes`; None: all that there are without a file.
      output: continued, if it holds a part of the same evaluation.

    Returns:
      A table to be shown.

    Raises:
      UserError: what cannot work, or `output` holds another evaluation.
    """
    domain = domain_of(config)
    if not domain.context.texts():
        raise UserError("the context is empty; set config.context.file, or leave it to the domain.")
    probes = find_probes(domain, list(probes_by_name(domain)) if contexts is None else contexts)
    session = open_session(config, model)
    evaluator = make_evaluator(config, domain, session.chat, session.answering, session.decode, probes)
    identity = {
        "checkpoint": model.path,
        "step": model.step,
        "config": _stored(config),
        "contexts": _described(probes),
    }
    lines = _Lines(output / "items.jsonl", evaluator.parts, len(evaluator.views))
    processes.in_first(lambda: _begin(output, identity, lines))
    _run(evaluator, session.params, lines, int(processes.of_first(np.int32(lines.finished))))
    found = summary([json.loads(line) for line in lines.lines]) if processes.is_first() else {}
    if processes.is_first():
        write_json(output / "summary.json", found)
    processes.wait_for_all("the evaluation is written")
    return table(found) if found else ""


def _begin(output: epath.Path, identity: dict[str, Any], lines: _Lines) -> None:
    path = output / "evaluation.json"
    if path.exists() and json.loads(path.read_text()) != json.loads(json.dumps(identity)):
        raise UserError(f"{output} holds another evaluation; choose another --output, or delete it.")
    output.mkdir(parents=True, exist_ok=True)
    write_json(path, identity)
    write_json(output / "environment.json", environment())
    lines.resume()


def _run(evaluator: PairedEvaluator, params: Any, lines: _Lines, finished: int) -> None:
    parts, first = evaluator.parts, processes.is_first()
    total, done = len(parts) * len(evaluator.views), finished * len(evaluator.views)
    bar = tqdm(total=total, initial=done, unit="batch", disable=None if first else True, dynamic_ncols=True)
    with bar:
        for part in parts[finished:]:
            items: list[ItemResult] = []
            for view, results in evaluator.part(params, part, before=bar.set_postfix_str):
                items += results
                done += 1
                bar.update()
                if bar.disable and first:  # not on a terminal: a line each
                    right = sum(result.correct for result in results)
                    print(f"batch {done}/{total} {view}: {right} of {len(results)} right", file=sys.stderr)
            if first:
                lines.add(items)


def table(found: dict[str, Any]) -> str:
    """`metrics.summary` as lines of text: every view, and the pair of views that the context makes."""
    views = found["views"]
    width = max(map(len, views))
    rows = [f"{'view':{width}}  {'right':>20}  {'tokens':>7}  {'cut':>5}  {'no answer':>9}  {'KL':>7}"]
    for name, view in views.items():
        nats = (view["divergence"] or {}).get("value")
        rows.append(
            f"{name:{width}}  {_shown(view['accuracy']):>20}  {view['length']['value']:7.1f}  "
            f"{view['truncated']['value']:5.2f}  {view['no_answer']['value']:9.2f}  "
            f"{'' if nats is None else format(nats, '7.4f'):>7}"
        )
    pair = found["pairs"]["with_context"]
    counts = pair["counts"]
    rows += [
        "",
        f"harm           {_shown(pair['harm'])}: {counts['harmed']} of {counts['harmed'] + counts['both']} that are "
        "right without the context",
        f"help           {_shown(pair['help'])}",
        f"both right     {_shown(pair['both'])}",
        f"length change  {_shown(pair['length_change'])}",
        f"with - without {_shown(pair['difference'])}, p = {pair['p']:.3g} ({pair['test']})",
        f"regime {pair['regime']['letter']}: {pair['regime']['sentence']} Rule: {pair['regime']['rule']}",
    ]
    return "\n".join(rows)


def _shown(estimate: dict[str, Any]) -> str:
    if estimate["value"] is None:
        return "-"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _described(probes: Sequence[Probe]) -> dict[str, Any]:
    return {
        probe.name: {
            "messages": [dict(message) for message in context_file(probe.context)],
            "scored_by": "own" if probe.expected else "task",
        }
        for probe in probes
    }


def _stored(config: ConfigDict) -> dict[str, Any]:
    """The config without what changes where and not what is computed."""
    return {key: value for key, value in config.to_dict().items() if key not in ("mesh", "log", "profile", "watchdog")}


def default_output(model: StoredModel, label: str) -> str:
    """Beside a run's other results; of any other checkpoint among the runs."""
    if model.step is not None:
        return f"{model.path.rstrip('/')}/evaluate_step_{model.step}"
    return f"runs/evaluate_{label}_{epath.Path(model.path).name}"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.evaluate", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--checkpoint", required=True, help="workdir of a run, or as config.model.source")
    parser.add_argument("--step", type=int, help="of a workdir's checkpoints; default: the newest")
    contexts_help = "further contexts: names of the domain and of domains/variants.py, files, or empty for none"
    parser.add_argument("--contexts", default=ALL, metavar="NAME,...", help=f"{contexts_help}; default: {ALL}")
    parser.add_argument("--output", help="directory, continued if it holds a part; default: beside the checkpoint")
    try:
        options, config, name = parse_with_config(parser, arguments)
        processes.join()
        settings.check(config)
        model = find_model(options.checkpoint, options.step)
        output = options.output or default_output(model, config_label(name))
        contexts = None if options.contexts == ALL else [c for c in options.contexts.split(",") if c]
        shown = evaluate(config, model, contexts, epath.Path(output))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if processes.is_first():
        print(shown)
        print(f"{output}: items.jsonl, summary.json")
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv[1:]))
