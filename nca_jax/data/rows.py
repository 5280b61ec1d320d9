"""Turns files of rows into checked rows per split: nothing is changed silently, and nothing is dropped silently.

A row of medmcqa: id, question, opa, opb, opc, opd, cop (0 to 3 for A to D, -1: not told), choice_type ("single" or
"multi"), exp, subject_name, topic_name ("" where null or absent). A row of safety: id, text, label ("yes" or "no"),
source. All are str but cop, an int.
"""

import dataclasses
import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from nca_jax.data.row_files import SPLITS, BadRow, RawRow, RowFile, read_source
from nca_jax.errors import UserError

DOMAINS = ("medmcqa", "safety")
OPTIONS = ("opa", "opb", "opc", "opd")
NULLABLE = ("exp", "subject_name", "topic_name")
SAFETY_FIELDS = ("id", "text", "label", "source")

Row = dict[str, Any]

_CONTENT = {"medmcqa": ("question", *OPTIONS), "safety": ("text",)}
_REPEATED = {"medmcqa": "the same question and options are", "safety": "the same text is"}
# Of two cop values that exclude each other, one so many times rarer than the other is taken for mistakes.
_RARE = 20


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """What the user says about the files; the defaults are looked for.

    Attributes:
      cop_base: medmcqa: the number that stands for A, 0 or 1.
      fields: safety: our name of a field -> the column that holds it.
      labels: safety: a label of the files, in lower case -> "yes" or "no".
      holdout: fraction of the rows for validation, and as much for test, where the files name no splits.
      keep_repeats: whether rows of equal content may stand in one split.
    """

    cop_base: int | None = None
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    holdout: float | None = None
    keep_repeats: bool = False


@dataclasses.dataclass(frozen=True)
class CheckedRows:
    """What a source holds.

    Attributes:
      splits: name of the split -> rows in the files' order; none is empty.
      bad: the rows left out, in the files' order.
      notes: what was found and how it was understood, a sentence each.
      fingerprint: of the files' content and everything that decides how they are understood.
    """

    splits: dict[str, list[Row]]
    bad: list[BadRow]
    notes: list[str]
    fingerprint: str


class _Refused(Exception):
    """Why a row is bad."""


def read_rows(domain: str, source: str, options: ReadOptions | None = None) -> CheckedRows:
    """Reads and checks all rows of a source.

    Args:
      domain: "medmcqa" or "safety".
      source: a directory, or one file.
      options: what the files do not tell by themselves.

    Raises:
      UserError: the files cannot be read or understood, or none of a split's rows is good.
    """
    options = options or ReadOptions()
    files, others = read_source(source)
    pools = _pools(source, files, options.holdout)
    notes = [
        f"{file.name}: {file.kind}, {len(file.rows) + len(file.bad):,} rows, {split or 'split by a hash'}"
        for split, members in pools.items()
        for file in members
    ]
    notes += [note for file in files for note in file.notes]
    if others:
        notes.append(f"not read: {', '.join(others)}")
    if domain == "medmcqa":
        _read_numbers(files)
        base, note = _cop_base(files, options.cop_base)
        notes.append(note)
        understood = {"cop_base": base}
    else:
        columns, column_notes = _columns(files, options.fields)
        notes += column_notes
        labels = {"yes": "yes", "no": "no", **options.labels}
        understood = {"columns": columns, "labels": labels}

    bad = [row for file in files for row in file.bad]
    good: dict[str, list[tuple[RawRow, Row]]] = {}
    for split, members in pools.items():
        raw_rows = [row for file in members for row in file.rows]
        if domain == "medmcqa":
            answered = any(_is_int(row.values.get("cop")) and 0 <= row.values["cop"] <= 4 for row in raw_rows)
            good[split] = _checked(raw_rows, bad, lambda raw, answered=answered: _medmcqa(raw.values, base, answered))
        else:
            good[split] = _checked(raw_rows, bad, lambda raw: _safety(raw, columns[raw.file], labels))
    if "" in good:
        good = _hold_out(domain, good[""], options.holdout)
    splits = _without_duplicates(domain, good, bad, options.keep_repeats)

    order = {file.name: position for position, file in enumerate(files)}
    bad.sort(key=lambda row: (order[row.file], row.line))
    for split, rows in splits.items():
        if not rows and any(splits.values()) and options.holdout is not None:
            raise UserError(
                f"--holdout={options.holdout} leaves no row of {source} for {split}; give another fraction."
            )
        if not rows:
            names = {file.name for file in pools.get(split, files)}
            first = next((f"the first bad one is {row}" for row in bad if row.file in names), "there are none at all")
            raise UserError(f"{', '.join(sorted(names))} has no good row; {first}.")
    identity = [domain, [(file.name, file.sha256) for file in files], understood, options.holdout, options.keep_repeats]
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return CheckedRows(splits, bad, notes, fingerprint)


def _pools(source: str, files: list[RowFile], holdout: float | None) -> dict[str, list[RowFile]]:
    """Split -> its files; or "" -> all files, which are to be split."""
    told = {file.split for file in files}
    if holdout is not None and not 0 < holdout < 0.5:
        raise UserError(f"--holdout={holdout} is no fraction between 0 and 0.5; try 0.1.")
    if len(told) > 1 and (None in told or holdout is not None):
        names = ", ".join(file.name for file in files if holdout is not None or file.split is None)
        if None in told:
            raise UserError(f"{source} has files that name a split, and {names}; rename or move the latter.")
        raise UserError(f"--holdout would split anew what {source} has as {names}; leave it out.")
    if holdout is not None:
        return {"": files}
    if None in told or epath.Path(source).is_file():
        names = ", ".join(file.name for file in files)
        raise UserError(f"nothing tells which rows of {names} are for training; --holdout=0.1 splits them by a hash.")
    return {split: [file for file in files if file.split == split] for split in SPLITS if split in told}


def _checked(raw_rows: list[RawRow], bad: list[BadRow], check: Callable[[RawRow], Row]) -> list[tuple[RawRow, Row]]:
    good = []
    for raw in raw_rows:
        try:
            good.append((raw, check(raw)))
        except _Refused as refused:
            bad.append(BadRow(raw.file, raw.line, str(refused)))
    return good


def _hold_out(domain: str, good: list[tuple[RawRow, Row]], fraction: float) -> dict[str, list[tuple[RawRow, Row]]]:
    """Splits by a hash of the content, so that neither the order nor the other rows matter."""
    splits = {split: [] for split in SPLITS}
    for raw, row in good:
        digest = hashlib.sha256(_content(domain, row).encode()).digest()
        position = int.from_bytes(digest[:8], "big") / 2**64
        split = "test" if position < fraction else "validation" if position < 2 * fraction else "train"
        splits[split].append((raw, row))
    return splits


def _without_duplicates(
    domain: str, good: dict[str, list[tuple[RawRow, Row]]], bad: list[BadRow], keep_repeats: bool
) -> dict[str, list[Row]]:
    """Leaves out what is there already; held-out splits come first, so that a held-out row is never trained on."""
    splits = {split: [] for split in good}
    place_of_id: dict[str, str] = {}
    place_of_content: dict[str, tuple[str, str]] = {}
    for split in reversed(SPLITS):
        for raw, row in good.get(split, ()):
            content = _content(domain, row)
            there = place_of_content.get(content)
            if row["id"] in place_of_id:
                reason = f"the same id {row['id']!r} is also in {place_of_id[row['id']]}"
            elif there and not (keep_repeats and there[0] == split):
                reason = f"{_REPEATED[domain]} also in {there[1]}"
            else:
                place_of_id[row["id"]] = raw.place
                place_of_content.setdefault(content, (split, raw.place))
                splits[split].append(row)
                continue
            bad.append(BadRow(raw.file, raw.line, reason))
    return splits


def _content(domain: str, row: Row) -> str:
    """What makes two rows the same: texts that differ in case, spaces or Unicode forms only do not count as two."""
    texts = (unicodedata.normalize("NFKC", row[field]).casefold().split() for field in _CONTENT[domain])
    return "\n".join(" ".join(words) for words in texts)


# --- medmcqa


def _read_numbers(files: list[RowFile]) -> None:
    """CSV has texts only: a cop that is a number becomes one, an empty one null."""
    for file in files:
        if file.kind == "CSV":
            for row in file.rows:
                text = row.values.get("cop", "").strip()
                if text.removeprefix("-").isdecimal() or not text:
                    row.values["cop"] = int(text) if text else None


def _cop_base(files: list[RowFile], given: int | None) -> tuple[int, str]:
    """The number that stands for A, and how it was found: only 0-based files have zeros, only 1-based ones fours."""
    counts, first = Counter(), {}
    for file in files:
        for row in file.rows:
            cop = row.values.get("cop")
            if _is_int(cop):
                counts[cop] += 1
                first.setdefault(cop, row.place)
    seen = f"{counts[0]:,} zeros, {counts[4]:,} fours"
    if given is not None:
        return given, f"cop is read as {given}-based, as --cop_base says ({seen})"
    if counts[0] and counts[4] and max(counts[0], counts[4]) < _RARE * min(counts[0], counts[4]):
        where = f"0 first in {first[0]}, 4 first in {first[4]}"
        raise UserError(f"cop is neither 0-based nor 1-based ({seen}; {where}); pass --cop_base=0 or 1, or mend them.")
    if counts[4] > counts[0]:
        return 1, f"cop is 1-based ({seen}); it is stored 0-based"
    if counts[0] or counts[-1]:
        return 0, f"cop is 0-based ({seen})"
    if any(counts[cop] for cop in (1, 2, 3)):
        raise UserError("cop is 1, 2 or 3 in all rows, which may begin with 0 or 1; pass --cop_base=0 or --cop_base=1.")
    return 0, "no row has an answer (cop)"


def _medmcqa(values: dict[str, Any], base: int, answered: bool) -> Row:
    row: Row = {"id": _id(values.get("id"))}
    for field in ("question", *OPTIONS):
        row[field] = _text(values, field)
    row["cop"] = _cop(values.get("cop"), base, answered)
    row["choice_type"] = _text(values, "choice_type")
    if row["choice_type"] not in ("single", "multi"):
        raise _Refused(f"choice_type is {row['choice_type']!r}, neither single nor multi")
    return row | {field: _optional_text(values, field) for field in NULLABLE}


def _cop(cop: Any, base: int, answered: bool) -> int:
    """0 to 3, or -1 in a split without answers."""
    if cop is None or (_is_int(cop) and cop == -1):
        if answered:
            raise _Refused("no answer (cop), and other rows of its split have one")
        return -1
    if not _is_int(cop):
        raise _Refused(f"cop is {cop!r}, not an integer")
    if not base <= cop < base + 4:
        raise _Refused(f"cop is {cop}, outside {base} to {base + 3}")
    return cop - base


# --- safety


def _columns(files: list[RowFile], given: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """For each file, which column holds which field, and sentences about what is not as named."""
    columns, notes = {}, []
    for file in files:
        there = file.columns()
        mapping = {field: given.get(field, field) for field in SAFETY_FIELDS}
        if "text" not in given and "text" not in there and "prompt" in there:
            mapping["text"] = "prompt"
            notes.append(f"{file.name} has no column text; prompt is taken")
        missing = [field for field in SAFETY_FIELDS if mapping[field] not in there]
        for field in missing if file.rows else ():
            if field in given or field in ("text", "label"):
                raise UserError(
                    f"{file.name} has no column {mapping[field]!r} for {field} but {', '.join(there)}; "
                    f"name the right one with --fields={field}=COLUMN."
                )
        if "id" in missing:
            notes.append(f"{file.name} has no ids; they are made of the file's name and the line")
        if "source" in missing:
            notes.append(f"{file.name} has no column source; it is left empty")
        columns[file.name] = mapping
    return columns, notes


def _safety(raw: RawRow, columns: dict[str, str], labels: Mapping[str, str]) -> Row:
    values = {field: raw.values.get(column) for field, column in columns.items()}
    stem = raw.file.rsplit("/", 1)[-1].rsplit(".", 1)[0]
    if values["id"] in (None, ""):
        values["id"] = f"{stem}-{raw.line}"
    if values["label"] is None:
        raise _Refused("label is missing")
    if not isinstance(values["label"], str | int):
        raise _Refused(f"label is {values['label']!r}, not a text")
    label = labels.get(str(values["label"]).strip().casefold())
    if label is None:
        raise _Refused(f"label {values['label']!r} is unknown; --labels={values['label']}=yes or =no maps it")
    return {
        "id": _id(values["id"]),
        "text": _text(values, "text"),
        "label": label,
        "source": _optional_text(values, "source"),
    }


# --- single values


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _id(value: Any) -> str:
    """Ids that are numbers are common, and mean the same as text."""
    return str(value) if _is_int(value) else _text({"id": value}, "id")


def _text(values: Mapping[str, Any], field: str) -> str:
    value = values.get(field)
    if value is None:
        raise _Refused(f"{field} is {'null' if field in values else 'missing'}")
    text = _optional_text(values, field)
    if not text.strip():
        raise _Refused(f"{field} is empty")
    return text


def _optional_text(values: Mapping[str, Any], field: str) -> str:
    value = values.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _Refused(f"{field} is not a text but of type {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no UTF-8 can hold
        raise _Refused(f"{field} has half a surrogate pair") from None
    return value
