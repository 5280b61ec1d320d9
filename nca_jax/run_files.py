"""What a run leaves in its workdir beside its logs and checkpoints, and the line that sums it up."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from nca_jax import processes, settings
from nca_jax.data.chat import Context
from nca_jax.domains.base import context_file
from nca_jax.environment import environment
from nca_jax.errors import UserError
from nca_jax.files import read_json, write_json, write_text
from nca_jax.items import OTHER_TASK
from nca_jax.model_card import model_card
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Params
from nca_jax.models.export import export_dtype, write_huggingface
from nca_jax.models.huggingface import tensors_to_write
from nca_jax.models.layers import pieces_of
from nca_jax.models.model_files import copy_companions


def keep_description(workdir: epath.Path, config: ConfigDict, context: Context, model_directory: str) -> dict[str, Any]:
    """Writes the config, the context and the model's small files; returns the model's config.json.

    With config and tokenizer files beside it, a run's checkpoints can be exported wherever it is carried.

    Raises:
      UserError: the run was started with another context.
    """
    messages = [dict(message) for message in context_file(context)]
    path, model = workdir / "context.json", workdir / "model"
    if path.exists() and json.loads(path.read_text()) != messages:
        raise UserError(f"{path} is another context than the one given now; use another --workdir, or that context.")
    model_config = read_json(epath.Path(model_directory) / "config.json")
    processes.wait_for_all("the context is compared")
    if processes.is_first():
        write_json(path, messages)
        write_json(workdir / "config.json", config.to_dict())
        write_json(workdir / "environment.json", environment())
        if not (model / "config.json").exists():
            model.mkdir(parents=True, exist_ok=True)
            copy_companions(model_directory, model)
            write_json(model / "config.json", model_config)
    return model_config


def export(config: ConfigDict, workdir: epath.Path, arch: Architecture, params: Params, model_config: dict) -> None:
    """Writes `<workdir>/huggingface`; every process takes part in gathering the weights, a layer at a time."""
    dtype = export_dtype(config.export.dtype, model_config)
    tensors = tensors_to_write(arch, pieces_of(params), dtype)
    if not processes.is_first():
        for tensor in tensors:  # in the order in which the first writes them
            tensor.values()
        return
    write_huggingface(
        workdir / "huggingface",
        arch,
        tensors,
        model_config,
        str(workdir / "model"),
        dtype=dtype,
        shard_bytes=int(config.export.shard_gb * 1e9),
        overwrite=True,
        card=model_card(workdir, config.steps),
    )


def keep_batch(path: epath.Path, batch: Any) -> None:
    """The arrays of a batch as a file for numpy."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
    arrays = {jax.tree_util.keystr(key).strip("."): processes.whole(leaf) for key, leaf in leaves}
    if processes.is_first():
        with path.open("wb") as file:
            np.savez(file, **arrays)


def summary_line(config: ConfigDict, evaluation: Mapping[str, float], seconds: float) -> str:
    """One line that says how a run ended; `seconds` is its wall-clock time, all of its parts together."""
    shown = {
        "no_context": "no_context",
        "with_context": "with_context",
        "harm": "harm",
        "both": "both",
        "length_change": "length_change",
        OTHER_TASK: "other_context",
    }
    values = " ".join(
        f"{name}={evaluation[f'eval/{key}']:.3f}" for key, name in shown.items() if f"eval/{key}" in evaluation
    )
    method = settings.method_name(config)
    return f"summary method={method} {values} steps={evaluation['step']} seconds={seconds:.0f}"


def finished_summary(workdir: epath.Path) -> str | None:
    """The line of a run that has ended before."""
    path = workdir / "summary.txt"
    return path.read_text().strip() if path.exists() else None


def keep_summary(workdir: epath.Path, summary: str) -> None:
    """Writes the line; that it is there says that the run has ended."""
    if processes.is_first():
        write_text(workdir / "summary.txt", summary + "\n")
