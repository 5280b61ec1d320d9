"""The process of one side: JSON requests on standard input, one answer a line on standard output. No imports from
outside the standard library, since every environment imports this."""

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def serve(commands: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answers until standard input ends. A request is {"do": command, argument: value, ...}; its answer is what the
    command returns, or {"error": traceback}."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between two answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = commands[request.pop("do")](**request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the function returned. The function itself waits for its device."""
    began = time.perf_counter()
    value = function()
    return time.perf_counter() - began, value


def reset_peak() -> None:
    """Lets `peak_mb` begin anew, where the system can do that (Linux)."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def peak_mb() -> int:
    """Most memory (10**6 bytes) that this process held since `reset_peak`; elsewhere than on Linux since its start."""
    if _STATUS.exists():
        (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 // 10**6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 10**6
