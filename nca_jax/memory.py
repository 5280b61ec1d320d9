"""Memory in use, of the devices and of the host, as metrics in GB (10**9 bytes)."""

import resource
import sys
from pathlib import Path

import jax

_STATUS = Path("/proc/self/status")


def memory_metrics() -> dict[str, float]:
    """All of this module's metrics: "memory/device_gb", "memory/device_peak_gb", "memory/device_limit_gb",
    "memory/host_gb", "memory/host_peak_gb"; without those that the platform does not tell."""
    found = device_memory() | host_memory()
    return {f"memory/{name}_gb": value / 1e9 for name, value in found.items()}


def device_memory() -> dict[str, int]:
    """Bytes of the fullest device of this process: "device" in use, "device_peak" so far, "device_limit" there are.

    Empty where devices keep no account, such as CPUs.
    """
    names = {"device": "bytes_in_use", "device_peak": "peak_bytes_in_use", "device_limit": "bytes_limit"}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return {name: max(s[key] for s in stats if key in s) for name, key in names.items() if any(key in s for s in stats)}


def host_memory() -> dict[str, int]:
    """Bytes of this process in the host's memory: "host" now (Linux only), "host_peak" so far."""
    if _STATUS.exists():  # there getrusage would count what the parent held when it started this process
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return {name: int(fields[key].split()[0]) * 1024 for name, key in (("host", "VmRSS"), ("host_peak", "VmHWM"))}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
