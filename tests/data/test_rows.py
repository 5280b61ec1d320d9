"""Rows of the user's files: every one is taken as it is, or reported with its place and the reason."""

import json
import random
from collections import Counter

import pyarrow as pa
import pytest
from conftest import SHARED
from pyarrow import parquet

from nca_jax.data.rows import ReadOptions, read_rows
from nca_jax.errors import UserError


def question(number: int, cop: int | None = 1, **other) -> dict:
    """A row of the authors' release."""
    row = {"id": f"q{number}", "question": f"Question {number}?", "opa": "a", "opb": "b", "opc": "c", "opd": "d"}
    row |= {"cop": cop, "choice_type": "single", "exp": "Why", "subject_name": "S", "topic_name": "T"}
    return row | other


def write(path, rows: list) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def medmcqa(tmp_path, options: ReadOptions | None = None, **files):
    for name, rows in files.items():
        write(tmp_path / f"{name}.jsonl", rows)
    return read_rows("medmcqa", str(tmp_path), options)


def safety(tmp_path, options: ReadOptions | None = None, **files):
    for name, rows in files.items():
        write(tmp_path / f"{name}.jsonl", rows)
    return read_rows("safety", str(tmp_path), options)


def cops(checked, split: str = "train") -> list[int]:
    return [row["cop"] for row in checked.splits[split]]


def reasons(checked) -> list[tuple[str, int, str]]:
    return [tuple(row) for row in checked.bad]


# --- medmcqa


def test_a_row_comes_out_as_it_was_but_for_the_base_and_nulls(tmp_path):
    rows = [
        question(1, 4, question="  Größe\u2028? 😀 "),
        question(2, 1, exp=None, subject_name=None, choice_type="multi", extra=[1]),
        question(3, 2, id=17),
    ]
    del rows[2]["topic_name"]
    checked = medmcqa(tmp_path, train=rows)
    assert checked.splits == {
        "train": [
            question(1, 3, question="  Größe\u2028? 😀 "),
            question(2, 0, exp="", subject_name="", choice_type="multi"),
            question(3, 1, id="17", topic_name=""),
        ]
    }
    assert checked.bad == []


@pytest.mark.parametrize(
    ("given", "stored", "note"),
    [
        ([1, 2, 3, 4], [0, 1, 2, 3], "cop is 1-based (0 zeros, 1 fours); it is stored 0-based"),
        ([0, 1, 2, 3], [0, 1, 2, 3], "cop is 0-based (1 zeros, 0 fours)"),
        ([4, 4], [3, 3], "cop is 1-based (0 zeros, 2 fours); it is stored 0-based"),
        ([0, 0], [0, 0], "cop is 0-based (2 zeros, 0 fours)"),
    ],
)
def test_the_base_of_cop_is_detected(tmp_path, given, stored, note):
    checked = medmcqa(tmp_path, train=[question(i, cop) for i, cop in enumerate(given)])
    assert cops(checked) == stored and note in checked.notes and not checked.bad


def test_the_base_is_one_for_all_files_together(tmp_path):
    train = [question(i, 1 + i % 3) for i in range(6)]
    checked = medmcqa(tmp_path, train=train, dev=[question(9, 4)])
    assert cops(checked) == [0, 1, 2, 0, 1, 2] and cops(checked, "validation") == [3]


def test_without_zeros_and_fours_the_base_has_to_be_given(tmp_path):
    rows = [question(i, 1 + i % 3) for i in range(6)]
    with pytest.raises(UserError, match=r"cop is 1, 2 or 3 in all rows.*--cop_base=0 or --cop_base=1"):
        medmcqa(tmp_path, train=rows)
    assert cops(medmcqa(tmp_path, ReadOptions(cop_base=0), train=rows)) == [1, 2, 3, 1, 2, 3]
    checked = medmcqa(tmp_path, ReadOptions(cop_base=1), train=rows)
    assert cops(checked) == [0, 1, 2, 0, 1, 2]
    assert "cop is read as 1-based, as --cop_base says (0 zeros, 0 fours)" in checked.notes


@pytest.mark.parametrize(("common", "rare", "base"), [(4, 0, 1), (0, 4, 0)])
def test_a_cop_that_is_twenty_times_rarer_is_a_mistake(tmp_path, common, rare, base):
    rows = [question(i, common) for i in range(20)] + [question(20, rare)]
    checked = medmcqa(tmp_path, train=rows)
    assert cops(checked) == [common - base] * 20
    assert reasons(checked) == [("train.jsonl", 21, f"cop is {rare}, outside {base} to {base + 3}")]


def test_a_cop_that_is_nineteen_times_rarer_is_an_error_with_both_places(tmp_path):
    rows = [question(i, 4) for i in range(19)] + [question(20, 0)]
    expected = r"1 zeros, 19 fours; 0 first in validation\.jsonl:1, 4 first in train\.jsonl:1\).*--cop_base"
    with pytest.raises(UserError, match=expected):
        medmcqa(tmp_path, train=rows[:19], validation=rows[19:])
    checked = medmcqa(tmp_path, ReadOptions(cop_base=1), train=[*rows[:19], question(21, 0)], validation=[question(22)])
    assert [row.line for row in checked.bad] == [20]


@pytest.mark.parametrize("no_answer", [{"cop": -1}, {"cop": None}, {}], ids=["-1", "null", "absent"])
def test_a_split_without_answers_is_kept(tmp_path, no_answer):
    test = [question(i) for i in (8, 9)]
    for row in test:
        del row["cop"]
        row |= no_answer
    checked = medmcqa(tmp_path, train=[question(1, 0), question(2, 3)], test=test)
    assert cops(checked, "test") == [-1, -1] and cops(checked) == [0, 3] and not checked.bad


def test_an_impossible_answer_does_not_make_its_split_an_answered_one(tmp_path):
    test = [question(8, -1), question(9, 7)]
    checked = medmcqa(tmp_path, train=[question(1, 0), question(2, 3)], test=test)
    assert cops(checked, "test") == [-1]
    assert reasons(checked) == [("test.jsonl", 2, "cop is 7, outside 0 to 3")]


@pytest.mark.parametrize("no_answer", [-1, None])
def test_where_others_have_an_answer_a_row_without_one_is_bad(tmp_path, no_answer):
    checked = medmcqa(tmp_path, train=[question(1, 0), question(2, no_answer), question(3, 3)])
    assert reasons(checked) == [("train.jsonl", 2, "no answer (cop), and other rows of its split have one")]


def test_minus_one_beside_answers_of_one_to_three_means_zero_based(tmp_path):
    checked = medmcqa(tmp_path, train=[question(1, 1), question(2, 3)], test=[question(3, -1)])
    assert cops(checked) == [1, 3]


def test_a_source_without_any_answer_needs_no_base(tmp_path):
    checked = medmcqa(tmp_path, test=[question(1, None)])
    assert cops(checked, "test") == [-1] and "no row has an answer (cop)" in checked.notes


def test_parquet_of_the_hub(tmp_path):
    (tmp_path / "data").mkdir()
    splits = {"train": [0, 1, 2, 3], "validation": [3, 0], "test": [-1, -1]}
    number = 0
    for split, answers in splits.items():
        rows = [question(number := number + 1, cop, exp=None) for cop in answers]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    checked = read_rows("medmcqa", str(tmp_path))
    assert {split: cops(checked, split) for split in checked.splits} == splits
    assert list(checked.splits) == ["train", "validation", "test"]
    assert checked.splits["train"][0]["exp"] == "" and not checked.bad
    assert "data/train-00000-of-00001.parquet: Parquet, 4 rows, train" in checked.notes


def test_every_kind_of_bad_question_is_reported_with_its_line(tmp_path):
    without_opb = question(6)
    del without_opb["opb"]
    rows = [
        question(1, 4),  # line 1
        "{",
        "[]",
        question(4, question=None),
        question(5, opa="  "),
        without_opb,  # 6
        question(7, opc=3),
        question(8, "2"),
        question(9, 5),
        question(10, True),  # 10
        question(11, 2.0),
        question(12, choice_type="both"),
        question(13, exp=["x"]),
        question(14, id=None),
        question(15, id=1.5),  # 15
        question(16, opd="\ud800"),
        question(17, cop=0),
        question(1, question="Another one?"),
        question(19, question="QUESTION  1?\u00a0", opa="Ａ"),
        question(20, 2),  # 20
    ]
    rows += [question(i, 4) for i in range(21, 40)]
    checked = medmcqa(tmp_path, train=rows)
    assert [(row.line, row.reason.split(" (")[0]) for row in checked.bad] == [
        (2, "not JSON"),
        (3, "not a JSON object but of type list"),
        (4, "question is null"),
        (5, "opa is empty"),
        (6, "opb is missing"),
        (7, "opc is not a text but of type int"),
        (8, "cop is '2', not an integer"),
        (9, "cop is 5, outside 1 to 4"),
        (10, "cop is True, not an integer"),
        (11, "cop is 2.0, not an integer"),
        (12, "choice_type is 'both', neither single nor multi"),
        (13, "exp is not a text but of type list"),
        (14, "id is null"),
        (15, "id is not a text but of type float"),
        (16, "opd has half a surrogate pair"),
        (17, "cop is 0, outside 1 to 4"),
        (18, "the same id 'q1' is also in train.jsonl:1"),
        (19, "the same question and options are also in train.jsonl:1"),
    ]
    assert [row["id"] for row in checked.splits["train"]] == ["q1", *(f"q{i}" for i in range(20, 40))]


def test_a_csv_of_questions_has_numbers(tmp_path):
    header = "id,question,opa,opb,opc,opd,cop,choice_type,exp\n"
    (tmp_path / "train.csv").write_text(
        header + "1,Q1?,a,b,c,d,4,single,\n2,Q2?,a,b,c,d,x,single,E\n3,Q3?,a,b,c,d, 1,single,E\n"
    )
    (tmp_path / "test.csv").write_text(header + "4,Q4?,a,b,c,d,,single,\n")
    checked = read_rows("medmcqa", str(tmp_path))
    assert cops(checked) == [3, 0] and cops(checked, "test") == [-1]
    assert reasons(checked) == [("train.csv", 3, "cop is 'x', not an integer")]
    assert [row["exp"] for row in checked.splits["train"]] == ["", "E"]


# --- duplicates


def test_held_out_rows_win_over_training_rows(tmp_path):
    train = [question(1, 4), question(2), question(3), question(30, question="question 31?")]
    validation = [question(2), question(20, question="question  3?"), question(4)]
    test = [question(4), question(31)]
    checked = medmcqa(tmp_path, train=train, validation=validation, test=test)
    assert reasons(checked) == [
        ("train.jsonl", 2, "the same id 'q2' is also in validation.jsonl:1"),
        ("train.jsonl", 3, "the same question and options are also in validation.jsonl:2"),
        ("train.jsonl", 4, "the same question and options are also in test.jsonl:2"),
        ("validation.jsonl", 3, "the same id 'q4' is also in test.jsonl:1"),
    ]
    assert {split: [row["id"] for row in rows] for split, rows in checked.splits.items()} == {
        "train": ["q1"],
        "validation": ["q2", "q20"],
        "test": ["q4", "q31"],
    }


def test_one_other_option_makes_another_question(tmp_path):
    train = [question(1, 4), question(2, question="Question 1?", opd="other")]
    assert len(medmcqa(tmp_path, train=train).splits["train"]) == 2


def test_repeats_can_be_kept_within_a_split_only(tmp_path):
    train = [question(1, 4), question(2, question="Question 1?"), question(1, question="New?"), question(3)]
    files = {"train": train, "validation": [question(9, question="Question 3?"), question(10, question="Question 3?")]}
    checked = medmcqa(tmp_path, ReadOptions(keep_repeats=True), **files)
    assert [row["id"] for row in checked.splits["train"]] == ["q1", "q2"]
    assert [row["id"] for row in checked.splits["validation"]] == ["q9", "q10"]
    assert reasons(checked) == [
        ("train.jsonl", 3, "the same id 'q1' is also in train.jsonl:1"),
        ("train.jsonl", 4, "the same question and options are also in validation.jsonl:1"),
    ]
    assert [row.line for row in medmcqa(tmp_path, **files).bad] == [2, 3, 4, 2]


def test_a_bad_held_out_row_does_not_take_a_training_row_along(tmp_path):
    files = {
        "train": [{"text": "same", "label": "yes"}],
        "test": [{"text": "same", "label": "?"}, {"text": "t", "label": "no"}],
    }
    checked = safety(tmp_path, **files)
    assert [row["text"] for row in checked.splits["train"]] == ["same"] and len(checked.bad) == 1


# --- safety


def test_a_safety_row_has_what_it_lacks_filled_in_and_said(tmp_path):
    rows = [{"prompt": "One", "label": "YES "}, {"prompt": "Two ", "label": "no", "id": 7, "source": None}]
    checked = safety(tmp_path, train=rows, validation=[{"text": "Three", "label": "No", "id": "x", "source": "here"}])
    assert checked.splits == {
        "train": [
            {"id": "train-1", "text": "One", "label": "yes", "source": ""},
            {"id": "7", "text": "Two ", "label": "no", "source": ""},
        ],
        "validation": [{"id": "x", "text": "Three", "label": "no", "source": "here"}],
    }
    assert checked.notes[2:] == ["train.jsonl has no column text; prompt is taken"]
    bare = safety(tmp_path, train=[{"text": "One", "label": "yes"}])
    assert "train.jsonl has no ids; they are made of the file's name and the line" in bare.notes
    assert "train.jsonl has no column source; it is left empty" in bare.notes


def test_columns_and_labels_can_be_named(tmp_path):
    rows = [{"t": "One", "l": "Unsafe", "k": "a"}, {"t": "Two", "l": 0, "k": "b"}, {"t": "Three", "l": True, "k": "c"}]
    fields = {"text": "t", "label": "l", "source": "k"}
    checked = safety(
        tmp_path, ReadOptions(fields=fields, labels={"unsafe": "yes", "0": "no", "true": "yes"}), train=rows
    )
    assert [(row["text"], row["label"], row["source"]) for row in checked.splits["train"]] == [
        ("One", "yes", "a"),
        ("Two", "no", "b"),
        ("Three", "yes", "c"),
    ]


@pytest.mark.parametrize(
    ("row", "fields", "missing"),
    [
        ({"words": "x", "label": "yes"}, {}, "'text' for text but words, label"),
        ({"text": "x", "verdict": "yes"}, {}, "'label' for label but text, verdict"),
        ({"text": "x", "label": "yes"}, {"source": "type"}, "'type' for source but text, label"),
        ({"prompt": "x", "label": "yes"}, {"text": "text"}, "'text' for text but prompt, label"),
    ],
)
def test_a_column_that_is_not_there_is_an_error(tmp_path, row, fields, missing):
    with pytest.raises(UserError, match=rf"train\.jsonl has no column {missing}.*--fields="):
        safety(tmp_path, ReadOptions(fields=fields), train=[row])


def test_every_kind_of_bad_text_is_reported_with_its_line(tmp_path):
    rows = [
        {"text": "One", "label": "yes", "id": "a"},  # line 1
        {"text": "Two", "label": "unsafe"},
        {"text": "Three"},
        {"text": "", "label": "no"},
        {"text": ["Five"], "label": "no"},  # 5
        {"text": "Six", "label": 0.5},
        {"text": "Seven", "label": "no", "source": 3},
        {"text": "ONE", "label": "no"},
        {"text": "Nine", "label": "no", "id": "a"},
    ]
    assert reasons(safety(tmp_path, train=rows)) == [
        ("train.jsonl", 2, "label 'unsafe' is unknown; --labels=unsafe=yes or =no maps it"),
        ("train.jsonl", 3, "label is missing"),
        ("train.jsonl", 4, "text is empty"),
        ("train.jsonl", 5, "text is not a text but of type list"),
        ("train.jsonl", 6, "label is 0.5, not a text"),
        ("train.jsonl", 7, "source is not a text but of type int"),
        ("train.jsonl", 8, "the same text is also in train.jsonl:1"),
        ("train.jsonl", 9, "the same id 'a' is also in train.jsonl:1"),
    ]


def test_csv_ids_count_the_lines_of_the_file(tmp_path):
    (tmp_path / "test.csv").write_text('text,label,source\n"a\nb",yes,s\nc,no,\n')
    checked = read_rows("safety", str(tmp_path))
    assert [(row["id"], row["text"]) for row in checked.splits["test"]] == [("test-2", "a\nb"), ("test-4", "c")]


# --- splits


def test_a_split_without_a_good_row_is_an_error(tmp_path):
    with pytest.raises(
        UserError, match=r"^test\.jsonl has no good row; the first bad one is test\.jsonl:1: text is null\.$"
    ):
        safety(tmp_path, train=[{"text": "x", "label": "yes"}], test=[{"text": None, "label": "yes"}])
    with pytest.raises(UserError, match=r"^test\.jsonl has no good row; there are none at all\.$"):
        safety(tmp_path, train=[{"text": "x", "label": "yes"}], test=[])
    copied = [{"text": "x", "label": "yes"}]
    with pytest.raises(
        UserError, match=r"^train\.jsonl has no good row; .*train\.jsonl:1: the same text is also in test"
    ):
        safety(tmp_path, train=copied, test=copied)


def test_files_that_tell_no_split_need_holdout(tmp_path):
    write(tmp_path / "one" / "train.jsonl", [{"text": f"t{i}", "label": "yes"} for i in range(50)])
    write(tmp_path / "two" / "rows.jsonl", [{"text": "x", "label": "yes"}])
    for source in (tmp_path / "one" / "train.jsonl", tmp_path / "two"):
        with pytest.raises(UserError, match=r"nothing tells which rows of \w+\.jsonl are for training; --holdout=0.1"):
            read_rows("safety", str(source))
    assert len(read_rows("safety", str(tmp_path / "one")).splits["train"]) == 50
    for fraction in (0, 0.5, -1, 2):
        with pytest.raises(UserError, match=rf"--holdout={fraction} is no fraction between 0 and 0\.5"):
            read_rows("safety", str(tmp_path / "two"), ReadOptions(holdout=fraction))
    with pytest.raises(UserError, match=r"--holdout=0\.1 leaves no row of .* for"):
        read_rows("safety", str(tmp_path / "two"), ReadOptions(holdout=0.1))
    write(tmp_path / "one" / "test.jsonl", [{"text": "x", "label": "yes"}])
    with pytest.raises(UserError, match=r"--holdout would split anew what .* has as test\.jsonl, train\.jsonl"):
        read_rows("safety", str(tmp_path / "one"), ReadOptions(holdout=0.1))
    write(tmp_path / "one" / "more.jsonl", [{"text": "y", "label": "yes"}])
    with pytest.raises(UserError, match=r"has files that name a split, and more\.jsonl; rename or move"):
        read_rows("safety", str(tmp_path / "one"))


def test_holdout_depends_on_the_content_only(tmp_path):
    rows = [{"text": f"Text number {i}", "label": "yes", "id": str(i)} for i in range(1000)]

    def split(rows) -> dict[str, set[str]]:
        write(tmp_path / "rows.jsonl", rows)
        checked = read_rows("safety", str(tmp_path / "rows.jsonl"), ReadOptions(holdout=0.2))
        assert not checked.bad
        return {split: {row["text"] for row in rows} for split, rows in checked.splits.items()}

    before = split(rows)
    assert list(before) == ["train", "validation", "test"]
    assert Counter(text for texts in before.values() for text in texts) == Counter(row["text"] for row in rows)
    # Four standard deviations of a binomial distribution: 4 * sqrt(1000 * 0.2 * 0.8) = 51.
    assert abs(len(before["validation"]) - 200) < 51 and abs(len(before["test"]) - 200) < 51
    shuffled = [row | {"id": f"new {row['id']}", "label": "no"} for row in random.Random(0).sample(rows, len(rows))]
    assert split(shuffled) == before
    half = split(shuffled[:500])
    assert all(half[name] <= before[name] for name in before)


def test_holdout_reports_repeats_and_never_divides_them(tmp_path):
    write(
        tmp_path / "rows.jsonl",
        [{"text": f"{case(f'text {i}')}", "label": "yes"} for i in range(40) for case in (str, str.upper)],
    )
    checked = read_rows("safety", str(tmp_path / "rows.jsonl"), ReadOptions(holdout=0.25))
    assert [row.line for row in checked.bad] == list(range(2, 81, 2))
    kept = read_rows("safety", str(tmp_path / "rows.jsonl"), ReadOptions(holdout=0.25, keep_repeats=True))
    assert {split: len(rows) for split, rows in kept.splits.items()} == {
        split: 2 * len(rows) for split, rows in checked.splits.items()
    }


def test_the_fingerprint_tells_files_and_options_apart(tmp_path):
    rows = [question(1, 4), question(2, 1)]
    first = medmcqa(tmp_path, train=rows).fingerprint
    assert medmcqa(tmp_path).fingerprint == first
    assert medmcqa(tmp_path, ReadOptions(cop_base=1)).fingerprint == first  # what was detected
    assert medmcqa(tmp_path, ReadOptions(keep_repeats=True)).fingerprint != first
    assert medmcqa(tmp_path, train=[*rows, question(3)]).fingerprint != first


# --- samples beside the project


@pytest.mark.skipif(not (SHARED / "data").exists(), reason="the shared samples are not here")
def test_shared_samples_are_read_whole():
    checked = read_rows("medmcqa", str(SHARED / "data" / "medmcqa"))
    assert {split: len(rows) for split, rows in checked.splits.items()} == {"train": 400, "validation": 200}
    assert Counter(cops(checked)) == {0: 123, 1: 109, 2: 93, 3: 75} and not checked.bad
    options = ReadOptions(holdout=0.1, labels={"safe": "no", "unsafe": "yes"})
    checked = read_rows("safety", str(SHARED / "data" / "safety" / "xstest.jsonl"), options)
    labels = Counter(row["label"] for rows in checked.splits.values() for row in rows)
    assert labels == {"no": 250, "yes": 200} and not checked.bad
