"""The command that makes a data set of a user's files.

    python -m nca_jax.data.prepare --domain=medmcqa --source=DIR --data_dir=DIR
    python -m nca_jax.data.prepare --domain=safety --source=FILE --holdout=0.1 --data_dir=DIR

Reads JSON Lines, CSV or Parquet, checks every row, says what it found, and writes a tensorflow-datasets data set that
training reads. The source and the data_dir may be gs:// paths; nothing else is downloaded. Rows that are left out are
listed, in full in bad_rows.jsonl of the data set.
"""

import argparse
import contextlib
import errno
import io
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence

from etils import epath
from tqdm import tqdm

from nca_jax.command import set_up_logging
from nca_jax.data import builders
from nca_jax.data.row_files import BadRow
from nca_jax.data.rows import DOMAINS, NULLABLE, SAFETY_FIELDS, CheckedRows, ReadOptions, Row, read_rows
from nca_jax.errors import UserError
from nca_jax.files import is_bucket

BAD_ROWS = "bad_rows.jsonl"
_SMALL_FILES = (BAD_ROWS, builders.INFO, "features.json", "metadata.json")  # beside those of the rows
_SHOWN = 20

# The C++ writer raises these as RuntimeErrors, with their text.
_DISK_PROBLEMS = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)]


def prepare(arguments: argparse.Namespace) -> None:
    """Reads, reports and writes.

    Raises:
      UserError: what the files, the options or the data_dir do not allow.
      OSError: what the disk does not allow.
    """
    options = _read_options(arguments)
    if arguments.data_dir == builders.TINY:
        raise UserError(f"--data_dir={builders.TINY} means the package's made-up rows; choose another directory.")
    checked = read_rows(arguments.domain, arguments.source, options)
    for note in checked.notes:
        print(note)
    for split, rows in checked.splits.items():
        print(f"{split}: {len(rows):,} rows")
        for line in describe(arguments.domain, rows):
            print(f"  {line}")
    _report_bad(checked.bad)
    if checked.bad and arguments.bad_rows == "error":
        raise UserError(f"{len(checked.bad):,} bad rows, and --bad_rows=error allows none; nothing was written.")

    directory = builders.data_set_directory(arguments.domain, arguments.data_dir)
    if not arguments.overwrite and _is_same(arguments, checked):
        print(f"{directory} holds these rows already; nothing was written")
    else:
        write(arguments.domain, checked, arguments.data_dir, arguments.overwrite)
        print(f"written: {directory}")
    if checked.bad:
        print(f"all bad rows: {directory / BAD_ROWS}")
    data_dir = arguments.data_dir if is_bucket(arguments.data_dir) else os.path.abspath(arguments.data_dir)
    print(f"to train on it: --config.domain.settings.data_dir={data_dir}")


def describe(domain: str, rows: Sequence[Row]) -> list[str]:
    """What is in the rows of one split, as lines to print."""
    text = "question" if domain == "medmcqa" else "text"
    lengths = [len(row[text]) for row in rows]
    length = f"{text}: median {statistics.median(lengths):g}, longest {max(lengths):,} characters"
    if domain == "safety":
        labels = Counter(row["label"] for row in rows)
        sources = len({row["source"] for row in rows} - {""})
        return [f"yes {labels['yes']:,}, no {labels['no']:,}", f"sources: {sources:,}", length]
    answers = Counter(row["cop"] for row in rows)
    types = Counter(row["choice_type"] for row in rows)
    empty = ", ".join(f"{field} {sum(not row[field] for row in rows):,}" for field in NULLABLE)
    return [
        ", ".join(f"{letter} {answers[cop]:,}" for cop, letter in enumerate("ABCD"))
        + f", without an answer {answers[-1]:,}",
        f"single {types['single']:,}, multi {types['multi']:,}",
        length,
        f"null, stored as empty: {empty}",
    ]


def write(domain: str, checked: CheckedRows, data_dir: str, overwrite: bool = False) -> None:
    """Writes the data set below data_dir, where it appears complete or not at all.

    Raises:
      UserError: another one is there and may not be replaced.
      OSError: the disk is full, or takes nothing.
    """
    builder_class = _builder_class(domain)
    new_data_set = _new_in_bucket if is_bucket(data_dir) else _new_data_set
    with new_data_set(domain, epath.Path(data_dir), overwrite) as building:
        total = sum(map(len, checked.splits.values()))
        with tqdm(total=total, desc="writing", unit="row", disable=None, dynamic_ncols=True) as bar:

            def progress(rows: Sequence[Row]) -> Iterator[Row]:
                for row in rows:
                    yield row
                    bar.update()

            builder = builder_class(
                rows=checked.splits,
                data_dir=str(building),
                metadata={"fingerprint": checked.fingerprint, "notes": checked.notes, "bad_rows": len(checked.bad)},
                progress=progress,
            )
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # where it tells about downloads that there are not
                    builder.download_and_prepare()
            except RuntimeError as error:
                problem = next((text for text in _DISK_PROBLEMS if text in str(error)), None)
                if problem is None:
                    raise
                raise OSError(f"{problem}: {building if is_bucket(data_dir) else data_dir}") from error
        if checked.bad:
            lines = "".join(json.dumps(row._asdict(), ensure_ascii=False) + "\n" for row in checked.bad)
            (builders.data_set_directory(domain, building) / BAD_ROWS).write_text(lines, encoding="utf-8")


@contextlib.contextmanager
def _new_data_set(domain: str, data_dir: epath.Path, overwrite: bool) -> Iterator[epath.Path]:
    """A directory in place of data_dir; the data set in it moves to data_dir when the block ends well."""
    _check_replaceable(domain, data_dir, overwrite)
    target = builders.data_set_directory(domain, data_dir)
    building = data_dir / f".{domain}.partial"
    if building.exists():  # what a killed process left
        building.rmtree()
    try:
        building.mkdir(parents=True)
        yield building
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            target.rename(building / "old")
        builders.data_set_directory(domain, building).rename(target)
    finally:
        if building.exists():
            building.rmtree()


@contextlib.contextmanager
def _new_in_bucket(domain: str, data_dir: epath.Path, overwrite: bool) -> Iterator[epath.Path]:
    """A local directory in place of data_dir; the data set in it is copied to data_dir when the block ends well."""
    _check_replaceable(domain, data_dir, overwrite)
    target = builders.data_set_directory(domain, data_dir)
    with tempfile.TemporaryDirectory(prefix="nca_jax_prepare_") as building:
        yield epath.Path(building)
        if target.exists():
            (target / builders.INFO).unlink(missing_ok=True)  # first: what is left is no data set
            target.rmtree(missing_ok=True)
        try:
            builders.copy_files(builders.data_set_directory(domain, epath.Path(building)), target)
        except BaseException:
            target.rmtree(missing_ok=True)
            raise


def _check_replaceable(domain: str, data_dir: epath.Path, overwrite: bool) -> None:
    """Raises UserError where something is in the way."""
    target = builders.data_set_directory(domain, data_dir)
    if builders.is_prepared(domain, data_dir):
        if not overwrite:
            raise UserError(
                f"{target} holds rows of other files or options; pass --overwrite to replace it, "
                "or choose another --data_dir."
            )
    elif target.exists() and not (is_bucket(target) and _is_part_of_copy(domain, target)):
        raise UserError(f"{target} exists and is not a data set; choose another --data_dir.")


def _is_part_of_copy(domain: str, target: epath.Path) -> bool:
    """Whether a killed process may have left this: nothing but files that data sets have."""
    return all(path.name.startswith(f"{domain}-") or path.name in _SMALL_FILES for path in target.iterdir())


def _is_same(arguments: argparse.Namespace, checked: CheckedRows) -> bool:
    if not builders.is_prepared(arguments.domain, arguments.data_dir):
        return False
    there = builders.metadata(arguments.domain, arguments.data_dir)
    return there.get("fingerprint") == checked.fingerprint


def _builder_class(domain: str):
    import tensorflow_datasets as tfds  # takes a while, and --help does without

    from nca_jax.data.builders.medmcqa import Medmcqa
    from nca_jax.data.builders.safety import Safety

    tfds.disable_progress_bar()
    return {"medmcqa": Medmcqa, "safety": Safety}[domain]


def _report_bad(bad: Sequence[BadRow]) -> None:
    print(f"bad rows: {len(bad):,}")
    for row in bad[:_SHOWN]:
        print(f"  {row}")
    if len(bad) > _SHOWN:
        print(f"  and {len(bad) - _SHOWN:,} more")


def _read_options(arguments: argparse.Namespace) -> ReadOptions:
    other = {"medmcqa": ("fields", "labels"), "safety": ("cop_base",)}[arguments.domain]
    for name in other:
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name} does not apply to {arguments.domain}; leave it out.")
    labels = _pairs("labels", arguments.labels, "unsafe=yes,safe=no")
    fields = _pairs("fields", arguments.fields, "text=prompt,source=type")
    if wrong := set(labels.values()) - {"yes", "no"}:
        raise UserError(f"--labels={arguments.labels} maps to {min(wrong)!r}; labels become yes or no.")
    if wrong := fields.keys() - set(SAFETY_FIELDS):
        raise UserError(f"--fields={arguments.fields} has {min(wrong)!r}, none of {', '.join(SAFETY_FIELDS)}.")
    return ReadOptions(
        cop_base=arguments.cop_base,
        fields=fields,
        labels={label.casefold(): meaning for label, meaning in labels.items()},
        holdout=arguments.holdout,
        keep_repeats=arguments.keep_repeats,
    )


def _pairs(flag: str, text: str | None, example: str) -> dict[str, str]:
    """ "a=b,c=d" -> a dictionary."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if not all(key.strip() and value.strip() for key, _, value in pairs):
        raise UserError(f"--{flag}={text} is wrong; write such as --{flag}={example}.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nca_jax.data.prepare", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--domain", required=True, choices=DOMAINS)
    add("--source", required=True, metavar="DIR_OR_FILE", help="train*, validation* (or val*, dev*) and test* files")
    add("--data_dir", required=True, metavar="DIR", help="below which the data set is written")
    add("--holdout", type=float, metavar="FRACTION", help="of one file, for validation, and as much for test")
    add("--cop_base", type=int, choices=(0, 1), help="medmcqa: the number that stands for A; default: look at all")
    add("--fields", metavar="text=prompt,source=type", help="safety: which column holds what")
    add("--labels", metavar="unsafe=yes,safe=no", help="safety: what other labels mean")
    add("--keep_repeats", action="store_true", help="keep rows of equal content within a split (never across)")
    add("--bad_rows", choices=("report", "error"), default="report", help="error: write nothing if there are any")
    add("--overwrite", action="store_true", help="write anew, and replace what is there when it is done")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, or 2 for input that cannot work."""
    arguments = _parser().parse_args(argv)
    try:
        prepare(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a directory of somebody else
        print(f"error: preparing stopped ({error}); nothing half-written is left.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main())
