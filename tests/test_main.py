"""The command line: what a mistake gets. As a process of its own, for absl's flags are one set per process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = f"--config={ROOT}/configs/conventions.py"

MISTAKES = {
    "unknown key": ([CONFIG, "--config.typo=1"], "no key --config.typo"),
    "a key that is nearly right": ([CONFIG, "--config.anchor.betta=1"], "no key --config.anchor.betta;"),
    "unknown nested key": ([CONFIG, "--config.anchor.typo=1"], "no key --config.anchor.typo"),
    "a value below a leaf": ([CONFIG, "--config.steps.typo=1"], "typo"),
    "word for a number": ([CONFIG, "--config.steps=many"], "many"),
    "fraction for a whole number": ([CONFIG, "--config.steps=1.5"], "1.5"),
    "unknown flag": ([CONFIG, "--steps=3"], "steps"),
    "no such config file": (["--config=configs/no_such_file.py"], "no_such_file.py"),
    "no config": ([], "--config is missing; try --config=configs/conventions.py"),
    "an argument": ([CONFIG, "steps=3"], "unexpected argument 'steps=3'"),
}


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "nca_jax.main", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("arguments", "reason"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_and_leaves_nothing_behind(arguments, reason, tmp_path):
    done = run(tmp_path, *arguments, f"--workdir={tmp_path}/run")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and reason in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--config.accumulation=3", "config.batch_size 8 does not divide into 3"),
        ("--config.model.source=no_such_model", "no_such_model"),
    ],
)
def test_a_config_that_cannot_work_is_one_line_and_leaves_nothing_behind(argument, reason, tmp_path):
    done = run(tmp_path, CONFIG, argument)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
