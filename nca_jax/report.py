"""The command that shows what runs have shown: one page to read in a browser, and its figures as files.

    python -m nca_jax.report WORKDIR [WORKDIR ...] [--output=DIR] [--analysis=DIR]

Each WORKDIR is that of a training run, finished or not, or a directory that `python -m nca_jax.evaluate` has left. The
page, <first WORKDIR>/report/index.html, is one file that loads nothing and opens from a disk. What `python -m
nca_jax.analysis` has left in <WORKDIR>/analysis, or where --analysis says, becomes a section of it.
"""

import argparse
import sys
from collections.abc import Sequence

from etils import epath
from tqdm import tqdm

from nca_jax.command import set_up_logging
from nca_jax.errors import UserError
from nca_jax.figures import all_figures
from nca_jax.files import write_text
from nca_jax.page.findings import comparable, find
from nca_jax.page.render import in_words, render
from nca_jax.page.sources import read_sources, read_studies
from nca_jax.plotting import save


def report(workdirs: Sequence[str], output: str | None = None, analyses: Sequence[str] = ()) -> list[str]:
    """Writes index.html and the figures; returns the lines to print.

    Args:
      workdirs: of training runs and evaluations.
      output: directory; default: `report` in the first workdir.
      analyses: directories of nca_jax.analysis, besides those in the workdirs.

    Raises:
      UserError: a directory holds nothing to report, or nothing that fits together.
    """
    sources = read_sources(workdirs)
    found = [source.path / "analysis" for source in sources]
    given = [epath.Path(directory) for directory in analyses]
    beside = [directory for directory in found if (directory / "analysis.json").exists() and directory not in given]
    studies = read_studies([*given, *beside])
    progress = tqdm(sources, desc="evaluations", unit="run", disable=None)
    findings = [find(source) for source in progress if source.lines]
    figures = all_figures([source.run for source in sources])
    page = render(sources, findings, figures, studies)
    directory = epath.Path(output) if output else sources[0].path / "report"
    directory.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        save(figure.figure, directory / f"{figure.name}.png")
    write_text(directory / "index.html", page)
    statements, comparisons = in_words(comparable(findings))
    lines = [f"{said.label}: {said.verdict}. {said.text}" for said in [*statements, *comparisons]]
    return [*lines, f"{len(sources)} directories, {len(figures)} figures: {directory / 'index.html'}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.report", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("workdirs", nargs="+", metavar="WORKDIR", help="of a training run or an evaluation")
    parser.add_argument("--output", metavar="DIR", help="of the page; default: report in the first WORKDIR")
    parser.add_argument(
        "--analysis", action="append", default=[], metavar="DIR", help="of nca_jax.analysis; repeatable"
    )
    options = parser.parse_args(argv)
    try:
        lines = report(options.workdirs, options.output, options.analysis)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main())
