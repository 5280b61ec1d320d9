"""A grid of runs: its points, what is run again, how long it takes, and the table."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from etils import epath

from nca_jax import study
from nca_jax.errors import UserError

ROOT = Path(__file__).parents[1]
CONFIG = "configs/medmcqa.py:tiny"
STUDY = "configs/study.py"


class FakeRuns:
    """Stands for the training command: writes checkpoints, a summary with the run's beta as its harm, or fails; or all
    of it dies, as by kill -9, once it has begun so many runs."""

    def __init__(self, fails=()):
        self.commands, self.fails, self.dies_at = [], fails, None

    def __call__(self, command, log, inherited=()):
        self.commands.append(command)
        values = dict(word.removeprefix("--").split("=", 1) for word in command if word.startswith("--"))
        if Path(values["workdir"]).name in self.fails:
            log.write_text("some words\nerror: too bad.\n")
            return 2, "error: too bad."
        (Path(values["workdir"]) / "checkpoints" / "4").mkdir(parents=True, exist_ok=True)
        if len(self.commands) == self.dies_at:
            raise SystemExit(137)
        beta, seed = values.get("config.anchor.beta", "0.5"), values.get("config.seed", "0")
        measured = f"no_context={0.5 + int(seed) / 10:.3f} harm={float(beta):.3f}"
        line = f"summary method=nca_constant {measured} steps=4 seconds=7"
        (Path(values["workdir"]) / "summary.txt").write_text(line + "\n")
        log.write_text(f"all well\n{line}\n")
        return 0, line


@pytest.fixture
def fake(monkeypatch):
    runs = FakeRuns()
    monkeypatch.setattr(study, "run_logged", runs)
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
        ([], ["gatedd"], f"{STUDY}:plural", "no method 'gatedd'"),
        ([], ["gated"], f"{STUDY}:plurals", "no setting 'plurals'"),
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


def test_a_part_of_the_grid(fake, tmp_path, capsys):
    command = [f"--config={CONFIG}", f"--workdir={tmp_path}", "--vary", "anchor.beta=0,0.5", "--vary", "seed=0,1,2"]
    assert study.main([*command, "--only=*seed=2", "--only=anchor.beta=0,seed=[02]"]) == 0
    ran = [command[-1].rsplit("/", 1)[1] for command in fake.commands]
    assert ran == ["anchor.beta=0,seed=0", "anchor.beta=0,seed=2", "anchor.beta=0.5,seed=2"]
    printed = capsys.readouterr().out
    assert "0 of 3 runs are finished" in printed and "[3/3] anchor.beta=0.5,seed=2" in printed
    # The rest goes on from there, as one study.
    assert study.main(command) == 0
    assert len(fake.commands) == 6 and "3 of 6 runs are finished" in capsys.readouterr().out
    assert study.main([*command, "--only=*seed=2", "--only=*seed=3"]) == 2
    assert "--only=*seed=3 matches no run; their names are such as anchor.beta=0,seed=0" in capsys.readouterr().err


def test_a_table_of_nothing_is_said(fake, tmp_path, capsys):
    assert study.main([f"--config={CONFIG}", f"--workdir={tmp_path}", "--table"]) == 2
    assert "no run in" in capsys.readouterr().err
    assert study.table(study.grid(CONFIG, [], [], []), epath.Path(tmp_path)) == []


# ---------------------------------------------------------------- the laptop study


def own_grid(name: str, workdir: Path, capsys) -> list[str]:
    """The directories of a grid that configs/study.py brings."""
    assert study.main([f"--config={STUDY}", f"--workdir={workdir}", f"--grid={name}", "--print"]) == 0
    return [line.rsplit("/", 1)[1].removesuffix("'") for line in capsys.readouterr().out.splitlines()]


def test_the_full_grid_has_every_method_on_every_task_with_three_seeds(tmp_path, capsys):
    names = own_grid("full", tmp_path, capsys)
    variants = "opd nca_0.1 nca_0.5 nca_1.0 warmup gated gated_1.0 opd_retention dual symmetric"
    retention = "gated_retention_0.1 gated_retention_0.5 gated_retention_0.5_three"
    methods = f"{variants} {retention}".split()
    assert sorted(names) == sorted(
        f"setting={task},ablation={method},seed={seed}"
        for task in ("plural", "category", "twice")
        for method in methods
        for seed in (0, 1, 2)
    )
    assert len(own_grid("quick", tmp_path, capsys)) == 4


def test_the_grid_of_another_rate_differs_in_nothing_else(tmp_path, capsys):
    methods = ["opd", "nca_0.5", "gated"]
    assert sorted(own_grid("rate", tmp_path, capsys)) == sorted(
        f"setting={task},ablation={method}_at_1e-4,seed=1" for task in ("plural", "twice") for method in methods
    )
    names = [*methods, *(f"{method}_at_1e-4" for method in methods)]
    runs = {r.values["ablation"]: r.config for r in study.grid(STUDY, [], [], names, ["twice"])}
    for method in methods:
        faster = runs[f"{method}_at_1e-4"].copy_and_resolve_references()
        assert faster.optimizer.learning_rate == 1e-4
        faster.optimizer.learning_rate = 5e-5
        assert faster == runs[method]


def test_points_are_what_their_names_say():
    runs = {r.values["ablation"]: r.config for r in study.grid(STUDY, [], [], METHODS, ["twice"])}

    def of(name: str) -> tuple:
        a, r = runs[name].anchor, runs[name].retention
        return (a.beta, a.schedule, a.tau, a.target, a.divergence, a.stop_gradient, r.gamma, tuple(r.contexts))

    nca = ("student", "forward_kl", True)
    three = ("plural", "category", "capitals")
    assert of("opd") == (0.0, "constant", 0.25, *nca, 0.0, ())
    assert of("nca_0.5") == (0.5, "constant", 0.25, *nca, 0.0, ())
    assert of("nca_0.1")[0] == 0.1 and of("nca_1.0")[0] == 1.0
    assert of("gated") == (0.5, "gated", 0.25, *nca, 0.0, ()) and of("gated_1.0")[2] == 1.0
    assert of("gated_retention_0.5") == (0.5, "gated", 0.25, *nca, 0.5, ("plural",))
    assert of("gated_retention_0.1")[6:] == (0.1, ("plural",)) and of("gated_retention_0.5_three")[6:] == (0.5, three)
    assert of("opd_retention") == (0.0, "constant", 0.25, *nca, 0.5, ("plural",))
    assert of("warmup")[:2] == (0.5, "warmup") and runs["warmup"].anchor.start_step == 10
    assert of("dual")[3:6] == ("teacher", "forward_kl", True)
    assert of("symmetric")[3:6] == ("student", "symmetric_kl", False)
    # The model before training is evaluated once for all methods; no retention shows what is tested.
    assert [name for name, config in runs.items() if config.evaluation.at_start] == ["opd"]
    for config in runs.values():
        tested = {config.domain.settings.convention, config.domain.settings.other_task}
        assert config.domain.settings.convention == "twice" and not tested & set(config.retention.contexts)
        assert {"paraphrased", "shortened", "other_task"} == set(config.evaluation.contexts)
        assert config.model.source == "smollm2_135m_instruct" and config.model.param_dtype == "float32"


METHODS = study._brought(STUDY)["METHODS"]


def test_settings_and_grids_that_cannot_work_are_said(tmp_path, capsys):
    with pytest.raises(UserError, match="in the place of the one"):
        study.grid(f"{STUDY}:plural", [], [], [], ["twice"])
    assert study.main([f"--config={STUDY}", f"--workdir={tmp_path}", "--grid=huge", "--table"]) == 2
    assert "brings no grid 'huge'; it has full, quick, rate" in capsys.readouterr().err
    assert study.main([f"--config={CONFIG}", f"--workdir={tmp_path}", "--quick", "--table"]) == 2
    assert "brings no grid 'quick'; it has none" in capsys.readouterr().err


def test_a_study_that_was_killed_goes_on_where_it_was(fake, tmp_path, capsys):
    command = [f"--config={CONFIG}", f"--workdir={tmp_path}", "--vary", "seed=0,1,2", "--keep-checkpoints=seed=1"]
    fake.dies_at = 2
    with pytest.raises(SystemExit):
        study.main(command)
    finished = [path.parent.name for path in sorted(tmp_path.glob("*/summary.txt"))]
    assert finished == ["seed=0"] and (tmp_path / "seed=1" / "checkpoints").exists()
    fake.dies_at = None
    assert study.main(command) == 0
    begun = [command[-1].rsplit("/", 1)[1] for command in fake.commands]
    assert begun == ["seed=0", "seed=1", "seed=1", "seed=2"]
    # Checkpoints stay where they were asked for, and also a study that has nothing left to run clears up.
    assert [path.parent.name for path in tmp_path.glob("*/checkpoints")] == ["seed=1"]
    (tmp_path / "seed=2" / "checkpoints").mkdir()
    assert study.main(command) == 0 and len(fake.commands) == 4
    assert [path.parent.name for path in tmp_path.glob("*/checkpoints")] == ["seed=1"]


def test_the_time_is_said_before_and_while_it_runs(fake, tmp_path, capsys):
    command = [f"--config={STUDY}", f"--workdir={tmp_path}", "--settings=plural", "--ablations=opd,gated"]
    command += ["--vary", "seed=0,1"]
    fake.fails = ("setting=plural,ablation=gated,seed=1",)
    assert study.main(command) == 1
    printed = capsys.readouterr().out.splitlines()
    seconds, get = study._brought(STUDY)["seconds"], study.grid(STUDY, [], [], ["opd", "gated"], ["plural"])
    assumed = 2 * sum(seconds(run.config) for run in get)
    assert printed[0] == (
        f"0 of 4 runs are finished; the others take about {round(assumed / 60)} min (0 of 4 by their other seeds)"
    )
    # One seed of every point before the next.
    assert [line for line in printed if line.startswith("[")] == [
        "[1/4] setting=plural,ablation=opd,seed=0",
        "[2/4] setting=plural,ablation=gated,seed=0",
        "[3/4] setting=plural,ablation=opd,seed=1",
        "[4/4] setting=plural,ablation=gated,seed=1",
    ]
    took = tmp_path / "setting=plural,ablation=gated,seed=0" / "study.json"
    assert json.loads(took.read_text())["seconds"] == 7.0  # as its summary says: it may have been continued
    took.write_text('{"seconds": 240.0}')
    study.main(command)
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "3 of 4 runs are finished; the others take about 4 min (1 of 1 by their other seeds)"


def test_a_run_is_logged_as_it_goes_on(tmp_path):
    log = epath.Path(tmp_path / "log.txt")
    code = "import sys; print('one', flush=True); print('two', file=sys.stderr); sys.exit(3)"
    assert study.run_logged([sys.executable, "-c", code], log) == (3, "two")
    assert log.read_text() == "one\ntwo\n"


# A study whose only run writes its process id, and then a line every half second.
KILLED = """
import sys
from etils import epath
from nca_jax import study
workdir = epath.Path(sys.argv[1])
run = "import os, time\\nfor i in range(200): print(os.getpid(), flush=True); time.sleep(0.5)"
with study.alone(workdir) as inherited:
    study.run_logged([sys.executable, "-c", run], workdir / "log.txt", inherited)
"""


def is_alive(process: str) -> bool:
    """Not one that has ended and is only waiting to be looked after."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux which processes live")
def test_a_run_does_not_outlive_its_study_and_the_next_study_waits_for_its_end(tmp_path):
    first = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT)
    log = tmp_path / "log.txt"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    run = log.read_text().split()[0]
    with pytest.raises(UserError, match="another"), study.alone(epath.Path(tmp_path)):
        pass
    assert is_alive(run)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert is_alive(run)
    with study.alone(epath.Path(tmp_path)):
        # The lock goes with a process's files, a moment before the process itself.
        while is_alive(run) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_alive(run)
