"""One run to a workdir: refused while the other lives, free at once when it is dead; in buckets after a while."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from etils import epath

from nca_jax import workdir_lock
from nca_jax.errors import UserError
from nca_jax.workdir_lock import locked

HOLDER = """if True:
    import sys, time
    from nca_jax.workdir_lock import locked
    with locked(sys.argv[1]):
        print("locked", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def other_run(tmp_path):
    """Another process that holds `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_and_told_of_the_first(other_run, tmp_path):
    with pytest.raises(UserError) as error, locked(tmp_path):
        pass
    message = str(error.value)
    started = json.loads((tmp_path / "lock.json").read_text())["started"]
    assert message == (
        f"{tmp_path} is in use by process {other_run.pid} on {socket.gethostname()} (started {started}); wait until "
        "that run ends, or stop it, or choose another --workdir."
    )


def test_a_killed_run_leaves_the_workdir_free_at_once(other_run, tmp_path):
    other_run.kill()
    other_run.wait()
    assert (tmp_path / "lock.json").exists(), "it had no time to clean up"
    began = time.monotonic()
    with locked(tmp_path):
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_the_block_frees_the_workdir_also_when_it_raises(kind, tmp_path, request, quick):
    workdir = tmp_path / "runs" / "a" if kind == "disk" else epath.Path(request.getfixturevalue("bucket")) / "a"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(workdir):
            assert (workdir / "lock.json").exists()
            _ = 1 / 0
        assert not (workdir / "lock.json").exists()


def test_a_holder_that_has_not_said_who_it_is_is_respected_too(tmp_path):
    with locked(tmp_path):
        (tmp_path / "lock.json").unlink()
        with pytest.raises(UserError, match="is in use by another run; wait"), locked(tmp_path):
            pass


def test_a_workdir_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    said = r"file/run cannot be written \(Not a directory\); free space there or make it writable"
    with pytest.raises(UserError, match=said), locked(tmp_path / "file" / "run"):
        pass


def test_an_oserror_of_the_run_itself_is_not_the_locks(tmp_path):
    with pytest.raises(FileNotFoundError), locked(tmp_path):
        (tmp_path / "missing").read_text()


# ---------------------------------------------------------------- buckets


@pytest.fixture
def quick(monkeypatch):
    """The times of buckets, a hundredth of them."""
    monkeypatch.setattr(workdir_lock, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(workdir_lock, "WATCH_SECONDS", 0.8)
    monkeypatch.setattr(workdir_lock, "SETTLE_SECONDS", 0.1)


@pytest.fixture
def workdir(bucket, quick) -> epath.Path:
    return epath.Path(bucket) / "run"


def leave_lock(workdir: epath.Path) -> None:
    (workdir / "lock.json").write_text(json.dumps({"host": "vm-7", "pid": 12, "started": "then", "token": "theirs"}))


def renewing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "workdir lock"]


def test_in_a_bucket_a_run_that_lives_is_noticed_and_respected(workdir, caplog):
    with locked(workdir):
        with caplog.at_level(logging.INFO, "nca_jax"), pytest.raises(UserError) as error, locked(workdir):
            pass
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(error.value)
        assert "waiting up to 1 s to see whether the run that left gs://bucket/run/lock.json" in caplog.text
        assert (workdir / "lock.json").exists(), "the loser leaves it alone"
        assert len(renewing_threads()) == 1
    assert not renewing_threads()


def test_in_a_bucket_the_lock_of_a_dead_run_is_taken_over_after_a_while(workdir, caplog):
    leave_lock(workdir)
    began = time.monotonic()
    with caplog.at_level(logging.INFO, "nca_jax"), locked(workdir):
        assert time.monotonic() - began >= workdir_lock.WATCH_SECONDS
        assert json.loads((workdir / "lock.json").read_text())["pid"] == os.getpid()
    assert "(process 12 on vm-7) still lives" in caplog.text and "taken over" in caplog.text


def test_in_a_bucket_a_lock_that_is_given_up_meanwhile_is_taken_at_once(workdir):
    leave_lock(workdir)
    threading.Timer(0.1, (workdir / "lock.json").unlink).start()
    began = time.monotonic()
    with locked(workdir):
        assert time.monotonic() - began < workdir_lock.WATCH_SECONDS


def test_in_a_bucket_of_two_newcomers_the_last_to_write_wins(workdir, monkeypatch):
    sleep = time.sleep

    def other_writes_meanwhile(seconds):
        leave_lock(workdir)
        sleep(seconds)

    monkeypatch.setattr(workdir_lock.time, "sleep", other_writes_meanwhile)
    with pytest.raises(UserError, match="in use by process 12 on vm-7"), locked(workdir):
        pass
    assert json.loads((workdir / "lock.json").read_text())["token"] == "theirs"
    assert not renewing_threads()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_in_a_bucket_a_holder_that_lost_its_lock_ends_at_once(workdir, capfd, monkeypatch):
    codes = []

    def exit(code):
        codes.append(code)
        raise SystemExit  # of the thread, which stands for the process

    monkeypatch.setattr(os, "_exit", exit)
    with locked(workdir):
        leave_lock(workdir)
        renewing_threads()[0].join(5)
        assert codes == [2]
        assert "error: the lock was not renewed in time: gs://bucket/run is in use by" in capfd.readouterr().err
    assert json.loads((workdir / "lock.json").read_text())["token"] == "theirs", "which is not ours to delete"


def test_in_a_bucket_a_renewal_that_fails_is_tried_again(workdir, caplog, monkeypatch):
    write, failures = workdir_lock._write, iter([True])

    def flaky(holder, content):
        if content.get("renewals") and next(failures, False):
            raise ConnectionError("unplugged")
        write(holder, content)

    monkeypatch.setattr(workdir_lock, "_write", flaky)
    with locked(workdir):
        until = time.monotonic() + 5
        while json.loads((workdir / "lock.json").read_text()).get("renewals", 0) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert json.loads((workdir / "lock.json").read_text())["renewals"] >= 2
    assert "could not be renewed (unplugged)" in caplog.text
