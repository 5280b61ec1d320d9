"""The command that runs a grid of jobs, or prints how to launch each, and collects their results in a table.

    python -m nca_jax.study --config=configs/medmcqa.py:tiny --workdir=runs/study \\
        --vary anchor.beta=0,0.1,0.5 --vary seed=0,1
    python -m nca_jax.study --config=configs/medmcqa.py:qwen3_8b --workdir=gs://bucket/study \\
        --ablations=none,opd,dual --vary seed=0,1,2 --print

Every combination is a run in a directory of its own below the workdir. Runs go one after the other, each in a process
of its own; those that are finished are not run again, and one that was stopped continues. `--print` runs nothing and
prints one command for each; `--table` runs nothing and collects what is there. `--config.KEY=VALUE` hold for all runs.
"""

import argparse
import csv
import io
import itertools
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etils import epath

from nca_jax.command import parse_with_config
from nca_jax.errors import UserError
from nca_jax.files import write_text


class Run(NamedTuple):
    """One point of the grid: its name, which is its directory too, and the arguments of the training command."""

    name: str
    arguments: list[str]
    values: dict[str, str]


def grid(config: str, shared: Sequence[str], vary: Sequence[str], ablations: Sequence[str]) -> list[Run]:
    """All combinations, each checked against the config.

    Args:
      config: "FILE[:SETTING]".
      shared: "--config.KEY=VALUE" of all runs.
      vary: "KEY=VALUE,VALUE,...", each a dimension of the grid.
      ablations: names of configs/ablations.py, or "none"; another dimension.

    Raises:
      UserError: a dimension that is none, a key or value that the config refuses.
    """
    dimensions = []
    if ablations:
        if ":" not in config:
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
        setting = config if ablation == "none" else f"{config}+{ablation}"
        arguments = [f"--config={setting}", *shared]
        arguments += [f"--config.{key}={value}" for key, value in values.items() if key != "ablation"]
        parse_with_config(
            argparse.ArgumentParser(allow_abbrev=False), arguments
        )  # a mistake is found before hours of runs
        runs.append(Run(",".join(f"{k}={v}" for k, v in values.items()) or "run", arguments, values))
    return runs


def run_all(runs: Sequence[Run], workdir: epath.Path) -> list[str]:
    """Runs what is not finished; returns the names of those that failed. What a run prints is in its log.txt."""
    failed = []
    for number, run in enumerate(runs, 1):
        directory = workdir / run.name
        if not (directory / "summary.txt").exists():
            print(f"[{number}/{len(runs)}] {run.name}", flush=True)
            directory.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, *_command(run, workdir)]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            (directory / "log.txt").write_text(done.stdout)
            if done.returncode:
                failed.append(run.name)
                last = done.stdout.strip().split("\n")[-1]
                print(f"  stopped with exit code {done.returncode}: {last}", flush=True)
                continue
        print(f"  {(directory / 'summary.txt').read_text().strip()}", flush=True)
    return failed


def table(runs: Sequence[Run], workdir: epath.Path) -> list[dict[str, str]]:
    """A row for each finished run, and, where `seed` is varied, one for the mean over the seeds of each other point.

    A mean's "seed" says of how many runs it is.
    """
    rows = []
    for run in runs:
        path = workdir / run.name / "summary.txt"
        if path.exists():
            measured = dict(pair.split("=", 1) for pair in path.read_text().split()[1:])
            rows.append({**run.values, **measured})
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


def _command(run: Run, workdir: epath.Path) -> Iterator[str]:
    yield from ("-m", "nca_jax.main", *run.arguments, f"--workdir={workdir / run.name}")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 where a run failed, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.study", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--config", required=True, metavar="FILE[:SETTING]", help="as for nca_jax.main")
    parser.add_argument("--workdir", required=True, help="of all runs")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=VALUE,...", help="a dimension of the grid")
    parser.add_argument("--ablations", default="", metavar="NAME,...", help="of configs/ablations.py, or none")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--print", action="store_true", help="print one launch command for each run")
    only.add_argument("--table", action="store_true", help="only collect the results")
    options, shared = parser.parse_known_args(arguments)
    try:
        runs = grid(options.config, shared, options.vary, list(filter(None, options.ablations.split(","))))
        workdir = epath.Path(options.workdir)
        if options.print:
            for run in runs:
                print("python", shlex.join(_command(run, workdir)))
            return 0
        failed = [] if options.table else run_all(runs, workdir)
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
