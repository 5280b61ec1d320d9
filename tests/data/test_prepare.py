"""The command that makes a data set: what it prints, its exit codes, and that nothing half-written is left."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import SHARED
from etils import epath

from nca_jax.data import builders, prepare
from nca_jax.data.rows import read_rows

LINES = [
    {"text": "Größe", "label": "yes", "source": "a", "id": "1"},
    {"text": "no", "label": "no", "source": "b", "id": "2"},
    {"text": "longest text", "label": "no", "source": "b", "id": "3"},
]


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = prepare.main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def everything(directory) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture
def source(tmp_path):
    """Three good rows for training and one for validation."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LINES))
    (directory / "validation.jsonl").write_text('{"text": "held out", "label": "yes", "id": "v", "source": ""}\n')
    return directory


@pytest.fixture
def arguments(source, tmp_path):
    return ["--domain=safety", f"--source={source}", f"--data_dir={tmp_path / 'data'}"]


def test_says_what_it_found_and_what_it_wrote(arguments, tmp_path, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "train.jsonl: JSON Lines, 3 rows, train",
        "validation.jsonl: JSON Lines, 1 rows, validation",
        "train: 3 rows",
        "  yes 1, no 2",
        "  sources: 2",
        "  text: median 5, longest 12 characters",
        "validation: 1 rows",
        "  yes 1, no 0",
        "  sources: 0",
        "  text: median 8, longest 8 characters",
        "bad rows: 0",
        f"written: {tmp_path}/data/safety/1.0.0",
        f"to train on it: --config.domain.settings.data_dir={tmp_path}/data",
    ]
    assert builders.load("safety", str(tmp_path / "data"), "train") == LINES
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["safety"]


def test_questions_are_described(capsys):
    lines = prepare.describe(
        "medmcqa",
        [
            {"question": "1234", "cop": 0, "choice_type": "single", "exp": "", "subject_name": "", "topic_name": "T"},
            {"question": "1", "cop": 3, "choice_type": "multi", "exp": "E", "subject_name": "", "topic_name": "T"},
            {"question": "12", "cop": 3, "choice_type": "single", "exp": "E", "subject_name": "", "topic_name": "T"},
            {"question": "123", "cop": -1, "choice_type": "single", "exp": "E", "subject_name": "S", "topic_name": "T"},
        ],
    )
    assert lines == [
        "A 1, B 0, C 0, D 2, without an answer 1",
        "single 3, multi 1",
        "question: median 2.5, longest 4 characters",
        "null, stored as empty: exp 1, subject_name 3, topic_name 0",
    ]


def test_the_same_files_again_are_recognised_and_described(arguments, tmp_path, capsys):
    _, first, _ = run(capsys, *arguments)
    before = everything(tmp_path / "data")
    changed = os.stat(tmp_path / "data" / "safety" / "1.0.0").st_mtime_ns
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "") and everything(tmp_path / "data") == before
    assert os.stat(tmp_path / "data" / "safety" / "1.0.0").st_mtime_ns == changed
    same = f"{tmp_path}/data/safety/1.0.0 holds these rows already; nothing was written"
    assert out == first.replace(f"written: {tmp_path}/data/safety/1.0.0", same)


def test_overwrite_mends_a_damaged_data_set_of_the_same_files(arguments, tmp_path, capsys):
    run(capsys, *arguments)
    (records,) = (tmp_path / "data" / "safety" / "1.0.0").glob("*-train*")
    records.write_bytes(b"")
    assert run(capsys, *arguments, "--overwrite")[0] == 0
    assert builders.load("safety", str(tmp_path / "data"), "train") == LINES


@pytest.mark.parametrize("change", ["content", "options"])
def test_other_rows_replace_only_where_told_to(change, arguments, source, tmp_path, capsys):
    run(capsys, *arguments)
    before = everything(tmp_path / "data")
    if change == "content":
        (source / "validation.jsonl").write_text('{"text": "new", "label": "no", "id": "n", "source": ""}\n')
    else:
        arguments += ["--fields=text=source", "--keep_repeats"]
        (source / "validation.jsonl").write_text('{"text": "held out", "label": "yes", "id": "v", "source": "new"}\n')
    code, _, err = run(capsys, *arguments)
    assert code == 2 and everything(tmp_path / "data") == before
    assert re.match(r"error: .*/safety/1\.0\.0 holds rows of other files or options; pass --overwrite", err)
    code, out, err = run(capsys, *arguments, "--overwrite")
    assert (code, err) == (0, "") and f"written: {tmp_path}/data/safety/1.0.0" in out
    assert [row["text"] for row in builders.load("safety", str(tmp_path / "data"), "validation")] == ["new"]
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["safety"]


def test_bad_rows_are_listed_and_kept_in_full(arguments, source, tmp_path, capsys):
    with (source / "train.jsonl").open("a") as file:
        file.write("".join(f'{{"text": "t{i}", "label": "maybe"}}\n' for i in range(25)))
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "") and "train: 3 rows\n" in out
    reason = "label 'maybe' is unknown; --labels=maybe=yes or =no maps it"
    listed = [f"  train.jsonl:{line}: {reason}" for line in range(4, 24)]
    assert "\n".join(["bad rows: 25", *listed, "  and 5 more", ""]) in out
    path = tmp_path / "data" / "safety" / "1.0.0" / "bad_rows.jsonl"
    assert f"all bad rows: {path}\n" in out
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"file": "train.jsonl", "line": line, "reason": reason} for line in range(4, 29)
    ]
    assert builders.load("safety", str(tmp_path / "data"), "train") == LINES


def test_bad_rows_can_be_an_error_that_writes_nothing(arguments, source, tmp_path, capsys):
    assert run(capsys, *arguments, "--bad_rows=error")[0] == 0
    for path in (tmp_path / "data" / "safety" / "1.0.0").iterdir():
        path.unlink()
    (tmp_path / "data" / "safety" / "1.0.0").rmdir()
    before = sorted(tmp_path.rglob("*"))
    (source / "train.jsonl").write_text("broken\n" + (source / "train.jsonl").read_text())
    code, out, err = run(capsys, *arguments, "--bad_rows=error")
    assert code == 2 and "  train.jsonl:1: not JSON" in out
    assert err == "error: 1 bad rows, and --bad_rows=error allows none; nothing was written.\n"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("there", [False, True], ids=["new", "old"])
def test_an_interrupted_preparation_leaves_only_what_was_there(error, there, arguments, source, tmp_path, monkeypatch):
    if there:
        prepare.main(arguments)
    (tmp_path / "data").mkdir(exist_ok=True)
    before = everything(tmp_path / "data")
    (source / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LINES[:2]))
    written = []

    class Bar(contextlib.nullcontext):
        def __init__(self, **options):
            super().__init__(self)

        def update(self):
            written.append(list((tmp_path / "data").glob(".safety.partial/safety/*/*")))
            if len(written) == 2:
                raise error

    monkeypatch.setattr(prepare, "tqdm", Bar)
    with pytest.raises((error, RuntimeError)):
        prepare.main([*arguments, "--overwrite"])
    assert len(written) == 2
    assert everything(tmp_path / "data") == before
    assert [p.name for p in (tmp_path / "data").iterdir()] == (["safety"] if there else [])
    monkeypatch.undo()
    # What a killed process leaves is in nobody's way.
    (tmp_path / "data" / ".safety.partial" / "safety").mkdir(parents=True)
    assert prepare.main([*arguments, "--overwrite"]) == 0
    assert builders.splits("safety", str(tmp_path / "data")) == {"train": 2, "validation": 1}


def test_a_disk_that_takes_no_more_is_one_line(arguments, tmp_path):
    limit = 20_000  # bytes of a file; the smallest record file has 64 KiB
    script = (
        "import resource, sys; from nca_jax.data import prepare;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); sys.exit(prepare.main(sys.argv[1:]))"
    )
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    (line,) = (line for line in result.stderr.splitlines() if "WARNING" not in line)
    assert line == f"error: preparing stopped (File too large: {tmp_path}/data); nothing half-written is left."
    assert list((tmp_path / "data").iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line(source, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    code, _, err = run(capsys, "--domain=safety", f"--source={source}", f"--data_dir={tmp_path / 'file'}")
    assert code == 2 and err.startswith("error: preparing stopped (") and err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"
    mine = tmp_path / "data" / "safety" / "1.0.0" / "precious.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    code, _, err = run(
        capsys, "--domain=safety", f"--source={source}", f"--data_dir={tmp_path / 'data'}", "--overwrite"
    )
    assert code == 2 and "exists and is not a data set; choose another --data_dir" in err
    assert mine.read_text() == "mine"


def test_the_data_set_may_lie_among_its_sources(source, tmp_path, capsys):
    source.rename(tmp_path / "safety")
    arguments = ["--domain=safety", f"--source={tmp_path / 'safety'}", f"--data_dir={tmp_path}"]
    assert run(capsys, *arguments)[0] == 0 and run(capsys, *arguments, "--overwrite")[0] == 0
    assert sorted(p.name for p in (tmp_path / "safety").iterdir()) == ["1.0.0", "train.jsonl", "validation.jsonl"]
    assert "nothing was written" in run(capsys, *arguments)[1]


@pytest.fixture
def in_bucket(bucket, source, tmp_path, monkeypatch):
    """Arguments to prepare from a bucket into a bucket."""
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path / "cache"))
    for file in source.iterdir():
        (epath.Path(bucket) / "rows" / file.name).write_bytes(file.read_bytes())
    return ["--domain=safety", f"--source={bucket}/rows", f"--data_dir={bucket}/data"]


def objects(path: str) -> set[str]:
    """Names of what is in a directory of a bucket."""
    return {found.name for found in epath.Path(path).iterdir()} if epath.Path(path).exists() else set()


def test_from_a_bucket_into_a_bucket(in_bucket, capsys):
    code, out, err = run(capsys, *in_bucket)
    assert (code, err) == (0, "") and "validation.jsonl: JSON Lines, 1 rows, validation\n" in out
    assert out.endswith(
        "written: gs://bucket/data/safety/1.0.0\nto train on it: --config.domain.settings.data_dir=gs://bucket/data\n"
    )
    assert builders.load("safety", "gs://bucket/data", "train") == LINES
    assert "gs://bucket/data/safety/1.0.0 holds these rows already" in run(capsys, *in_bucket)[1]
    epath.Path("gs://bucket/rows/train.jsonl").write_text(json.dumps(LINES[0] | {"text": "new"}) + "\n")
    code, _, err = run(capsys, *in_bucket)
    assert code == 2 and "gs://bucket/data/safety/1.0.0 holds rows of other files or options; pass --overwrite" in err
    assert builders.load("safety", "gs://bucket/data", "train") == LINES
    assert run(capsys, *in_bucket, "--overwrite")[0] == 0
    assert builders.load("safety", "gs://bucket/data", "train") == [LINES[0] | {"text": "new"}]


@pytest.mark.parametrize("there", [False, True], ids=["new", "old"])
def test_a_copy_to_a_bucket_that_breaks_off_is_no_data_set(there, in_bucket, monkeypatch, capsys):
    directory = "gs://bucket/data/safety/1.0.0"
    if there:
        run(capsys, *in_bucket)
        epath.Path(f"{directory}/safety-dev.array_record-00000-of-00001").write_text("of another data set")
    copy, copied = builders.shutil.copyfileobj, []

    def breaks_off(reads, writes):
        copy(reads, writes)
        copied.append(objects(directory))
        if len(copied) == 5:
            raise OSError("connection lost")

    monkeypatch.setattr(builders.shutil, "copyfileobj", breaks_off)
    code, _, err = run(capsys, *in_bucket, "--overwrite")
    assert (code, err) == (2, "error: preparing stopped (connection lost); nothing half-written is left.\n")
    # The last of five is the one without which the others are nothing.
    assert [len(names) for names in copied] == [1, 2, 3, 4, 5] and "dataset_info.json" not in copied[3]
    assert objects(directory) == set()


def test_what_a_killed_copy_leaves_is_in_nobodys_way_and_other_files_are_kept(in_bucket, capsys):
    directory = epath.Path("gs://bucket/data/safety/1.0.0")
    (directory / "safety-train.array_record-00000-of-00001").write_text("half")
    (directory / "features.json").write_text("{}")
    assert run(capsys, *in_bucket)[0] == 0
    assert builders.load("safety", "gs://bucket/data", "train") == LINES
    (directory / "dataset_info.json").unlink()
    (directory / "precious.txt").write_text("mine")
    code, _, err = run(capsys, *in_bucket, "--overwrite")
    assert code == 2 and "1.0.0 exists and is not a data set; choose another --data_dir" in err
    assert (directory / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--labels=a=maybe"], "maps to 'maybe'; labels become yes or no"),
        (["--labels=unsafe"], "--labels=unsafe is wrong; write such as --labels=unsafe=yes,safe=no"),
        (["--fields=words=text"], "has 'words', none of id, text, label, source"),
        (["--fields=text="], "--fields=text= is wrong; write such as --fields=text=prompt,source=type"),
        (["--cop_base=1"], "--cop_base does not apply to safety; leave it out"),
        (["--domain=medmcqa", "--labels=a=yes"], "--labels does not apply to medmcqa; leave it out"),
        (["--domain=medmcqa", "--fields=text=a"], "--fields does not apply to medmcqa; leave it out"),
        (["--data_dir=tiny"], "--data_dir=tiny means the package's made-up rows; choose another directory"),
        (["--source=/nowhere"], "--source=/nowhere does not exist"),
        (["--holdout=0.1"], "--holdout would split anew"),
    ],
)
def test_options_that_cannot_be_meant_are_one_sentence(extra, message, arguments, tmp_path, capsys):
    code, _, err = run(capsys, *arguments, *extra)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_options_reach_the_reading(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("t,label\n" + "".join(f"text {i},{('BAD', 'fine')[i % 2]}\n" for i in range(60)))
    code, out, _ = run(
        capsys,
        "--domain=safety",
        f"--source={tmp_path / 'rows.csv'}",
        f"--data_dir={tmp_path / 'data'}",
        "--fields=text=t",
        "--labels=Bad=yes,fine=no",
        "--holdout=0.2",
    )
    assert code == 0 and "rows.csv: CSV, 60 rows, split by a hash" in out
    sizes = builders.splits("safety", str(tmp_path / "data"))
    assert list(sizes) == ["train", "validation", "test"] and sum(sizes.values()) == 60
    rows = [row for split in sizes for row in builders.load("safety", str(tmp_path / "data"), split)]
    assert {(row["text"], row["label"]) for row in rows} == {(f"text {i}", ("yes", "no")[i % 2]) for i in range(60)}
    question = {"id": "1", "question": "Q?", "opa": "a", "opb": "b", "opc": "c", "opd": "d", "choice_type": "single"}
    (tmp_path / "train.jsonl").write_text(
        json.dumps(question | {"cop": 2}) + "\n" + json.dumps(question | {"id": "2", "cop": 3}) + "\n"
    )
    (tmp_path / "rows.csv").unlink()
    same = ["--domain=medmcqa", f"--source={tmp_path}", f"--data_dir={tmp_path / 'data'}", "--keep_repeats"]
    assert run(capsys, *same)[0] == 2
    assert run(capsys, *same, "--cop_base=1")[0] == 0
    assert [row["cop"] for row in builders.load("medmcqa", str(tmp_path / "data"), "train")] == [1, 2]


def test_help_is_quick_and_wrong_arguments_exit_with_2(capsys):
    for wrong in (["--domain=other"], ["--domain=safety"], ["--cop_base=2"]):
        with pytest.raises(SystemExit) as stopped:
            prepare.main(wrong)
        assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        prepare.main(["--help"])
    assert stopped.value.code == 0 and "--holdout" in capsys.readouterr().out


@pytest.mark.skipif(not (SHARED / "data").exists(), reason="the shared samples are not here")
def test_shared_samples(tmp_path, capsys):
    code, out, _ = run(capsys, "--domain=medmcqa", f"--source={SHARED}/data/medmcqa", f"--data_dir={tmp_path}")
    assert code == 0 and "train: 400 rows\n" in out and "validation: 200 rows\n" in out and "bad rows: 0\n" in out
    assert "cop is 0-based (205 zeros, 0 fours)\n" in out
    for name in ("hatecheck_train.jsonl", "hatecheck_validation.jsonl"):
        (tmp_path / name).symlink_to(SHARED / "data" / "safety" / name)
    code, out, _ = run(
        capsys, "--domain=safety", f"--source={tmp_path}", f"--data_dir={tmp_path}", "--fields=source=type"
    )
    assert code == 0 and "train: 400 rows\n  yes 200, no 200\n" in out and "bad rows: 0\n" in out
    assert "validation: 200 rows\n  yes 100, no 100\n" in out
    wanted = [json.loads(line) for line in (tmp_path / "hatecheck_train.jsonl").read_text().splitlines()]
    assert builders.load("safety", str(tmp_path), "train") == [
        {"id": row["id"], "text": row["prompt"], "label": row["label"], "source": row["type"]} for row in wanted
    ]
    checked = read_rows("medmcqa", str(SHARED / "data" / "medmcqa"))
    assert {s: builders.load("medmcqa", str(tmp_path), s) for s in checked.splits} == checked.splits
