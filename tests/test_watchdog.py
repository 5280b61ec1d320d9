"""A hung job names its culprit and ends: real processes, one of them frozen, and a second of patience."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nca_jax.errors import RETRY_EXIT_CODE
from nca_jax.watchdog import Heartbeat, Watchdog, culprits

ROOT = Path(__file__).parents[1]
# Arguments: directory, process, processes, how many of them to wait for, last step, then what the main thread does.
PROCESS = """
import pathlib, sys, time
from nca_jax import watchdog
from nca_jax.errors import RETRY_EXIT_CODE
directory, index, count, together, last, then = sys.argv[1:]
pathlib.Path(f"{directory}_ready_{index}").touch()
while len(list(pathlib.Path(directory).parent.glob("*_ready_*"))) < int(together):
    time.sleep(0.01)
dog = watchdog.Watchdog(directory, int(index), int(count), minutes=1 / 60, attempt="2", period=0.1)

def waits_in_a_collective():
    time.sleep(60)

def goes_on_slowly():
    for step in range(int(last), int(last) + 8):
        dog.beat(step, "step")
        time.sleep(0.3)
    dog.close()

def comes_back():
    watchdog._READ_AFTER, watchdog._GRACE_SECONDS = 10, 0.2  # a second between the readings
    time.sleep(1.5)
    dog.beat(int(last), "step")
    time.sleep(0.9)
    dog.close()
    time.sleep(0.5)

def reads_from_a_disk_that_hangs():
    watchdog._GRACE_SECONDS = 0.1
    dog._read = lambda: time.sleep(60)
    time.sleep(60)

for step in range(1, int(last) + 1):
    dog.beat(step, "rollout")
globals()[then]()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a process of the job; whatever is left is killed at the end."""
    running = []

    def started(index, count, last, then="waits_in_a_collective", together=1):
        arguments = map(str, (tmp_path / "heartbeats", index, count, together, last, then))
        command = [sys.executable, "-c", PROCESS, *arguments]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT))
        return running[-1]

    yield started
    for process in running:
        process.kill()
        process.communicate()


def heartbeat(tmp_path, index) -> dict:
    file = tmp_path / "heartbeats" / f"process_{index}.json"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if file.exists() and (content := json.loads(file.read_text()))["beats"] > 0:
            return content
        time.sleep(0.01)
    raise AssertionError(f"{file} has not appeared")


def ended(process) -> tuple[int, str]:
    _, error = process.communicate(timeout=20)
    return process.returncode, error


def test_a_frozen_process_is_named(start, tmp_path):
    frozen = start(1, 2, 41)
    assert heartbeat(tmp_path, 1)["step"] == 41
    frozen.send_signal(signal.SIGSTOP)
    code, error = ended(start(0, 2, 42))
    assert code == 75
    lines = error.splitlines()
    assert len(lines) == 1 and lines[0].startswith("process 0 of 2 has made no progress for 0 min (step 42, rollout)")
    host = socket.gethostname()
    assert f"process 1 (host {host}, pid {frozen.pid}) is dead or frozen: not heard of for 0 min" in lines[0]
    assert lines[0].endswith("last at step 41, rollout") and "process 0 (" not in lines[0]
    assert "waits_in_a_collective" in (tmp_path / "heartbeats" / "stacks_0.txt").read_text()

    # Thawed, it ends too, and does not blame the one that its own watchdog has ended.
    frozen.send_signal(signal.SIGCONT)
    code, error = ended(frozen)
    assert code == 75 and f"process 1 (host {host}, pid {frozen.pid}) is behind, last at step 41" in error
    assert "process 0 (" not in error


def test_a_dead_process_is_named(start, tmp_path):
    dead = start(1, 2, 7)
    heartbeat(tmp_path, 1)
    dead.kill()
    dead.wait()
    code, error = ended(start(0, 2, 8))
    assert code == 75 and f"pid {dead.pid}) is dead or frozen" in error and "last at step 7, rollout" in error


def test_where_all_live_the_one_behind_is_named(start):
    processes = [start(index, 3, step, together=3) for index, step in enumerate((42, 41, 42))]
    for process in processes:
        code, error = ended(process)
        assert code == 75
        assert f"process 1 (host {socket.gethostname()}, pid {processes[1].pid}) is behind, last at step 41" in error
        assert "dead" not in error and "process 0 (" not in error and "process 2 (" not in error


def test_a_slow_process_is_left_alone(start, tmp_path):
    code, error = ended(start(0, 1, 1, "goes_on_slowly"))  # 2.4 seconds
    assert (code, error) == (0, "")
    assert json.loads((tmp_path / "heartbeats" / "process_0.json").read_text())["end"] == "closed"


def test_progress_between_the_readings_is_progress(start):
    assert ended(start(0, 1, 1, "comes_back")) == (0, "")


def test_files_of_an_earlier_attempt_are_no_processes_of_this_one(start, tmp_path):
    (tmp_path / "heartbeats").mkdir()
    old = Heartbeat("1", "gone", 17, 99, "step", 500, 20, 1.0, "")._asdict()
    for index in (1, 2):
        (tmp_path / "heartbeats" / f"process_{index}.json").write_text(json.dumps(old))
    code, error = ended(start(0, 2, 3))
    assert code == 75
    assert error.strip().endswith("and ends: process 1 has no heartbeat of this attempt")


def test_it_ends_though_the_disk_hangs(start):
    code, _ = ended(start(0, 1, 1, "reads_from_a_disk_that_hangs"))
    assert code == 75


def beats(index, step=5, writes=10, end="", attempt="2"):
    return Heartbeat(attempt, f"host{index}", 100 + index, step, "step", step, writes, 3.0, end)


def test_readings_are_compared_and_clocks_are_not():
    first = {0: beats(0), 1: beats(1), 2: beats(2, step=4)}
    second = {0: beats(0, writes=13), 1: beats(1), 2: beats(2, step=4, writes=11)}
    line = culprits(first, second, 3, "2", {1: 12.4}.get)
    assert line == "process 1 (host host1, pid 101) is dead or frozen: not heard of for 12 min, last at step 5, step"
    second[1] = beats(1, writes=12)
    assert culprits(first, second, 3, "2", {}.get) == "process 2 (host host2, pid 102) is behind, last at step 4, step"
    second[2] = beats(2, writes=11)
    assert "all 3 processes are alive and at the same place" in culprits(first, second, 3, "2", {}.get)


def test_one_that_has_ended_is_named_and_one_that_was_stopped_is_not():
    first = {0: beats(0), 1: beats(1, end="closed"), 2: beats(2, end="stopped")}
    second = {**first, 0: beats(0, writes=12)}
    assert culprits(first, second, 3, "2", {}.get) == "process 1 (host host1, pid 101) has ended, last at step 5, step"


def test_a_long_list_is_cut():
    first = {i: beats(i) for i in range(512)}
    line = culprits(first, {**first, 0: beats(0, writes=12)}, 512, "2", {}.get)
    assert line.count("is dead or frozen") == 8 and line.endswith("; and 503 more")


def test_silence_is_measured_by_the_files(tmp_path):
    dog = Watchdog(tmp_path, 0, 2, minutes=0)
    for index, at in ((0, 10_000), (1, 9_280)):
        (tmp_path / f"process_{index}.json").write_text("{}")
        os.utime(tmp_path / f"process_{index}.json", (at, at))
    assert dog._silent_minutes(1) == 12
    assert dog._silent_minutes(5) is None


def test_a_write_error_is_logged_once_and_kills_nothing(tmp_path, caplog):
    (tmp_path / "heartbeats").write_text("a file, where a directory should be")
    dog = Watchdog(tmp_path / "heartbeats", 0, 1, minutes=1, period=0.02)
    with caplog.at_level(logging.WARNING):
        time.sleep(0.3)
    dog.close()
    assert [record.message[:28] for record in caplog.records] == ["heartbeats cannot be written"]


def test_zero_minutes_is_off(tmp_path):
    dog = Watchdog(tmp_path / "heartbeats", 0, 1, minutes=0)
    dog.beat(1, "step")
    dog.close()
    assert not (tmp_path / "heartbeats").exists() and not dog._threads


def test_heartbeats_in_a_bucket(bucket):
    dog = Watchdog(f"{bucket}/run/heartbeats", 3, 8, minutes=1, attempt="x", period=0.02)
    dog.beat(5, "evaluation")
    time.sleep(0.3)
    found = dog._read()
    dog.close()
    assert list(found) == [3] and found[3].phase == "evaluation" and found[3].writes > 2
    assert dog._read()[3].end == "closed"


def test_the_exit_code_is_the_one_to_start_again_with():
    assert RETRY_EXIT_CODE == os.EX_TEMPFAIL
