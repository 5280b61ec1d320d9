"""The command: what it leaves, what it keeps of earlier commands, and what it refuses."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import take_devices
from safetensors.numpy import save_file
from tiny_runs import ARCH, CONFIG, ITEMS, TOP8, moved, moved_tensors, tiny_config, write_base, write_run

from nca_jax.analysis.__main__ import main
from nca_jax.domains import domain_of
from nca_jax.domains.base import context_file
from nca_jax.models.huggingface import load_params

FILES = ["analysis.json"] + [
    f"{name}.{end}" for name in ("gradients", "representations", "updates") for end in ("csv", "png")
]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    take_devices(monkeypatch, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """OPD and NCA, of the same model on the same task; arrays are as large as in the studies' own tests."""
    directory = tmp_path_factory.mktemp("runs")
    context = directory / "context.json"
    context.write_text(json.dumps(context_file(domain_of(tiny_config(base)).context)))
    methods = {"a": {"anchor.beta": 0.0}, "b": {"anchor.beta": 0.5}}
    paths = [
        write_run(
            directory / name,
            tiny_config(base, **TOP8 | method | {"context.file": str(context), "batch_size": 8}),
            {2: moved(base, 1), 4: moved(base, 2 + number)},
        )
        for number, (name, method) in enumerate(methods.items())
    ]
    context.unlink()  # each run has its own copy
    return paths


def run(capsys, *arguments) -> tuple[int, str]:
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


def test_all_studies_of_two_runs(runs, tmp_path, capsys):
    arguments = [*runs, f"--items={ITEMS}", "--steps=2", f"--output={tmp_path}"]
    code, printed = run(capsys, *arguments)
    assert code == 0, printed
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    found = json.loads((tmp_path / "analysis.json").read_text())
    assert [study["name"] for study in found["studies"]] == ["representations", "gradients", "updates"]
    for study in found["studies"]:
        assert study["sentence"] in printed and "opd" in study["sentence"] and "nca_gated" in study["sentence"]
        assert (tmp_path / study["figure"]).read_bytes().startswith(b"\x89PNG") and study["title"]
        text = (tmp_path / study["csv"]).read_text()
        assert "nan" not in text and len(text.splitlines()) > 4
    representations, gradients, updates = (rows(tmp_path / study["csv"]) for study in found["studies"])
    assert {row["checkpoint"] for row in representations} == {"base", "opd", "nca_gated"}
    assert {row["items"] for row in representations} == {str(ITEMS)}
    assert {row["checkpoint"] for row in gradients} == {"base", "opd step 2", "nca_gated step 2"}
    assert {row["checkpoint"] for row in updates} == {"opd", "nca_gated"}
    # The runs have the same weights at step 2, and others at step 4, the newest.
    whole = {row["checkpoint"]: row for row in gradients if (row["layer"], row["module"]) == ("all", "all")}
    assert whole["opd step 2"]["norm_opd"] == whole["nca_gated step 2"]["norm_opd"] != whole["base"]["norm_opd"]
    norms = [row["norm"] for row in updates if (row["layer"], row["module"], row["other"]) == ("all", "all", "")]
    assert len(set(norms)) == 2
    assert [found["items"], *(study["items"] for study in found["studies"])] == [ITEMS, ITEMS, ITEMS, None]
    labels = ["base", "opd", "nca_gated", "opd step 2", "nca_gated step 2"]
    assert [checkpoint["label"] for checkpoint in found["checkpoints"]] == labels
    assert found["command"] == ["python", "-m", "nca_jax.analysis", *map(str, arguments)]
    steps = [(c["label"], c["path"], c["step"]) for c in found["studies"][2]["checkpoints"][1:]]
    assert steps == [("opd", str(runs[0]), 4), ("nca_gated", str(runs[1]), 4)]


def test_what_was_not_asked_for_stays(base, tmp_path, capsys):
    """Also without runs, and where it goes if nothing is said."""
    path = write_base(tmp_path / "trained")
    save_file(moved_tensors(1), path / "model.safetensors")
    output = path / "analysis"
    output.mkdir()
    kept = {"name": "gradients", "title": "t", "sentence": "s", "figure": "gradients.png", "csv": "gradients.csv"}
    stale = kept | {"name": "updates"}
    (output / "analysis.json").write_text(json.dumps({"studies": [stale, kept], "checkpoints": [], "items": 9}))
    (output / "gradients.csv").write_text("as it was")
    config = f"--config={Path(__file__).parents[2] / 'configs/conventions.py'}"
    code, printed = run(capsys, config, f"--base={base}", "--studies=updates", path)
    assert code == 0, printed
    found = json.loads((output / "analysis.json").read_text())
    assert found["studies"][0] == kept and (output / "gradients.csv").read_text() == "as it was"
    assert [study["name"] for study in found["studies"]] == ["gradients", "updates"]
    assert "trained moved the weights by" in found["studies"][1]["sentence"] in printed
    assert {row["checkpoint"] for row in rows(output / "updates.csv")} == {"trained"}
    assert [c["label"] for c in found["checkpoints"]] == ["base", "trained"]


def test_a_checkpoint_cannot_be_taken_for_the_base(base, tmp_path, capsys):
    path = write_base(tmp_path / "base")
    config = f"--config={Path(__file__).parents[2] / 'configs/conventions.py'}"
    code, printed = run(capsys, config, f"--base={base}", "--studies=updates", path, f"--output={tmp_path / 'out'}")
    assert code == 0 and f"{path} has the base's weights" in printed


def test_runs_that_are_alike_are_told_apart(base, tmp_path, capsys):
    params = moved(base, 1)
    seeds = [
        write_run(tmp_path / f"{name}", tiny_config(base, seed=seed), {1: params})
        for name, seed in (("x", 3), ("y", 7))
    ]
    again = write_run(tmp_path / "z", tiny_config(base, seed=7), {1: params})
    for paths, expected in (
        (seeds, {"nca_gated seed 3", "nca_gated seed 7"}),
        ([seeds[1], again], {"nca_gated y", "nca_gated z"}),
    ):
        code, printed = run(capsys, *paths, "--studies=updates", f"--output={tmp_path / 'out'}")
        assert code == 0, printed
        assert {row["checkpoint"] for row in rows(tmp_path / "out/updates.csv")} == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["OTHER", "--studies=weights"], "--studies has 'weights'"),
        (["OTHER", "--items=0"], "must be at least 1"),
        (["OTHER", "--steps=2,x"], "--steps=2,x is wrong"),
        (["OTHER", "--step=9", "--studies=updates"], "has no checkpoint 9; there are [1]"),
        (["OTHER", "--step=1", "--seps=2"], "unexpected argument '--seps=2'"),
        (["BASE"], "is no run; for other checkpoints give --config"),
        (["OTHER", "TASK"], "differ in config.domain"),
        (["OTHER", "CONTEXT"], "differ in their context"),
        (["OTHER", "MODEL"], "differ in config.model.source"),
        (["OLD"], "lacks 'checkpoint.minutes'"),
        (["OTHER", "--base=WIDE"], "another architecture than"),
        (["OTHER", "--base=OTHER"], "is a workdir; give the model that training began with"),
        (["--config=nothing.py", "BASE"], "the command line is wrong"),
        (["--config=CONFIGS/conventions.py", "--base=BASE", "nowhere"], "no directory"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments, reason, base, tmp_path, capsys):
    def made(name: str, model=base, **overrides):
        config = tiny_config(model, **overrides)
        params = {key: np.asarray(w) for key, w in load_params(base, ARCH).items()}
        return write_run(tmp_path / name, config, {1: params})

    places = {
        "BASE": lambda: base,
        "OTHER": lambda: made("other"),
        "TASK": lambda: made("task", **{"domain.settings.convention": "category"}),
        "CONTEXT": lambda: made("context", **{"context.text": "Be brief."}),
        "MODEL": lambda: made("model", model=write_base(tmp_path / "second")),
        "OLD": lambda: made("old"),
        "WIDE": lambda: write_base(tmp_path / "wide", CONFIG | {"intermediate_size": 96}),
        "CONFIGS": lambda: Path(__file__).parents[2] / "configs",
    }
    for name in [name for name in places if any(name in argument for argument in arguments)]:
        place = str(places[name]())
        arguments = [argument.replace(name, place) for argument in arguments]
    if (tmp_path / "old").exists():
        config = json.loads((tmp_path / "old/config.json").read_text())
        del config["checkpoint"]["minutes"]
        (tmp_path / "old/config.json").write_text(json.dumps(config))
    code, printed = run(capsys, *arguments, f"--output={tmp_path / 'out'}")
    assert code == 2 and reason in printed and printed.startswith("error: ") and printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_command_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "nca_jax.analysis", str(tmp_path), "--studies=updates"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=os.environ)
    assert done.returncode == 2 and "config.json does not exist" in done.stderr and not list(tmp_path.iterdir())
