"""Where and with what a command ran: kept beside its results, for whoever reads them later."""

import datetime
import platform
import sys
from importlib import metadata
from typing import Any

import jax

import nca_jax

# Those that decide about numbers.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers", "tokenizers", "grain")


def environment() -> dict[str, Any]:
    """The command that was given, when it began, versions and devices; as JSON takes it."""
    devices = jax.devices()
    return {
        "command": [*_program(), *sys.argv[1:]],
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"nca_jax": nca_jax.__version__} | {name: metadata.version(name) for name in _PACKAGES},
        "devices": {"kind": devices[0].device_kind, "count": len(devices), "processes": jax.process_count()},
    }


def _program() -> list[str]:
    """ "python -m nca_jax.main" where that is what was started, and not the path of the file that it stands for."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["python", *(["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]])]
