"""Whole model directories: a Hugging Face one to serve, an Orbax one to load fast onto any mesh."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import new_model_directory, write_json, write_text
from nca_jax.models.architecture import Architecture
from nca_jax.models.layers import Piece
from nca_jax.models.model_files import copy_companions, export_config, stored_dtype
from nca_jax.models.orbax_params import ORBAX_PARAMS, save_pieces
from nca_jax.models.tensor_files import DTYPES, NewTensor, write_tensors

EXPORT_DTYPES = ("source", *(str(dtype) for dtype in DTYPES.values()))


def export_dtype(asked: str, config: dict[str, Any]) -> str:
    """The dtype to export in: the one asked for, or with "source" the one that the model's `config.json` names.

    Raises:
      UserError: it is none that weights are written in.
    """
    name = stored_dtype(config) if asked == "source" else asked
    if name not in EXPORT_DTYPES[1:]:
        raise UserError(f"weights cannot be exported as {name!r}; choose one of {', '.join(EXPORT_DTYPES[1:])}.")
    return name


class Written(NamedTuple):
    """What was written: how many arrays, and their bytes."""

    tensors: int
    nbytes: int


def write_huggingface(
    target: str,
    arch: Architecture,
    tensors: Sequence[NewTensor],
    config: dict[str, Any],
    companions: str | None,
    *,
    dtype: str,
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    card: str | None = None,
) -> Written:
    """Writes a directory that transformers and every server load: safetensors, configs, tokenizer files.

    Args:
      target: local or gs://.
      arch: of the weights.
      tensors: from `tensors_to_write`.
      config: the `config.json` that the model came with.
      companions: directory whose tokenizer files and the like are copied; None: there are none.
      dtype: from `export_dtype`, and the one the tensors are made in.
      shard_bytes: largest file, unless one tensor is larger.
      overwrite: replaces a model directory that is there.
      card: its README.md.

    Raises:
      UserError: the target may not be replaced, or a value is not finite in that dtype.
    """
    with new_model_directory(target, overwrite) as directory:
        sizes = write_tensors(directory, tensors, jnp.dtype(dtype), shard_bytes)
        if companions:
            copy_companions(companions, directory)
        if card:
            write_text(directory / "README.md", card)
        write_json(directory / "config.json", export_config(config, arch, dtype))
    return Written(len(sizes), sum(sizes.values()))


def write_orbax(
    target: str, pieces: Iterable[Piece], config: dict[str, Any], companions: str | None, overwrite: bool = False
) -> Written:
    """Writes a directory that `load_weights` reads, each device only its part: Orbax weights and the small files.

    Args and errors as `write_huggingface`, with the weights' pieces instead of tensors; `config` is kept as it is.
    """
    with new_model_directory(target, overwrite) as directory:
        written = Written(*save_pieces(directory / ORBAX_PARAMS, pieces))
        if companions:
            copy_companions(companions, directory)
        write_json(epath.Path(directory) / "config.json", config)
    return written
