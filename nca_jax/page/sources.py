"""What the report reads: workdirs of training runs, and directories that `python -m nca_jax.evaluate` has left."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath
from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.errors import UserError
from nca_jax.figures import RunData
from nca_jax.files import read_json
from nca_jax.items import WITH_CONTEXT, evaluation_path, evaluation_steps, read_items
from nca_jax.metrics import Lines

# What a line says beyond its figures; a page shows the texts of the last evaluation only.
_TEXTS = ("prompt", "response", "turns")
# Settings of which a label can name the values before it becomes a list.
_MOST_SETTINGS = 3


@dataclasses.dataclass
class Source:
    """One of the given directories.

    Attributes:
      path: as it was given.
      run: what the figures need of it.
      identity: the settings, by their flat names, that decide about it, but for the seed.
      contexts: view -> messages, of the views whose context it has kept.
      environment: content of environment.json, {} where there is none.
      checkpoint: what an evaluation has evaluated; None for a training run.
      step: of that checkpoint, None for a model that was not trained here.
      is_trained: whether the config tells how it was trained: not that of any model, nor of a run that is not there.
      files: names of what was read.
    """

    path: epath.Path
    run: RunData
    identity: dict[str, Any]
    contexts: dict[str, list[dict[str, str]]]
    environment: dict[str, Any]
    checkpoint: str | None
    step: int | None
    is_trained: bool
    files: list[str]

    @property
    def lines(self) -> Lines:
        """Item lines of the last evaluation, [] where there is none."""
        return self.run.evaluations.get(self.run.last, [])


class Study(NamedTuple):
    """A study of the inside of the model, as an analysis.json describes it: its figure as PNG, and where its CSV is."""

    title: str
    sentence: str
    image: bytes
    csv: str


def read_sources(paths: Sequence[str]) -> list[Source]:
    """All directories, each labelled so that it can be told from the others.

    Raises:
      UserError: one holds nothing to report, or is given twice.
    """
    sources: list[Source] = []
    for path in map(epath.Path, paths):
        if any(source.path == path for source in sources):
            raise UserError(f"{path} is given twice; give each directory once.")
        sources.append(_read(path))
    _label(sources)
    return sources


def read_studies(directories: Sequence[epath.Path]) -> list[Study]:
    """The studies of the inside of the model in directories of `python -m nca_jax.analysis`.

    Raises:
      UserError: there is no analysis.json, it is none, or a figure that it names is missing.
    """
    studies = []
    for directory in directories:
        path = directory / "analysis.json"
        if not path.exists():
            raise UserError(f"{directory} has no analysis.json; give a directory that nca_jax.analysis has written.")
        for entry in read_json(path).get("studies", []):
            try:
                image = (directory / entry["figure"]).read_bytes()
                studies.append(Study(entry["title"], entry["sentence"], image, str(directory / entry["csv"])))
            except (KeyError, TypeError, OSError) as error:
                raise UserError(f"a study of {path} is incomplete ({error!r}); run nca_jax.analysis again.") from error
    return studies


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Setting -> its value in each of the flat configs, of the settings that are not the same in all of them."""
    names = sorted(set().union(*configs))
    columns = {name: [config.get(name) for config in configs] for name in names}
    return {name: column for name, column in columns.items() if any(value != column[0] for value in column)}


def _read(path: epath.Path) -> Source:
    if not path.is_dir():
        raise UserError(f"{path} is no directory; give the workdir of a run, or the --output of nca_jax.evaluate.")
    if (path / "items.jsonl").exists():
        return _read_evaluation(path)
    return _read_run(path)


def _read_run(path: epath.Path) -> Source:
    kept = ("config.json", "context.json", "environment.json", "metrics.jsonl")
    names = [name for name in kept if (path / name).exists()]
    evaluations = {step: read_items(evaluation_path(path, step)) for step in evaluation_steps(path)}
    for step in list(evaluations)[:-1]:
        evaluations[step] = [{k: v for k, v in line.items() if k not in _TEXTS} for line in evaluations[step]]
    steps = [record for record in _records(path / "metrics.jsonl") if "loss" in record]
    if not steps and not any(evaluations.values()):
        raise UserError(
            f"{path} holds neither steps in metrics.jsonl nor evaluations nor items.jsonl; give the workdir of a run "
            "that has begun, or the --output of nca_jax.evaluate."
        )
    if "config.json" not in names:
        raise UserError(f"{path} has no config.json; give the whole workdir of the run.")
    config = read_json(path / "config.json")
    contexts = {WITH_CONTEXT: _context(path / "context.json")} if "context.json" in names else {}
    method, identity = _method_and_identity(config, path)
    run = RunData(str(path), "", "", method, steps, evaluations, config)
    names += [f"evaluations/ ({len(evaluations)} files)"] if evaluations else []
    environment = read_json(path / "environment.json") if "environment.json" in names else {}
    return Source(path, run, identity, contexts, environment, None, None, True, names)


def _read_evaluation(path: epath.Path) -> Source:
    if not (path / "evaluation.json").exists():
        raise UserError(f"{path} has items.jsonl but no evaluation.json; give the whole --output of nca_jax.evaluate.")
    if not (path / "summary.json").exists():
        raise UserError(f"the evaluation in {path} is not finished; give nca_jax.evaluate its command again to go on.")
    about = read_json(path / "evaluation.json")
    lines = read_items(path / "items.jsonl")
    if not lines:
        raise UserError(f"{path / 'items.jsonl'} is empty; evaluate again.")
    try:
        config, step, checkpoint = about["config"], about["step"], str(about["checkpoint"])
        contexts = {view: context["messages"] for view, context in about["contexts"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path / 'evaluation.json'} is incomplete ({error!r}); evaluate again.") from error
    trained = None if step is None else _config_of_run(path, epath.Path(checkpoint))
    if trained is not None:
        config = trained | {"domain": config["domain"], "evaluation": config["evaluation"]}
    method, identity = _method_and_identity(config, path)
    if trained is None:
        method = epath.Path(checkpoint).name + ("" if step is None else f" step {step}")
    run = RunData(str(path), "", "", method, [], {step or 0: lines}, config)
    names = [n for n in ("evaluation.json", "items.jsonl", "environment.json") if (path / n).exists()]
    environment = read_json(path / "environment.json") if "environment.json" in names else {}
    return Source(path, run, identity, contexts, environment, checkpoint, step, trained is not None, names)


def _config_of_run(evaluation: epath.Path, checkpoint: epath.Path) -> dict[str, Any] | None:
    """The config that a checkpoint was trained with, if its workdir is there or is what the evaluation lies in: the
    evaluation has been given one for the task, which need not be the same."""
    around = [evaluation.parent] if evaluation.parent.name == checkpoint.name else []
    for workdir in (checkpoint, *around):
        if (workdir / "config.json").exists():
            config = read_json(workdir / "config.json")
            if "anchor" in config:
                return config
    return None


def _records(path: epath.Path) -> list[dict[str, Any]]:
    """Records of a .jsonl file; without a last line that a run is just writing."""
    *lines, _unfinished = path.read_text().split("\n") if path.exists() else [""]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{path} does not hold a JSON record a line ({error}); copy the file again.") from error


def _method_and_identity(config: Mapping[str, Any], path: epath.Path) -> tuple[str, dict[str, Any]]:
    try:
        values = ConfigDict(config)
        decisive = settings.fingerprint(values) | {"steps": values.steps}
        decisive.pop("seed")
        return settings.method_name(values), decisive
    except (AttributeError, KeyError) as error:
        raise UserError(f"the config in {path} is not one of nca_jax ({error}); give a workdir of nca_jax.") from error


def _context(path: epath.Path) -> list[dict[str, str]]:
    """The messages of a context.json."""
    try:
        return [{"role": message["role"], "content": message["content"]} for message in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a list of messages ({error!r}); copy it again.") from error


def _label(sources: Sequence[Source]) -> None:
    """Gives every run the label of its group of seeds, and its own."""
    groups: dict[Any, list[Source]] = {}
    for source in sources:
        same = (source.checkpoint is None, source.run.method, source.identity, source.contexts.get(WITH_CONTEXT))
        key = json.dumps(same, sort_keys=True)
        if any(other.run.config["seed"] == source.run.config["seed"] for other in groups.get(key, [])):
            key = source.run.name  # the same seed again: another checkpoint, not another draw of the method
        groups.setdefault(key, []).append(source)
    names = {key: group[0].run.method for key, group in groups.items()}
    for method in list(dict.fromkeys(names.values())):
        alike = [key for key, name in names.items() if name == method]
        different = differing([groups[key][0].identity for key in alike])
        # The first setting that tells all of them apart is enough.
        telling = [{name: values} for name, values in different.items() if len(set(map(str, values))) == len(alike)]
        shown = telling[0] if telling else different
        for i, key in enumerate(alike):
            if shown and len(shown) <= _MOST_SETTINGS:
                names[key] += " " + ", ".join(f"{setting}={values[i]}" for setting, values in shown.items())
    for name in list(dict.fromkeys(names.values())):
        alike = [key for key, other in names.items() if other == name]
        if len(alike) > 1:
            paths = [groups[key][0].path for key in alike]
            is_short = len({path.name for path in paths}) == len(paths)
            for key, path in zip(alike, paths, strict=True):
                names[key] += f" ({path.name if is_short else path})"
    for key, group in groups.items():
        for source in group:
            source.run.group = names[key]
            source.run.label = names[key] if len(group) == 1 else f"{names[key]} seed {source.run.config['seed']}"
