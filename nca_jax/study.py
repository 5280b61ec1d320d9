"""The command that runs a grid of jobs, or prints how to launch each, and collects their results in a table.

    python -m nca_jax.study --config=configs/medmcqa.py:tiny --workdir=runs/study \\
        --vary anchor.beta=0,0.1,0.5 --vary seed=0,1
    python -m nca_jax.study --config=configs/medmcqa.py:qwen3_8b --workdir=gs://bucket/study \\
        --ablations=none,opd,dual --vary seed=0,1,2 --print
    python -m nca_jax.study --config=configs/study.py --workdir=runs/study --grid=full --only='*seed=1'

Every combination is a run in a directory of its own below the workdir. Runs go one after the other, each in a process
of its own, and all of one seed before those of the next; those that are finished are not run again, and one that was
stopped continues, whatever has stopped it. One that fails does not stop the others. Before the first it is said how
long all will take. `--only` takes a part of the grid, which several machines can so share. `--print` runs nothing and
prints one command for each; `--table` runs nothing and collects what is there. `--config.KEY=VALUE` hold for all runs.

A config file can bring grids, `GRIDS = {NAME: [OPTION, ...]}`, which `--grid=NAME` stands for, and `seconds(config)`,
about what a run takes.
"""

import argparse
import contextlib
import csv
import fcntl
import fnmatch
import io
import itertools
import json
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from etils import epath
from ml_collections import ConfigDict

from nca_jax.command import parse_with_config
from nca_jax.errors import UserError
from nca_jax.files import is_bucket, write_json, write_text
from nca_jax.study_time import remaining, remaining_words
from nca_jax.workdir_lock import locked

_TIMING = "study.json"  # in a run's directory: the seconds that its process has taken


class Run(NamedTuple):
    """One point of the grid: its name, which is its directory too, the arguments of the training command, and the
    config that they make."""

    name: str
    arguments: list[str]
    values: dict[str, str]
    config: ConfigDict


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


_Named = TypeVar("_Named", bound=_HasName)


def grid(
    config: str,
    shared: Sequence[str],
    vary: Sequence[str],
    ablations: Sequence[str],
    settings: Sequence[str] = (),
) -> list[Run]:
    """All combinations, each checked against the config.

    Args:
      config: "FILE[:SETTING]".
      shared: "--config.KEY=VALUE" of all runs.
      vary: "KEY=VALUE,VALUE,...", each a dimension of the grid.
      ablations: names of configs/ablations.py, or of the config's own, or "none"; another dimension.
      settings: of the config, in the place of SETTING; another dimension.

    Raises:
      UserError: a dimension that is none, a key or value that the config refuses.
    """
    dimensions = []
    if settings:
        if ":" in config:
            raise UserError(f"--settings come in the place of the one in --config={config}; give one of them.")
        dimensions.append(("setting", list(settings)))
    if ablations:
        if ":" not in config and not settings:
            raise UserError(f"--ablations need a setting; write such as --config={config}:tiny.")
        dimensions.append(("ablation", list(ablations)))
    for text in vary:
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(f"--vary {text} is wrong; write such as --vary anchor.beta=0,0.5.")
        dimensions.append((key, values.split(",")))
    keys = [key for key, _ in dimensions]
    if len(set(keys)) < len(keys):
        raise UserError(f"a key is varied twice: {', '.join(keys)}; give all of its values in one --vary.")
    runs = []
    for point in itertools.product(*(values for _, values in dimensions)):
        values = dict(zip(keys, point, strict=True))
        ablation = values.get("ablation", "none")
        setting = f"{config}:{values['setting']}" if settings else config
        setting = setting if ablation == "none" else f"{setting}+{ablation}"
        arguments = [f"--config={setting}", *shared]
        arguments += [f"--config.{key}={value}" for key, value in values.items() if key not in ("setting", "ablation")]
        # A mistake is found before hours of runs.
        _, parsed, _ = parse_with_config(argparse.ArgumentParser(allow_abbrev=False), arguments)
        runs.append(Run(",".join(f"{k}={v}" for k, v in values.items()) or "run", arguments, values, parsed))
    return runs


def part(runs: Sequence[_Named], patterns: Sequence[str]) -> list[_Named]:
    """The runs whose names match one of the patterns, in their order; of no pattern all.

    Raises:
      UserError: a pattern matches none.
    """
    matched = {pattern: fnmatch.filter([run.name for run in runs], pattern) for pattern in patterns}
    for pattern, names in matched.items():
        if not names:
            raise UserError(f"--only={pattern} matches no run; their names are such as {runs[0].name}.")
    return [run for run in runs if not patterns or any(run.name in names for names in matched.values())]


def run_all(
    runs: Sequence[Run],
    workdir: epath.Path,
    seconds: Callable[[ConfigDict], float] | None = None,
    kept: Sequence[str] | None = None,
    inherited: Sequence[int] = (),
) -> list[str]:
    """Runs what is not finished; returns the names of those that failed. What a run prints is in its log.txt.

    Args:
      runs, workdir: of the study.
      seconds: about what a run takes; None: nobody knows before the first is finished.
      kept: patterns of names: the checkpoints of all other runs are deleted once they are finished; None: all stay.
      inherited: file descriptors that the runs get too.
    """
    failed = []
    ordered = by_seed(runs)
    print(_estimate(ordered, workdir, seconds), flush=True)
    for number, run in enumerate(ordered, 1):
        directory = workdir / run.name
        if not (directory / "summary.txt").exists():
            print(f"[{number}/{len(runs)}] {run.name}", flush=True)
            directory.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            command = [sys.executable, *_command(run, workdir)]
            code, last = run_logged(command, directory / "log.txt", inherited)
            if code:
                failed.append(run.name)
                print(f"  stopped with exit code {code}: {last}", flush=True)
                continue
            summary = (directory / "summary.txt").read_text().strip()
            # Of a run that has gone on from a checkpoint the summary knows more.
            took = max(time.monotonic() - began, float(_measured(summary)["seconds"]))
            write_json(directory / _TIMING, {"seconds": round(took, 1)})
            print(f"  {summary}\n  {_estimate(ordered, workdir, seconds)}", flush=True)
        checkpoints = directory / "checkpoints"
        if kept is not None and checkpoints.exists() and not any(fnmatch.fnmatchcase(run.name, p) for p in kept):
            checkpoints.rmtree()
    return failed


def by_seed(runs: Sequence[Run]) -> list[Run]:
    """All points with one seed before any is repeated with the next: what is there after a part of the time is of
    use."""
    seeds = list(dict.fromkeys(run.values.get("seed") for run in runs))
    return sorted(runs, key=lambda run: seeds.index(run.values.get("seed")))


@contextlib.contextmanager
def alone(workdir: epath.Path) -> Iterator[list[int]]:
    """Holds the workdir of a study. A study that was killed may have left a run for some seconds: that is waited for.

    Returns:
      File descriptors that the runs have to inherit. None in a bucket, where only the runs' own locks tell.

    Raises:
      UserError: another study is at work there.
    """
    with locked(workdir):
        if is_bucket(workdir):
            yield []
            return
        with (workdir / "runs.lock").open("w") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for the run that a study which was killed has left", flush=True)
                fcntl.flock(held, fcntl.LOCK_EX)
            yield [held.fileno()]


def run_logged(command: Sequence[str], log: epath.Path, inherited: Sequence[int] = ()) -> tuple[int, str]:
    """Runs a command; returns its exit code and the last line that it has printed.

    It writes to a pipe that this process reads and copies to the log, line by line: should this process be killed, the
    command ends with its next line, and does not stay behind unseen.
    """
    last = ""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with log.open("w") as file, subprocess.Popen(command, **how, pass_fds=inherited) as process:
        for line in process.stdout:
            file.write(line)
            file.flush()
            last = line.strip() or last
    return process.returncode, last


def _estimate(runs: Sequence[Run], workdir: epath.Path, seconds: Callable[[ConfigDict], float] | None) -> str:
    took = {run.name: _took(workdir / run.name) for run in runs if (workdir / run.name / "summary.txt").exists()}
    points = {run.name: (_without_seed(run), seconds(run.config) if seconds else None) for run in runs}
    return remaining_words(remaining(points, took), len(runs), len(took))


def _took(directory: epath.Path) -> float | None:
    """Seconds of a finished run; None where it was not a study that has started it."""
    path = directory / _TIMING
    return json.loads(path.read_text())["seconds"] if path.exists() else None


def _without_seed(run: Run) -> tuple:
    return tuple((key, value) for key, value in run.values.items() if key != "seed")


def table(runs: Sequence[Run], workdir: epath.Path) -> list[dict[str, str]]:
    """A row for each finished run, and, where `seed` is varied, one for the mean over the seeds of each other point.

    A mean's "seed" says of how many runs it is.
    """
    rows = []
    for run in runs:
        path = workdir / run.name / "summary.txt"
        if path.exists():
            rows.append({**run.values, **_measured(path.read_text())})
    if not rows or "seed" not in runs[0].values:
        return rows
    same_point: dict[tuple, list[dict[str, str]]] = {}
    for row in rows:
        point = tuple(row[key] for key in runs[0].values if key != "seed")
        same_point.setdefault(point, []).append(row)
    means = []
    for same in same_point.values():
        mean = dict(same[0]) | {"seed": f"mean of {len(same)}"}
        for name in same[0].keys() - runs[0].values.keys() - {"method"}:
            mean[name] = f"{sum(float(row[name]) for row in same) / len(same):.3f}"
        means.append(mean)
    return rows + means


def as_markdown(rows: Sequence[dict[str, str]]) -> str:
    """The rows as a table for people."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([row.get(name, "") for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_csv(rows: Sequence[dict[str, str]]) -> str:
    """The rows for programs."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _measured(summary: str) -> dict[str, str]:
    """The values of a run's summary line."""
    return dict(pair.split("=", 1) for pair in summary.split()[1:])


def _command(run: Run, workdir: epath.Path) -> Iterator[str]:
    yield from ("-m", "nca_jax.main", *run.arguments, f"--workdir={workdir / run.name}")


def _brought(config: str) -> dict[str, Any]:
    """What a config file defines, beside its config."""
    try:
        return runpy.run_path(config.partition(":")[0])
    except OSError:
        return {}  # said with its reason when the config is read


def _grid_options(brought: dict[str, Any], options: argparse.Namespace) -> list[str]:
    grids = brought.get("GRIDS", {})
    if options.grid not in grids:
        known = f"it has {', '.join(grids)}" if grids else "it has none"
        raise UserError(f"{options.config} brings no grid {options.grid!r}; {known}.")
    return grids[options.grid]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 where a run failed, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.study", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--config", required=True, metavar="FILE[:SETTING]", help="as for nca_jax.main")
    parser.add_argument("--workdir", required=True, help="of all runs")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=VALUE,...", help="a dimension of the grid")
    parser.add_argument("--settings", default="", metavar="NAME,...", help="of the config file")
    parser.add_argument("--ablations", default="", metavar="NAME,...", help="of configs/ablations.py, or none")
    parser.add_argument(
        "--keep-checkpoints",
        action="append",
        metavar="PATTERN",
        help="those of other runs are deleted once they are finished; such as none, or *seed=0; default: all stay",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="those runs whose names match, such as *seed=0"
    )
    ready = parser.add_mutually_exclusive_group()
    ready.add_argument("--grid", metavar="NAME", help="a grid that the config file brings; other options are added")
    ready.add_argument("--quick", dest="grid", action="store_const", const="quick", help="--grid=quick")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--print", action="store_true", help="print one launch command for each run")
    only.add_argument("--table", action="store_true", help="only collect the results")
    options, shared = parser.parse_known_args(arguments)
    try:
        brought = _brought(options.config)
        if options.grid:
            options, shared = parser.parse_known_args([*_grid_options(brought, options), *arguments])
        names = (list(filter(None, text.split(","))) for text in (options.ablations, options.settings))
        runs = grid(options.config, shared, options.vary, *names)
        runs = part(runs, options.only)
        workdir = epath.Path(options.workdir)
        if options.print:
            for run in runs:
                print("python", shlex.join(_command(run, workdir)))
            return 0
        failed = []
        if not options.table:
            with alone(workdir) as inherited:
                failed = run_all(runs, workdir, brought.get("seconds"), options.keep_checkpoints, inherited)
        rows = table(runs, workdir)
        if not rows:
            raise UserError(f"no run in {workdir} is finished; see the log.txt of each.")
        write_text(workdir / "table.md", as_markdown(rows))
        write_text(workdir / "table.csv", as_csv(rows))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_markdown(rows), end="")
    print(f"{len(rows)} rows in {workdir}/table.md and table.csv")
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
