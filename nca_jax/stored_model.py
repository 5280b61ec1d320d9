"""A checkpoint of any kind, found and loaded: a run's workdir, or whatever `config.model.source` takes."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import absolute
from nca_jax.models import huggingface, orbax_params
from nca_jax.models.architecture import Architecture, load_architecture
from nca_jax.models.decoder import Params
from nca_jax.models.layers import in_turn
from nca_jax.models.orbax_params import ORBAX_PARAMS
from nca_jax.models.source import load_weights, resolve


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """Where a model's weights and small files lie.

    Attributes:
      path: as it was asked for.
      directory: with its config.json and tokenizer files, for `source.open_model`.
      arch: its sizes and switches.
      state: the train state in an Orbax checkpoint of a run; None: the weights are in `directory`.
      step: of that checkpoint.
    """

    path: str
    directory: str
    arch: Architecture
    state: epath.Path | None = None
    step: int | None = None

    def load(self, dtype: jnp.dtype, sharding: Mapping[str, jax.sharding.Sharding]) -> Params:
        """All weights, each device only its part of them.

        Raises:
          UserError: they cannot be read, or are not those of the architecture.
        """
        if self.state is None:
            return load_weights(self.directory, self.arch, dtype, sharding)
        return orbax_params.read_stacked(self.state, self.arch, dtype, sharding)

    def reader(self) -> tuple[Callable[[str, int | None], jax.Array | np.ndarray], bool]:
        """A function from (name, layer) to one layer of a weight, and whether it has to be asked layer by layer
        (`piece_names(arch, by_layer=True)`) or weight by weight; in that order, little more than one is in memory.

        Raises:
          UserError: as `load`.
        """
        if self.state is not None:
            return orbax_params.stacked_reader(self.state, self.arch), False
        orbax = epath.Path(self.directory) / ORBAX_PARAMS
        if orbax.exists():
            return in_turn(orbax_params.read_pieces(orbax, self.arch)), True
        return in_turn(huggingface.read_pieces(self.directory, self.arch)), False


def find_model(path: str, step: int | None = None) -> StoredModel:
    """The model at a path.

    Args:
      path: a run's workdir, or what `config.model.source` takes.
      step: which checkpoint of a workdir; default: the newest.

    Raises:
      UserError: there is no such thing.
    """
    workdir = epath.Path(path)
    if (workdir / "checkpoints").exists():
        small_files = workdir / "model"
        if not (small_files / "config.json").exists():
            raise UserError(f"{small_files} has no config.json; the workdir is not complete, or of an older version.")
        steps = sorted(ocp.utils.checkpoint_steps(absolute(workdir / "checkpoints")))
        step = step if step is not None else (steps or [None])[-1]
        if step not in steps:
            raise UserError(f"{path} has no checkpoint {'' if step is None else step}; there are {steps}.")
        state = workdir / "checkpoints" / str(step) / "state"
        return StoredModel(path, str(small_files), load_architecture(str(small_files)), state, step)
    if step is not None:
        raise UserError(f"{path} is no workdir of a run, so it has no step {step}; leave the step out.")
    directory = resolve(path)
    return StoredModel(path, directory, load_architecture(directory))
