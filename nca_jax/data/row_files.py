"""Reads files of rows as users have them (JSON Lines, CSV, Parquet); every line is a row, a note, or a bad row."""

import csv
import dataclasses
import hashlib
import io
import json
import re
from typing import Any, NamedTuple

from etils import epath

from nca_jax.errors import UserError

SPLITS = ("train", "validation", "test")
KINDS = {".jsonl": "JSON Lines", ".json": "JSON Lines", ".csv": "CSV", ".parquet": "Parquet"}

_SPLIT_NAMES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}
_SPLIT_NAMES |= {"dev": "validation", "test": "test"}
_ALTERNATIVES = "|".join(_SPLIT_NAMES)
_BYTE_ORDER_MARK = "\ufeff"


class RawRow(NamedTuple):
    """A row before any check: its values by column, and where it stands (line 1 is the first)."""

    file: str
    line: int  # the number of the row where the file is Parquet
    values: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class BadRow(NamedTuple):
    """A row that is left out, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclasses.dataclass
class RowFile:
    """What one file holds.

    Attributes:
      name: relative to the source.
      kind: "JSON Lines", "CSV" or "Parquet".
      split: which one the name tells, if it does.
      sha256: of the content.
      rows: those that could be read, in the file's order.
      bad: those that could not.
      notes: oddities that cost no row.
    """

    name: str
    kind: str
    split: str | None
    sha256: str
    rows: list[RawRow] = dataclasses.field(default_factory=list)
    bad: list[BadRow] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def columns(self) -> dict[str, None]:
        """Names of all columns, in the order they appear."""
        return dict.fromkeys(name for row in self.rows for name in row.values)


def split_of(name: str) -> str | None:
    """The split that a file's name begins or ends with: train-00000-of-00001.parquet, dev.json, jokes_test.csv."""
    stem = name[: name.rindex(".")].lower()
    told = {_SPLIT_NAMES[found] for found in re.findall(rf"^({_ALTERNATIVES})", stem)}
    if not told:
        told = {_SPLIT_NAMES[found] for found in re.findall(rf"[-_. ]({_ALTERNATIVES})$", stem)}
    return told.pop() if told else None


def read_source(source: str) -> tuple[list[RowFile], list[str]]:
    """All files of rows in a directory and in its subdirectory `data`, or one file; sorted by name.

    Returns:
      The files, and the names of those that have another suffix and were not read.

    Raises:
      UserError: there are no such files, or one of them is not what its suffix says.
    """
    root = epath.Path(source)
    if not root.exists():
        raise UserError(f"--source={source} does not exist; give a directory or a file of rows.")
    if root.is_dir():
        directories = [root, root / "data"] if (root / "data").is_dir() else [root]
        paths = {str(path.relative_to(root)): path for directory in directories for path in directory.iterdir()}
        paths = {name: paths[name] for name in sorted(paths) if paths[name].name[0] != "." and paths[name].is_file()}
    else:
        paths = {root.name: root}
    known = {name: path for name, path in paths.items() if path.suffix.lower() in KINDS}
    if not known:
        raise UserError(f"--source={source} has no {', '.join(KINDS)} files; give the directory that holds them.")
    return [_read(name, path) for name, path in known.items()], [name for name in paths if name not in known]


def _read(name: str, path: epath.Path) -> RowFile:
    content = path.read_bytes()
    kind = KINDS[path.suffix.lower()]
    file = RowFile(name, kind, split_of(path.name), hashlib.sha256(content).hexdigest())
    if kind == "Parquet":
        _read_parquet(file, content)
        return file
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start:,}; convert the file to UTF-8.") from error
    if text.startswith(_BYTE_ORDER_MARK):
        text = text[1:]
        file.notes.append(f"{name}:1 begins with a byte order mark, which is ignored")
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        raise UserError(f"{path} is one JSON array; write one object per line instead.")
    blank = _read_csv(file, text) if kind == "CSV" else _read_json_lines(file, text)
    if blank:
        numbers = ", ".join(map(str, blank[:20])) + (", ..." if len(blank) > 20 else "")
        file.notes.append(f"{name}: blank lines, {len(blank)} in all, are ignored: {numbers}")
    return file


def _read_json_lines(file: RowFile, text: str) -> list[int]:
    """Adds the rows to the file; returns the numbers of the blank lines."""
    blank = []
    # Not splitlines(), which would also split at characters such as U+2028 within a text.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        if not line.strip():
            blank.append(number)
            continue
        if line.startswith(_BYTE_ORDER_MARK):
            file.bad.append(BadRow(file.name, number, "a byte order mark inside the file"))
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            file.bad.append(BadRow(file.name, number, f"not JSON ({error})"))
            continue
        if isinstance(values, dict):
            file.rows.append(RawRow(file.name, number, values))
        else:
            file.bad.append(BadRow(file.name, number, f"not a JSON object but of type {type(values).__name__}"))
    return blank


def _read_csv(file: RowFile, text: str) -> list[int]:
    """Adds the rows to the file, numbered by their first line; returns the numbers of the blank lines."""
    blank = []
    header = None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 1
    try:
        for cells in reader:
            first, number = number, reader.line_num + 1
            if not any(cell.strip() for cell in cells) and len(cells) < 2:
                blank.append(first)
            elif header is None:
                header = [cell.strip() for cell in cells]
                if twice := {name for name in header if header.count(name) > 1}:
                    raise UserError(f"{file.name} has the column {min(twice)!r} twice; rename one.")
            elif cells[0].startswith(_BYTE_ORDER_MARK):
                file.bad.append(BadRow(file.name, first, "a byte order mark inside the file"))
            elif len(cells) != len(header):
                file.bad.append(
                    BadRow(file.name, first, f"number of cells: {len(cells)}, but the header has {len(header)}")
                )
            else:
                file.rows.append(RawRow(file.name, first, dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        # Where a quote is wrong, the lines after it cannot be told apart.
        raise UserError(f"{file.name}:{number} is not proper CSV ({error}); quote its cells correctly.") from error
    return blank


def _read_parquet(file: RowFile, content: bytes) -> None:
    import pyarrow  # takes a while, and few need it
    from pyarrow import parquet

    try:
        rows = parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise UserError(f"{file.name} is not a readable Parquet file ({reason}); download it again.") from error
    file.rows.extend(RawRow(file.name, number, values) for number, values in enumerate(rows, 1))
