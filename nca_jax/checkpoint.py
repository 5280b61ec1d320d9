"""Checkpoints: train state, data position and a fingerprint of the config, committed together or not at all."""

import json
import logging
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from nca_jax.errors import UserError
from nca_jax.train_step import TrainState

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one workdir, written in the background.

    Args:
      directory: `<workdir>/checkpoints`.
      keep: how many of the newest stay.
      fingerprint: what must be the same for a run to be continued: config key -> value.
    """

    def __init__(self, directory: str, keep: int, fingerprint: Mapping[str, Any]):
        self._fingerprint = dict(fingerprint)
        self._manager = ocp.CheckpointManager(
            epath.Path(directory).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
        )

    def save(self, state: TrainState, data_position: Mapping[str, Any], step: int) -> None:
        """Starts writing step `step`; the state may be donated as soon as this returns."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=ocp.args.JsonSave(dict(data_position)),
                fingerprint=ocp.args.JsonSave(self._fingerprint),
            ),
        )

    def restore_latest(self, like: TrainState) -> tuple[TrainState, dict[str, Any], int] | None:
        """The newest checkpoint that can be read: (state, data position, step), or None.

        One that cannot be read is skipped with a warning, and deleted so that its step can be written again.

        Args:
          like: abstract arrays with the shardings that are wanted now; the ones saved may differ.

        Raises:
          UserError: the checkpoint is of another config; or there are checkpoints and none can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                found = self._manager.restore(
                    step, args=ocp.args.Composite(data=ocp.args.JsonRestore(), fingerprint=ocp.args.JsonRestore())
                )
                self._compare(found["fingerprint"], step)
                state = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
            except UserError:
                raise
            except Exception as error:  # orbax raises whatever its file formats do
                _log.warning("checkpoint %d cannot be read and is skipped: %s", step, str(error).split("\n")[0])
                continue
            for broken in steps[: steps.index(step)]:
                self._manager.delete(broken)
            return state["state"], found["data"], step
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self._manager.directory} can be read; use another workdir."
            )
        return None

    def wait(self) -> None:
        """Returns when everything started is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def _compare(self, saved: Mapping[str, Any], step: int) -> None:
        ours = json.loads(json.dumps(self._fingerprint))
        different = sorted(key for key in saved.keys() | ours.keys() if saved.get(key) != ours.get(key))
        if different:
            shown = "; ".join(f"{key}: {saved.get(key)!r} there, {ours.get(key)!r} now" for key in different[:5])
            raise UserError(
                f"checkpoint {step} in {self._manager.directory} is of another config ({shown}); "
                "use another --workdir, or the config it was started with."
            )
