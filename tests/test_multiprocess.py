"""Two processes with four devices each, over loopback, started by the script that every host of a pod runs."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import records, take_devices
from same_run import OVERRIDES, assert_same, config_of, overrides_on, wide_model

from nca_jax.train import train

REPOSITORY = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def environment(index: int, port: int, devices: int = 4, count: int = 2) -> dict[str, str]:
    """Of one of the processes of a job."""
    return os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "NCA_JAX_VENV": sys.prefix,
        "NCA_JAX_RETRIES": "3",
        "NCA_JAX_PAUSE": "0",
    }


class Job:
    """The job in two processes; `log` is what each has said so far, on both streams."""

    def __init__(self, model: Path, workdir: Path, overrides: dict):
        self.workdir = workdir
        flags = [f"--config.{key}={value}" for key, value in overrides.items()]
        self._command = ["bash", "launch/worker.sh", "--config=configs/conventions.py", f"--workdir={workdir}"]
        self._command += [f"--config.model.source={model}", *flags]
        self._port = free_port()
        self._logs = [workdir.with_name(f"{workdir.name}_{index}.log") for index in range(2)]
        self.processes = [self.start(index) for index in range(2)]

    def start(self, index: int) -> subprocess.Popen:
        with self._logs[index].open("a") as log:
            return subprocess.Popen(
                self._command, cwd=REPOSITORY, env=environment(index, self._port), stdout=log, stderr=log
            )

    def log(self, index: int) -> str:
        return self._logs[index].read_text()

    def wait_for(self, text: str, file: str = "metrics.jsonl", seconds: float = 300) -> None:
        """Returns when a file of the workdir holds that text."""
        deadline = time.monotonic() + seconds
        path = self.workdir / file
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < deadline, self.log(0) + self.log(1)
            assert self.processes[0].poll() is None, self.log(0)
            time.sleep(0.05)

    def finish(self) -> None:
        codes = [process.wait(timeout=300) for process in self.processes]
        assert codes == [0, 0], self.log(0) + self.log(1)

    def trainer(self, index: int) -> int:
        """Process id of the Python that trains, below the script."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.processes[index].pid)], stdout=subprocess.PIPE, text=True, check=True
        )
        return int(found.stdout.split()[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return wide_model(tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Path:
    """The run on one device."""
    workdir = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        train(config_of(model, OVERRIDES), str(workdir))
    return workdir


def test_what_processes_tell_each_other():
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("processes_script.py"))]
    paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    running = [
        subprocess.Popen(command, env=environment(index, port) | paths, stdout=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    first, second = (json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in running)
    assert first["made"] == [3, 0, 4] and second["made"] == [1, 2], "each makes its share"
    for found in (first, second):
        assert found["shared"] == [[list(range(n)), [n, n]] for n in (3, 1, 0, 2, 4)]
        assert found["one item"] == [[[0, 1, 2, 3, 4], [5, 5]]]
        assert found["of first"] == 7 and found["fine in first"] == "" and found["whole"]
    assert first["refused share"] == "process 1 has refused its share of the data; its log says why."
    assert second["refused share"] == "a negative item"
    assert first["refused in first"] == "not like this"
    assert second["refused in first"] == "the first process of the job has refused to go on; its log says why."
    # Eight rows over four groups of devices: each process is given the rows of its own.
    assert first["held"] == [0, 8] and second["held"] == [16, 24]


@pytest.fixture(scope="module")
def job_of_two(model, tmp_path_factory) -> Job:
    """A finished job of two processes."""
    job = Job(model, tmp_path_factory.mktemp("two") / "run", overrides_on(2, 1, 2, 2))
    job.finish()
    return job


def test_two_processes_of_four_devices_are_as_one_device(job_of_two, alone):
    job = job_of_two
    assert_same(job.workdir, alone)
    summary = (job.workdir / "summary.txt").read_text()
    assert job.log(0).endswith(summary) and "summary" not in job.log(1), "the first alone reports"
    assert json.loads((job.workdir / "heartbeats" / "process_1.json").read_text())["end"] == "closed"


def test_what_two_processes_have_saved_one_goes_on_with(model, job_of_two, alone, tmp_path, monkeypatch):
    """Weights, optimizer and the next batch, on another number of processes and devices."""
    take_devices(monkeypatch, 1)
    ends = []
    for name, workdir in (("two", job_of_two.workdir), ("one", alone)):
        shutil.copytree(workdir, tmp_path / name)
        train(config_of(model, OVERRIDES | {"steps": 4}), str(tmp_path / name))
        ends.append([record for record in records(tmp_path / name) if record["step"] == 4])
    assert len(ends[0]) == len(ends[1]) == 2
    for found, expected in zip(*ends, strict=True):
        assert found.keys() == expected.keys()
        for metric, value in expected.items():
            np.testing.assert_allclose(found[metric], value, rtol=1e-5, atol=1e-6, err_msg=metric)


@pytest.mark.slow
def test_a_host_that_is_taken_away_and_comes_back(model, alone, tmp_path):
    """The signal reaches one process; both stop after the same step, and go on when the second is back."""
    job = Job(model, tmp_path / "run", overrides_on(1, 1, 4, 2))
    job.wait_for("eval/no_context")  # before the first step, which is being compiled
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.processes[1].wait(timeout=300) == 75, job.log(1)
    assert "by a signal; the same command continues" in job.log(1)
    (stopped_after,) = set(re.findall(r"stopped at step (\d)", job.log(0) + job.log(1)))
    job.processes[1] = job.start(1)
    job.finish()
    assert f"continuing at step {stopped_after}" in job.log(0)
    assert_same(job.workdir, alone)


@pytest.mark.slow
def test_a_process_that_is_killed_and_started_again(model, alone, tmp_path):
    """Without a word: the other one crashes for want of it, and both begin again where the last checkpoint is."""
    job = Job(model, tmp_path / "run", overrides_on(1, 1, 4, 2) | {"checkpoint.every": 1})
    job.wait_for('"loss"')  # of the first step
    os.kill(job.trainer(1), signal.SIGKILL)
    job.finish()
    assert_same(job.workdir, alone)


@pytest.mark.slow
def test_a_process_that_hangs_is_named(model, tmp_path):
    job = Job(model, tmp_path / "run", overrides_on(1, 1, 4, 2) | {"watchdog.minutes": 0.1, "steps": 500})
    job.wait_for('"loss"')  # of the first step
    frozen = job.trainer(1)
    os.kill(frozen, signal.SIGSTOP)
    deadline = time.monotonic() + 200
    while "is dead or frozen" not in job.log(0) and time.monotonic() < deadline:
        time.sleep(0.5)
    os.kill(frozen, signal.SIGKILL)
    for process in job.processes:
        process.terminate()
    for process in job.processes:
        process.wait(timeout=100)
    assert re.search(rf"process 1 \(host \S+, pid {frozen}\) is dead or frozen.*last at step \d+", job.log(0))
