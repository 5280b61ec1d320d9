"""A trace of a few steps, to be looked at with xprof or TensorBoard's profile plugin."""

import tempfile
from pathlib import Path
from typing import Any

import jax
from etils import epath


class Profile:
    """Traces the steps from `first` on, `count` of them, into `directory`.

    For one process, by custom the first: all work in lock step, each writes a trace of its own devices, and one of
    those is large enough. A run that is continued in the midst of these steps traces the rest of them.

    Args:
      directory: `<workdir>/profile`. The trace is written on the local disk and copied there when it is complete.
      first: step; not the first of a process, which would show the compiler.
      count: of steps. 0: no trace.
    """

    def __init__(self, directory: epath.PathLike, first: int, count: int):
        self._directory, self._steps = epath.Path(directory), range(first, first + count)
        self._local: tempfile.TemporaryDirectory | None = None

    def before(self, step: int) -> None:
        """To be called before anything of the step is dispatched."""
        if step in self._steps and self._local is None:
            self._local = tempfile.TemporaryDirectory(prefix="nca_jax_profile_")
            jax.profiler.start_trace(self._local.name)

    def after(self, step: int, arrays: Any) -> None:
        """To be called when all of the step is dispatched; waits for `arrays` where the trace ends here."""
        if self._local is not None and step + 1 not in self._steps:
            jax.block_until_ready(arrays)  # else the trace would end before the devices have begun
            self.close()

    def close(self) -> None:
        """Ends a trace that is running, whatever else happens to the run."""
        if self._local is None:
            return
        local, self._local = self._local, None
        with local as name:
            jax.profiler.stop_trace()
            for file in sorted(Path(name).rglob("*")):
                if file.is_file():
                    target = self._directory / file.relative_to(name).as_posix()
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(file.read_bytes())
