"""Prepared data sets: what goes in comes out, and what is missing or damaged is said."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from importlib import resources

import pytest
from etils import epath

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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where this host keeps copies; none yet."""
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


def put(data_dir: str, rows: list[dict], tmp_path, fingerprint: str = "") -> epath.Path:
    """A data set in a bucket, without our code for it; returns where it is."""
    local = tmp_path / f"prepared_{fingerprint}"
    write("safety", CheckedRows({"train": rows}, [], [], fingerprint), str(local), overwrite=True)
    target = epath.Path(data_dir) / "safety" / "1.0.0"
    for file in (local / "safety" / "1.0.0").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_data_set_in_a_bucket_is_copied_once(bucket, cache, tmp_path, caplog):
    rows = safety_rows("train", 300)
    there = put(f"{bucket}/data", rows, tmp_path)
    with caplog.at_level(logging.INFO, logger="nca_jax"):
        for _ in range(2):
            assert builders.load("safety", f"{bucket}/data", "train") == rows
    assert builders.splits("safety", f"{bucket}/data") == {"train": 300}
    assert builders.metadata("safety", f"{bucket}/data")["fingerprint"] == ""
    (copy,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        p.name: p.read_bytes() for p in there.iterdir()
    }
    total = sum(path.stat().st_size for path in copy.iterdir())
    assert [r.getMessage() for r in caplog.records] == [f"copied {there} to {copy}: {total:,} bytes"]
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [copy.name]


def test_another_data_set_at_the_same_place_is_copied_anew(bucket, cache, tmp_path):
    """Also one that differs in the values of its rows only."""
    rows = safety_rows("train", 300)
    put(f"{bucket}/data", rows, tmp_path, "a")
    assert builders.load("safety", f"{bucket}/data", "train") == rows
    other = [row | {"label": {"yes": "no ", "no": "yes"}[row["label"]].strip()} for row in rows]
    put(f"{bucket}/data", other, tmp_path, "b")
    assert builders.load("safety", f"{bucket}/data", "train") == other


@pytest.mark.parametrize("damage", ["gone", "cut", "info"])
def test_a_damaged_data_set_in_a_bucket_can_be_replaced_by_a_whole_one(damage, bucket, cache, tmp_path):
    rows = safety_rows("train", 300)
    there = put(f"{bucket}/data", rows, tmp_path)
    (records,) = (path for path in there.iterdir() if "train" in path.name)
    broken = there / "dataset_info.json" if damage == "info" else records
    if damage == "gone":
        records.unlink()
    else:
        broken.write_bytes(broken.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"the safety data set of gs://bucket/data is damaged|info\.json is not JSON"):
        builders.load("safety", f"{bucket}/data", "train")
    put(f"{bucket}/data", rows, tmp_path)
    assert builders.load("safety", f"{bucket}/data", "train") == rows


def test_processes_of_one_host_make_one_copy(bucket, cache, tmp_path, monkeypatch):
    put(f"{bucket}/data", safety_rows("train", 30), tmp_path)
    copy_files, copied, found = builders.copy_files, [], []

    def slowly(source, target):
        copied.append(target)
        time.sleep(0.3)
        return copy_files(source, target)

    def read():
        found.append(builders.splits("safety", f"{bucket}/data"))

    monkeypatch.setattr(builders, "copy_files", slowly)
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{"train": 30}] * 4 and len(copied) == 1


def test_a_copy_that_breaks_off_leaves_none(bucket, cache, tmp_path, monkeypatch):
    rows = safety_rows("train", 30)
    put(f"{bucket}/data", rows, tmp_path)
    monkeypatch.setattr(builders.shutil, "copyfileobj", lambda reads, writes: writes.write(reads.read()[:1]))
    with pytest.raises(
        UserError, match=r"gs://bucket/data/safety/1\.0\.0 has changed while it was copied; start the same"
    ):
        builders.load("safety", f"{bucket}/data", "train")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_and_a_bucket_that_cannot_be_reached(bucket, tmp_path, monkeypatch):
    put(f"{bucket}/data", safety_rows("train", 30), tmp_path)
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be copied to /.*/file/datasets \(.*; set NCA_JAX_CACHE to"):
        builders.load("safety", f"{bucket}/data", "train")
    with pytest.raises(UserError, match=r"gs://bucket/other has no safety data set; .* --data_dir=gs://bucket/other$"):
        builders.load("safety", f"{bucket}/other", "train")

    def unreachable(name):
        raise RuntimeError("no such bucket\nand more")

    monkeypatch.setattr(epath.backend.fsspec_backend, "_get_filesystem", unreachable)
    with pytest.raises(
        UserError, match=r"data_dir=gs://bucket/data cannot be reached \(no such bucket\); install gcsfs"
    ):
        builders.load("safety", f"{bucket}/data", "train")


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
