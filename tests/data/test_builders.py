"""Prepared data sets: what goes in comes out, and what is missing or damaged is said."""

import json
import subprocess
import sys
from collections import Counter
from importlib import resources

import pytest

from nca_jax.data import builders
from nca_jax.data.prepare import write
from nca_jax.data.rows import CheckedRows
from nca_jax.errors import UserError

TEXTS = ["Größe", "é\u0301 😀\u2028\n\t", " \x00 ", "", "日本語", "a" * 5000, "\ufeff"]


def medmcqa_rows(split: str, count: int) -> list[dict]:
    """Rows in the checked form, with texts of all kinds in all fields."""
    rows = []
    for i in range(count):
        row = {"id": f"{split}-{i}", "cop": i % 5 - 1, "choice_type": ("single", "multi")[i % 2]}
        for k, name in enumerate(("question", "opa", "opb", "opc", "opd", "exp", "subject_name", "topic_name")):
            row[name] = TEXTS[(i + k) % len(TEXTS)] + str(i)
        rows.append(row)
    return rows


def safety_rows(split: str, count: int) -> list[dict]:
    return [
        {"id": f"{split}-{i}", "text": TEXTS[i % 7] + str(i), "label": ("yes", "no")[i % 2], "source": TEXTS[i % 3]}
        for i in range(count)
    ]


@pytest.mark.parametrize(("domain", "make"), [("medmcqa", medmcqa_rows), ("safety", safety_rows)])
def test_rows_come_back_equal_and_in_order(domain, make, tmp_path):
    # The library stores rows in the order of hashes; 1500 rows do not come out right by chance.
    splits = {"train": make("train", 1500), "validation": make("validation", 7), "test": make("test", 1)}
    write(domain, CheckedRows(splits, [], ["note"], "fingerprint"), str(tmp_path))
    assert builders.splits(domain, str(tmp_path)) == {"train": 1500, "validation": 7, "test": 1}
    for split, rows in splits.items():
        loaded = builders.load(domain, str(tmp_path), split)
        assert loaded == rows
        assert {type(value) for row in loaded for value in row.values()} <= {str, int}
    about = builders.metadata(domain, str(tmp_path))
    assert about == {"fingerprint": "fingerprint", "notes": ["note"], "bad_rows": 0}
    files = {path.name.split(".")[-1][:12] for path in (tmp_path / domain / "1.0.0").iterdir()}
    assert files == {"array_record", "json"}


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match=r"has no safety data set; .*prepare --domain=safety --source=DIR --data_dir=/"):
        builders.load("safety", str(tmp_path), "train")
    write("safety", CheckedRows({"train": safety_rows("train", 3)}, [], [], ""), str(tmp_path))
    with pytest.raises(UserError, match=r"has no split 'test'; there are train\.$"):
        builders.load("safety", str(tmp_path), "test")
    with pytest.raises(UserError, match=r"has no split 'dev'; there are train, validation, test\.$"):
        builders.load("safety", "tiny", "dev")
    with pytest.raises(UserError, match="has no medmcqa data set"):
        builders.splits("medmcqa", str(tmp_path))
    with pytest.raises(UserError, match="data_dir=gs://bucket/x is a bucket; prepare the data on a local disk"):
        builders.load("safety", "gs://bucket/x", "train")


@pytest.mark.parametrize("damage", ["gone", "cut", "features", "info"])
def test_a_damaged_data_set_is_said_to_be(damage, tmp_path):
    write("safety", CheckedRows({"train": safety_rows("train", 300)}, [], [], ""), str(tmp_path))
    directory = tmp_path / "safety" / "1.0.0"
    (records,) = directory.glob("*train*")
    expected = r"the safety data set of .* is damaged; prepare it again with --overwrite\."
    if damage == "gone":
        records.unlink()
    elif damage == "cut":
        records.write_bytes(records.read_bytes()[:-1])
    elif damage == "features":
        (directory / "features.json").unlink()
    else:
        (directory / "dataset_info.json").write_text('{"name":')
        expected = r"dataset_info\.json is not JSON"
    with pytest.raises(UserError, match=expected):
        builders.load("safety", str(tmp_path), "train")


def test_made_up_rows_need_no_tensorflow_datasets():
    code = (
        "import sys; from nca_jax.data import builders, prepare; builders.load('medmcqa', 'tiny', 'train');"
        "print([name for name in ('tensorflow_datasets', 'pyarrow', 'jax', 'tensorflow') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def tiny(domain: str) -> dict[str, list[dict]]:
    """The shipped files, read without our code."""
    directory = resources.files("nca_jax.data") / "tiny" / domain
    splits = ("train", "validation", "test")
    return {
        split: [json.loads(line) for line in (directory / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in splits
    }


@pytest.mark.parametrize("domain", ["medmcqa", "safety"])
def test_made_up_rows_are_all_there(domain):
    files = tiny(domain)
    assert builders.splits(domain, "tiny") == {"train": 48, "validation": 24, "test": 12}
    loaded = {split: builders.load(domain, "tiny", split) for split in files}
    assert len({row["id"] for rows in loaded.values() for row in rows}) == 84
    text = "question" if domain == "medmcqa" else "text"
    assert {split: [row[text] for row in rows] for split, rows in loaded.items()} == {
        split: [row[text] for row in rows] for split, rows in files.items()
    }
    assert len({row[text].casefold() for rows in files.values() for row in rows}) == 84


def test_made_up_questions_are_balanced_and_one_based():
    files = tiny("medmcqa")
    for split, rows in files.items():
        assert Counter(row["cop"] for row in rows) == dict.fromkeys((1, 2, 3, 4), len(rows) // 4)
        loaded = builders.load("medmcqa", "tiny", split)
        assert [row["cop"] + 1 for row in loaded] == [row["cop"] for row in rows]
        assert all(len({row[name] for name in ("opa", "opb", "opc", "opd")}) == 4 for row in rows)
    everything = [row for rows in files.values() for row in rows]
    assert Counter(row["choice_type"] for row in everything) == {"single": 83, "multi": 1}
    for name in ("exp", "subject_name", "topic_name"):
        assert 0 < sum(row[name] is None for row in everything) < 84
    bile = next(row for row in builders.load("medmcqa", "tiny", "train") if row["question"] == "Where is bile stored?")
    assert bile["op" + "abcd"[bile["cop"]]] == "Gallbladder"


def test_made_up_texts_are_balanced_by_label_and_source():
    for rows in tiny("safety").values():
        pairs = Counter((row["label"], row["source"]) for row in rows)
        sources = ("made_up_offensive", "made_up_hate")
        assert pairs == {(label, source): len(rows) // 4 for label in ("yes", "no") for source in sources}
