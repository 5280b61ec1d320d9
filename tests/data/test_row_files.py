"""Files of rows: which are found, and what every line of them becomes."""

import hashlib
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from nca_jax.data.row_files import BadRow, RowFile, read_source, split_of
from nca_jax.errors import UserError


def read(tmp_path, name: str, content: bytes) -> RowFile:
    (tmp_path / name).write_bytes(content)
    (file,), others = read_source(str(tmp_path / name))
    assert others == []
    return file


def places(file: RowFile) -> list[tuple[int, dict]]:
    assert {row.file for row in file.rows} <= {file.name}
    return [(row.line, row.values) for row in file.rows]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("TRAIN.JSON", "train"),
        ("train-00000-of-00001.parquet", "train"),
        ("training_set.csv", "train"),
        ("validation.jsonl", "validation"),
        ("valid.csv", "validation"),
        ("val_2.csv", "validation"),
        ("dev.json", "validation"),
        ("test.json", "test"),
        ("hatecheck_train.jsonl", "train"),
        ("jokes-dev.csv", "validation"),
        ("jokes.test.csv", "test"),
        ("test_of_train.csv", "test"),
        ("latest.jsonl", None),
        ("xstest.jsonl", None),
        ("constrain.jsonl", None),
        ("my_train_rows.jsonl", None),
    ],
)
def test_split_is_what_the_name_begins_or_ends_with(name, split):
    assert split_of(name) == split


def test_files_are_found_by_suffix_in_the_directory_and_in_its_data(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    for name in (
        "b.JSONL",
        "a.json",
        ".hidden.jsonl",
        "README.md",
        "data/train.CSV",
        "data/notes.txt",
        "other/x.jsonl",
    ):
        (tmp_path / name).write_text("")
    files, others = read_source(str(tmp_path))
    assert [(file.name, file.kind) for file in files] == [
        ("a.json", "JSON Lines"),
        ("b.JSONL", "JSON Lines"),
        ("data/train.CSV", "CSV"),
    ]
    assert others == ["README.md", "data/notes.txt"]


def test_a_source_without_rows_is_an_error(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        read_source(str(tmp_path / "nowhere"))
    (tmp_path / "rows.tsv").write_text("a\tb")
    for source in (tmp_path, tmp_path / "rows.tsv"):
        with pytest.raises(UserError, match=r"has no \.jsonl, \.json, \.csv, \.parquet files"):
            read_source(str(source))


def test_every_json_line_is_a_row_a_blank_or_bad(tmp_path):
    lines = [
        '{"a": "one"}',
        "",
        '{"a": "two\u2028\x85 lines"}\r',  # not ends of lines in JSON
        "not json",
        "   \r",
        "[1, 2]",
        '"text"',
        '\ufeff{"a": "three"}',
        '{"a": "cut',
        "[" * 100_000,
        '{"a": "last"}',
    ]
    content = "\n".join(lines).encode()
    file = read(tmp_path, "x.jsonl", content)
    assert places(file) == [(1, {"a": "one"}), (3, {"a": "two\u2028\x85 lines"}), (11, {"a": "last"})]
    assert [(row.line, row.reason.split(" (")[0]) for row in file.bad] == [
        (4, "not JSON"),
        (6, "not a JSON object but of type list"),
        (7, "not a JSON object but of type str"),
        (8, "a byte order mark inside the file"),
        (9, "not JSON"),
        (10, "not JSON"),
    ]
    assert file.notes == ["x.jsonl: blank lines, 2 in all, are ignored: 2, 5"]
    assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert str(BadRow("x.jsonl", 4, "why")) == "x.jsonl:4: why"


@pytest.mark.parametrize(
    "content", [b'{"a": "x"}\n{"a": "y"}\n', b'{"a": "x"}\r\n{"a": "y"}\r\n', b'{"a": "x"}\n{"a": "y"}']
)
def test_the_end_of_the_last_line_is_no_blank_line(tmp_path, content):
    file = read(tmp_path, "x.jsonl", content)
    assert places(file) == [(1, {"a": "x"}), (2, {"a": "y"})] and file.notes == [] and file.bad == []


def test_long_lists_of_blank_lines_are_cut_but_counted(tmp_path):
    file = read(tmp_path, "x.jsonl", b"\n" * 25 + b'{"a": "x"}')
    expected = ", ".join(str(n) for n in range(1, 21))
    assert file.notes == [f"x.jsonl: blank lines, 25 in all, are ignored: {expected}, ..."]


@pytest.mark.parametrize(("name", "content"), [("x.jsonl", b'{"a": "x"}\n'), ("x.csv", b"a\nx\n")])
def test_a_byte_order_mark_at_the_start_costs_no_row(tmp_path, name, content):
    file = read(tmp_path, name, b"\xef\xbb\xbf" + content)
    assert [values for _, values in places(file)] == [{"a": "x"}]
    assert file.notes == [f"{name}:1 begins with a byte order mark, which is ignored"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_what_is_not_utf8_is_named_with_its_byte(tmp_path, name):
    with pytest.raises(UserError, match=rf"{name} is not UTF-8 at byte 7;"):
        read(tmp_path, name, b"\xc3\xa9\xc3\xa9,b\n\xff\n")


def test_a_json_array_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"x\.json is one JSON array; write one object per line"):
        read(tmp_path, "x.json", json.dumps([{"a": "x"}], indent=1).encode())


def test_csv_lines_are_those_of_the_file(tmp_path):
    content = (
        "text , label\r\n"  # line 1
        '"two\r\nlines, and a comma",yes\r\n'  # 2, 3
        "\r\n"  # 4
        '"three\n\n""quoted"" lines",no\n'  # 5 to 7
        "too,many,cells\n"  # 8
        "one\n"  # 9
        "\ufeffx,yes\n"  # 10
        "last,no"  # 11
    )
    file = read(tmp_path, "x.csv", content.encode())
    assert places(file) == [
        (2, {"text": "two\r\nlines, and a comma", "label": "yes"}),
        (5, {"text": 'three\n\n"quoted" lines', "label": "no"}),
        (11, {"text": "last", "label": "no"}),
    ]
    assert file.bad == [
        BadRow("x.csv", 8, "number of cells: 3, but the header has 2"),
        BadRow("x.csv", 9, "number of cells: 1, but the header has 2"),
        BadRow("x.csv", 10, "a byte order mark inside the file"),
    ]
    assert file.notes == ["x.csv: blank lines, 1 in all, are ignored: 4"]


def test_csv_whose_quotes_are_wrong_is_an_error_at_the_line_it_begins_at(tmp_path):
    with pytest.raises(UserError, match=r"x\.csv:3 is not proper CSV \(unexpected end of data\)"):
        read(tmp_path, "x.csv", b'a,b\n1,2\n"never closed,3\n4,5\n')
    with pytest.raises(UserError, match=r"x\.csv has the column 'a' twice"):
        read(tmp_path, "x.csv", b"a,b,a\n1,2,3\n")


def test_parquet_rows_are_numbered_from_one(tmp_path):
    rows = [{"a": "é", "n": 3}, {"a": None, "n": -1}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    (file,), _ = read_source(str(tmp_path))
    assert (file.kind, file.split, places(file)) == ("Parquet", "train", [(1, rows[0]), (2, rows[1])])
    with pytest.raises(UserError, match=r"x\.parquet is not a readable Parquet file"):
        read(tmp_path, "x.parquet", b"PAR1 but nothing else")
