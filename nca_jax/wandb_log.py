"""Weights & Biases, where a config asks for it: the records, samples and figures of a run, as TensorBoard has them."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from nca_jax.errors import UserError
from nca_jax.files import is_bucket, write_text


class WandbLog:
    """One run there for each workdir, however often it is continued.

    A continued run logs the steps after its checkpoint once more, so "step" is a value of its own, by which charts are
    drawn, and not that of the service, which never goes back.

    Args:
      workdir: of the run; it keeps the run's id.
      config: of the run; log.wandb.project, .entity and .mode say where to.

    Raises:
      UserError: wandb is not installed, or refuses.
    """

    def __init__(self, workdir: epath.Path, config: ConfigDict):
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "config.log.wandb.project is set and wandb is not installed; pip install wandb, or unset it."
            ) from error
        settings, path = config.log.wandb, workdir / "wandb_id.txt"
        run_id = path.read_text().strip() if path.exists() else uuid.uuid4().hex[:8]
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                id=run_id,
                name=workdir.name,
                resume="allow",
                config=config.to_dict(),
                dir=None if is_bucket(workdir) else str(workdir),
                settings=wandb.Settings(console="off", quiet=True),  # what a run prints is its own affair
            )
        except Exception as error:  # whatever the service says
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"wandb cannot start ({reason}); log in, or set config.log.wandb.mode=offline.") from error
        write_text(path, run_id + "\n")
        self._image, self._table = wandb.Image, wandb.Table
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step or an evaluation."""
        self._run.log({"step": step, **values})

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Prompts and responses as a table; all records have the same keys."""
        rows = [[str(value) for value in record.values()] for record in records]
        self._run.log({"step": step, "samples": self._table(columns=list(records[0]), data=rows)})

    def images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Pictures [height, width, RGBA], uint8."""
        self._run.log({"step": step, **{name: self._image(picture) for name, picture in images.items()}})

    def close(self) -> None:
        """Sends what is left; in offline mode nothing is ever sent."""
        self._run.finish()
