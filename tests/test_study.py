"""A grid of runs: its points, what is run again, and the table."""

import csv
import subprocess
from pathlib import Path

import pytest
from etils import epath

from nca_jax import study
from nca_jax.errors import UserError

CONFIG = "configs/medmcqa.py:tiny"


class FakeRuns:
    """Stands for the training command: writes a summary with the run's beta as its harm, or fails."""

    def __init__(self, fails=()):
        self.commands, self.fails = [], fails

    def __call__(self, command, **_):
        self.commands.append(command)
        values = dict(word.removeprefix("--").split("=", 1) for word in command if word.startswith("--"))
        if Path(values["workdir"]).name in self.fails:
            return subprocess.CompletedProcess(command, 2, stdout="some words\nerror: too bad.\n")
        beta, seed = values.get("config.anchor.beta", "0.5"), values.get("config.seed", "0")
        measured = f"no_context={0.5 + int(seed) / 10:.3f} harm={float(beta):.3f}"
        line = f"summary method=nca_constant {measured} steps=4 seconds=7"
        (Path(values["workdir"]) / "summary.txt").write_text(line + "\n")
        return subprocess.CompletedProcess(command, 0, stdout="all well\n" + line + "\n")


@pytest.fixture
def fake(monkeypatch):
    runs = FakeRuns()
    monkeypatch.setattr(study.subprocess, "run", runs)
    return runs


def test_the_grid_is_every_combination():
    runs = study.grid(CONFIG, ["--config.steps=2"], ["anchor.beta=0,0.5", "seed=0,1,2"], [])
    assert [run.name for run in runs] == [f"anchor.beta={b},seed={s}" for b in ("0", "0.5") for s in "012"]
    assert runs[4].arguments == [
        f"--config={CONFIG}",
        "--config.steps=2",
        "--config.anchor.beta=0.5",
        "--config.seed=1",
    ]
    assert [r.name for r in study.grid(CONFIG, [], [], [])] == ["run"]
    ablated = study.grid(CONFIG, [], ["seed=0"], ["none", "dual"])
    assert [run.arguments for run in ablated] == [
        [f"--config={CONFIG}", "--config.seed=0"],
        [f"--config={CONFIG}+dual", "--config.seed=0"],
    ]


@pytest.mark.parametrize(
    ("vary", "ablations", "config", "reason"),
    [
        (["anchor.betta=0"], [], CONFIG, "no key --config.anchor.betta"),
        (["seed=zero"], [], CONFIG, "zero"),
        (["seed"], [], CONFIG, "write such as"),
        (["seed=1,,2"], [], CONFIG, "write such as"),
        (["seed=1", "seed=2"], [], CONFIG, "varied twice"),
        ([], ["duel"], CONFIG, "no ablation 'duel'"),
        ([], ["dual"], "configs/medmcqa.py", "need a setting"),
        ([], [], "configs/nothing.py", "nothing.py"),
    ],
)
def test_a_mistake_is_found_before_anything_runs(vary, ablations, config, reason):
    with pytest.raises(UserError, match=reason):
        study.grid(config, [], vary, ablations)


def test_runs_are_collected_in_a_table(fake, tmp_path, capsys):
    command = [f"--config={CONFIG}", f"--workdir={tmp_path}", "--vary", "anchor.beta=0,0.5", "--vary", "seed=0,2"]
    assert study.main(command) == 0
    assert len(fake.commands) == 4
    assert all(c[1:3] == ["-m", "nca_jax.main"] for c in fake.commands)
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [(r["anchor.beta"], r["seed"], r["no_context"], r["harm"]) for r in rows] == [
        ("0", "0", "0.500", "0.000"),
        ("0", "2", "0.700", "0.000"),
        ("0.5", "0", "0.500", "0.500"),
        ("0.5", "2", "0.700", "0.500"),
        ("0", "mean of 2", "0.600", "0.000"),
        ("0.5", "mean of 2", "0.600", "0.500"),
    ]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0] == "| anchor.beta | seed | method | no_context | harm | steps | seconds |"
    assert len(lines) == 8 and "| 0.5 | mean of 2 | nca_constant | 0.600 | 0.500 | 4.000 | 7.000 |" in lines
    assert "6 rows" in capsys.readouterr().out
    assert "all well" in (tmp_path / "anchor.beta=0,seed=0" / "log.txt").read_text()
    # Again: nothing is left to run.
    assert study.main(command) == 0 and len(fake.commands) == 4
    (tmp_path / "anchor.beta=0,seed=2" / "summary.txt").unlink()
    assert study.main([*command, "--table"]) == 0 and len(fake.commands) == 4
    assert len(list(csv.DictReader((tmp_path / "table.csv").open()))) == 5
    assert study.main(command) == 0 and len(fake.commands) == 5


def test_a_run_that_fails_does_not_stop_the_others(fake, tmp_path, capsys):
    fake.fails = ("seed=1",)
    assert study.main([f"--config={CONFIG}", f"--workdir={tmp_path}", "--vary", "seed=0,1,2"]) == 1
    printed = capsys.readouterr()
    assert "exit code 2: error: too bad." in printed.out and "1 of 3 runs failed: seed=1" in printed.err
    assert "some words" in (tmp_path / "seed=1" / "log.txt").read_text()
    assert len(fake.commands) == 3


def test_print_gives_a_command_for_each_and_runs_nothing(fake, tmp_path, capsys):
    workdir = tmp_path / "a study"
    assert study.main([f"--config={CONFIG}", f"--workdir={workdir}", "--vary", "seed=0,1", "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"python -m nca_jax.main --config={CONFIG} --config.seed={s} '--workdir={workdir}/seed={s}'" for s in "01"
    ]
    assert not fake.commands and not workdir.exists()


def test_a_table_of_nothing_is_said(fake, tmp_path, capsys):
    assert study.main([f"--config={CONFIG}", f"--workdir={tmp_path}", "--table"]) == 2
    assert "no run in" in capsys.readouterr().err
    assert study.table(study.grid(CONFIG, [], [], []), epath.Path(tmp_path)) == []
