"""The command that looks inside models: how training has changed representations, gradients and weights.

    python -m nca_jax.analysis WORKDIR [WORKDIR ...]
    python -m nca_jax.analysis --config=FILE[:SETTING] --base=MODEL CHECKPOINT [CHECKPOINT ...]

The first form is for runs: items, context and model are those of their config. The second is for checkpoints of
whatever origin: a config says on which items and with which context they are looked at; of games, at the first turns.
All checkpoints are compared with the base model, from which training began. A study leaves DIR/<study>.csv and
DIR/<study>.png, and its sentence in DIR/analysis.json, which keeps what earlier commands found by other studies.

    representations  how alike the hidden states of the two views are, layer by layer
    gradients        the angles between the gradients of OPD, NCA and fidelity with the context
    updates          where the weights have moved, and the angles between the updates of several runs
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from etils import epath
from ml_collections import ConfigDict

from nca_jax import memory, processes, settings
from nca_jax.analysis import gradients, representations, updates
from nca_jax.analysis.common import Checkpoint, Finding, as_csv, open_subject
from nca_jax.command import parse_with_config, set_up_logging
from nca_jax.errors import UserError
from nca_jax.files import read_json, write_json, write_text
from nca_jax.main import leave
from nca_jax.plotting import save
from nca_jax.stored_model import find_model

STUDIES = ("representations", "gradients", "updates")
BASE = "base"  # what the base model is called


class Task(NamedTuple):
    """What the command line asks for: `labels` are what the checkpoints at `paths` are called."""

    config: ConfigDict
    base: str
    paths: list[str]
    labels: list[str]
    studies: list[str]
    step: int | None
    steps: list[int]  # those whose gradients are looked at; none: `step`
    items: int
    output: epath.Path
    command: list[str]


def read_task(arguments: Sequence[str]) -> Task:
    """Reads the command line.

    Raises:
      UserError: it is wrong, or the runs do not belong together.
    """
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.analysis",
        description=f"{__doc__.splitlines()[0]} Options of config files are given as --config=… and --config.KEY=….",
        allow_abbrev=False,
    )
    parser.add_argument("paths", nargs="+", metavar="CHECKPOINT", help="workdirs; with --config any models")
    parser.add_argument("--studies", default=",".join(STUDIES), metavar="NAME,...", help="default: %(default)s")
    parser.add_argument("--base", metavar="MODEL", help="from which training began; default: config.model.source")
    parser.add_argument("--step", type=int, help="checkpoint of each workdir; default: the newest")
    parser.add_argument("--steps", default="", metavar="N,...", help="those for the gradients; default: as --step")
    parser.add_argument("--items", type=int, default=32, help="of the evaluation split; default: %(default)s")
    parser.add_argument("--output", metavar="DIR", help="default: <first CHECKPOINT>/analysis")
    options, rest = parser.parse_known_args(arguments)
    studies = options.studies.split(",")
    if unknown := [name for name in studies if name not in STUDIES]:
        raise UserError(f"--studies has {unknown[0]!r}; it is one or several of {','.join(STUDIES)}.")
    if options.items < 1:
        raise UserError(f"--items is {options.items}; it must be at least 1.")
    try:
        steps = [int(step) for step in dict.fromkeys(filter(None, options.steps.split(",")))]
    except ValueError as error:
        raise UserError(f"--steps={options.steps} is wrong; write such as --steps=10,20.") from error
    if any(argument.startswith("--config") for argument in rest):
        options, config, _ = parse_with_config(parser, arguments)
        settings.check(config)
        labels = _distinct([_last(path) for path in options.paths], options.paths)
    elif rest:
        raise UserError(f"unexpected argument {rest[0]!r}; python -m nca_jax.analysis --help lists the options.")
    else:
        config, labels = config_of_runs(options.paths)
    return Task(
        config,
        options.base or config.model.source,
        options.paths,
        labels,
        studies,
        options.step,
        steps,
        options.items,
        epath.Path(options.output or epath.Path(options.paths[0]) / "analysis"),
        ["python", "-m", "nca_jax.analysis", *arguments],
    )


def config_of_runs(workdirs: Sequence[str]) -> tuple[ConfigDict, list[str]]:
    """The config of the first run, with the context that was distilled, and a label for each.

    Raises:
      UserError: a workdir that is none, or runs of another model, domain, chat format or context.
    """
    configs, contexts = zip(*map(_read_run, workdirs), strict=True)
    config = configs[0]
    for workdir, other, context in zip(workdirs, configs, contexts, strict=True):
        compared = {
            "config.model.source": (config.model.source, other.model.source),
            "config.domain": (config.domain, other.domain),
            "config.chat": (config.chat, other.chat),
            "their context": (contexts[0], context),
        }
        for what, (ours, theirs) in compared.items():
            if ours != theirs:
                raise UserError(f"{workdirs[0]} and {workdir} differ in {what}; analyse them one by one.")
    # The run's own copy: the file that the config names may be gone, or another one by now.
    config.context.file, config.context.text = str(epath.Path(workdirs[0]) / "context.json"), None
    return config, _run_labels(workdirs, configs)


def _read_run(workdir: str) -> tuple[ConfigDict, str]:
    """A run's config and context."""
    files = [epath.Path(workdir) / name for name in ("config.json", "context.json")]
    for file in files:
        if not file.exists():
            raise UserError(f"{file} does not exist, so {workdir} is no run; for other checkpoints give --config.")
    config = ConfigDict(read_json(files[0]))
    try:
        settings.check(config)
    except KeyError as error:
        raise UserError(f"{files[0]} is of an older version and lacks {error}; give the config by --config.") from error
    return config, files[1].read_text()


def _run_labels(workdirs: Sequence[str], configs: Sequence[ConfigDict]) -> list[str]:
    """The method, and where two are alike its seed or the directory."""
    names = [settings.method_name(config) for config in configs]
    with_seed = [f"{name} seed {config.seed}" for name, config in zip(names, configs, strict=True)]
    with_directory = [f"{name} {_last(workdir)}" for name, workdir in zip(names, workdirs, strict=True)]
    return _distinct(names, with_seed, with_directory, workdirs)


def _last(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


def _distinct(*choices: Sequence[str]) -> list[str]:
    """For each place the first of its choices that no other place and not the base has."""
    counts = [Counter([*choice, BASE]) for choice in choices]
    return [
        next((label for label, count in zip(labels, counts, strict=True) if count[label] == 1), labels[-1])
        for labels in zip(*choices, strict=True)
    ]


def run(task: Task) -> list[str]:
    """Makes the studies one after the other; returns their sentences. What is finished stays if a later one fails.

    Raises:
      UserError: a checkpoint that cannot be read or is of another architecture than the base; as the training job.
    """
    if "updates" in task.studies and jax.process_count() > 1:
        raise UserError("updates reads files on one host; give --studies=representations,gradients to this job.")
    base = Checkpoint(BASE, task.base, find_model(task.base))
    if base.model.state is not None:
        raise UserError(f"{task.base} is a workdir; give the model that training began with as --base.")
    trained, looked_at = [], []
    for path, label in zip(task.paths, task.labels, strict=True):
        trained.append(Checkpoint(label, path, find_model(path, task.step)))
        for step in task.steps or [task.step]:
            model = find_model(path, step)
            looked_at.append(Checkpoint(label if model.step is None else f"{label} step {model.step}", path, model))
        if trained[-1].model.arch != base.model.arch:
            raise UserError(f"{path} has another architecture than {task.base}; give the model it came from as --base.")
    subject = None
    if set(task.studies) - {"updates"}:
        subject = open_subject(task.config, base.model, task.items)
    sentences = []
    for name in (study for study in STUDIES if study in task.studies):
        compared = [base, *(looked_at if name == "gradients" else trained)]
        if name == "representations":
            finding = representations.study(subject, compared)
        elif name == "gradients":
            source = task.config.teacher.source
            finding = gradients.study(subject, compared, find_model(source) if source else base.model)
        else:
            finding = updates.study(base.model, trained)
        sentences.append(finding.sentence)
        if processes.is_first():
            everything = [base, *trained, *(c for c in looked_at if c.model not in [t.model for t in trained])]
            items = subject.items if subject else None
            about = {"checkpoints": _described(everything), "items": items, "command": task.command}
            of_study = about | {"checkpoints": _described(compared), "items": None if name == "updates" else items}
            _keep(task.output, name, finding, of_study, about)
    return sentences


def _described(checkpoints: Sequence[Checkpoint]) -> list[dict[str, str | int | None]]:
    return [{"label": c.label, "path": c.path, "step": c.model.step} for c in checkpoints]


def _keep(output: epath.Path, name: str, finding: Finding, of_study: dict[str, Any], about: dict[str, Any]) -> None:
    """Writes what a study has found; analysis.json, which comes last, keeps what it says of the others.

    Args:
      output: the directory.
      name: of the study.
      finding: of it.
      of_study: checkpoints, items and command of this study, since others may be of another command.
      about: the same of the whole command.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / f"{name}.csv", as_csv(finding.rows))
    save(finding.figure, output / f"{name}.png")
    path = output / "analysis.json"
    found = {study["name"]: study for study in read_json(path).get("studies", [])} if path.exists() else {}
    files = {"figure": f"{name}.png", "csv": f"{name}.csv"}
    found[name] = {"name": name, "title": finding.title, "sentence": finding.sentence, **files, **of_study}
    write_json(path, {"studies": [found[study] for study in STUDIES if study in found], **about})


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    started = time.monotonic()
    try:
        task = read_task(arguments)
        processes.join()
        sentences = run(task)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if processes.is_first():
        peak = memory.host_memory()["host_peak"] / 1e9
        print(*sentences, sep="\n")
        print(f"{task.output / 'analysis.json'}: {time.monotonic() - started:.0f} s, peak memory {peak:.2f} GB")
    return 0


if __name__ == "__main__":
    set_up_logging()
    leave(main(sys.argv[1:]))
