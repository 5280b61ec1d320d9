"""Memory metrics: the fullest device, and what this process really holds."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nca_jax import memory


def devices(*stats):
    return lambda: [SimpleNamespace(memory_stats=lambda s=s: s) for s in stats]


def test_the_fullest_device_counts(monkeypatch):
    one = {"bytes_in_use": 5_000_000_000, "peak_bytes_in_use": 6_000_000_000, "bytes_limit": 16_000_000_000}
    two = {"bytes_in_use": 4_000_000_000, "peak_bytes_in_use": 9_500_000_000, "bytes_limit": 16_000_000_000}
    monkeypatch.setattr(memory.jax, "local_devices", devices(one, two))
    metrics = memory.memory_metrics()
    assert metrics["memory/device_gb"] == 5.0
    assert metrics["memory/device_peak_gb"] == 9.5
    assert metrics["memory/device_limit_gb"] == 16.0


def test_devices_without_an_account_have_no_metrics(monkeypatch):
    monkeypatch.setattr(memory.jax, "local_devices", devices(None, None))
    assert memory.device_memory() == {}
    monkeypatch.setattr(memory.jax, "local_devices", devices({"bytes_in_use": 7}, None))
    assert memory.device_memory() == {"device": 7}


def test_the_cpu_of_the_tests_has_none():
    assert memory.device_memory() == {}


@pytest.mark.skipif(not memory._STATUS.exists(), reason="/proc is Linux")
def test_host_memory_follows_an_allocation():
    before = memory.host_memory()["host"]
    held = np.ones(200_000_000, np.uint8)
    during = memory.host_memory()
    del held
    after = memory.host_memory()
    assert during["host"] - before == pytest.approx(200e6, rel=0.1)
    assert during["host"] - after["host"] == pytest.approx(200e6, rel=0.1)
    assert after["host_peak"] >= during["host"] - 1e6


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("linux", 1024)])
def test_host_memory_without_proc_is_what_getrusage_says(platform, unit, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    assert memory.memory_metrics()["memory/host_peak_gb"] == 3_000_000 * unit / 1e9


@pytest.mark.skipif(not memory._STATUS.exists(), reason="/proc is Linux")
def test_the_peak_is_not_that_of_the_parent():
    held = np.ones(600_000_000, np.uint8)
    code = "from nca_jax.memory import host_memory; print(host_memory()['host_peak'])"
    peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 20e6 < peak < held.nbytes
