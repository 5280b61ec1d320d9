"""How a process finds out whether it is one of several; what several do is in test_multiprocess.py."""

import pytest

from nca_jax import processes
from nca_jax.errors import UserError

NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@pytest.fixture
def joined(monkeypatch):
    """What jax.distributed.initialize was called with, on a machine without any scheduler."""
    calls = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(processes.glob, "glob", lambda pattern: [])
    for name in (*NAMES, "SLURM_STEP_NUM_TASKS", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_process_alone_waits_for_nobody(joined):
    processes.join()
    assert not joined


def test_jax_is_not_asked_where_there_is_one_process(joined, monkeypatch):
    monkeypatch.setattr(processes.glob, "glob", lambda pattern: ["/dev/accel0"])
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    processes.join()
    assert not joined


def test_by_environment(joined, monkeypatch):
    for name, value in zip(NAMES, ("host:1234", "16", "0"), strict=True):
        monkeypatch.setenv(name, value)
    processes.join()
    assert joined == [("host:1234", 16, 0)]


@pytest.mark.parametrize("values", [("host:1234", None, None), (None, "2", "0"), ("host:1", "two", "0")])
def test_half_an_environment_is_refused(values, joined, monkeypatch):
    for name, value in zip(NAMES, values, strict=True):
        if value:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID all must be set"):
        processes.join()
    assert not joined


@pytest.mark.parametrize(("tasks", "calls"), [("1", 0), ("8", 1)])
def test_a_slurm_step_of_several_tasks(tasks, calls, joined, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    processes.join()
    assert joined == [()] * calls


@pytest.mark.parametrize(
    ("platforms", "device", "calls"),
    [
        (None, "/dev/accel0", 1),
        ("tpu,cpu", "/dev/vfio/0", 1),
        ("", "/dev/accel0", 1),
        ("cpu", "/dev/accel0", 0),
        ("tpu,cpu", None, 0),
    ],
)
def test_a_host_with_tpus_that_are_wanted(platforms, device, calls, joined, monkeypatch):
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    there = [device] if device else []
    monkeypatch.setattr(processes.glob, "glob", lambda pattern: [p for p in there if p[:8] == pattern[:8]])
    processes.join()
    assert joined == [()] * calls


def test_alone_nothing_is_told_to_anybody():
    assert processes.is_first() and processes.of_first("any value") == "any value"
    assert processes.shared_out(lambda item: ((item,),), [1, 2]) == [((1,),), ((2,),)]
    with pytest.raises(UserError, match="no"):
        processes.in_first(lambda: (_ for _ in ()).throw(UserError("no")))
    processes.wait_for_all("nobody")
