"""Workdirs of runs that never were: a config, a context and checkpoints of given weights."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from conftest import SHORT_RUN, TINY_CONFIG, random_tensors, write_model
from ml_collections import ConfigDict

from configs import conventions
from nca_jax.domains import domain_of
from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.huggingface import load_params
from nca_jax.run_files import keep_description

# Three layers, so that there is a first third; heads, mlp and vocabulary that eight devices divide; norms of queries
# and keys.
CONFIG = TINY_CONFIG | {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
ARCH = architecture_from_config(CONFIG)
ITEMS = 5
OVERRIDES = SHORT_RUN | {
    "batch_size": 3,  # so that the items make two parts, the last of them not full
    "rollout.max_new_tokens": 5,
    "evaluation.temperature": 0.0,
    "mesh.fsdp": 1,
}
# A loss over few ids, at a temperature.
TOP8 = {"loss.support": "student_top_k", "loss.top_k": 8, "rollout.temperature": 0.7}


def write_base(directory: Path, config: dict = CONFIG) -> Path:
    return write_model(directory, config)


def tiny_config(base: Path, **overrides) -> ConfigDict:
    config = conventions.get_config()
    config.model.source = str(base)
    config.update_from_flattened_dict(OVERRIDES | overrides)
    return config


def moved(base: Path, seed: int, size: float = 0.02) -> dict[str, np.ndarray]:
    """The base's weights, all moved a little, in a direction that the seed says."""
    rng = np.random.default_rng(seed)
    params = load_params(base, ARCH)
    return {name: np.asarray(w) + rng.normal(0, size, w.shape).astype(np.float32) for name, w in params.items()}


def moved_tensors(seed: int, size: float = 0.02) -> dict[str, np.ndarray]:
    """The same for a Hugging Face directory: tensor name -> array."""
    rng = np.random.default_rng(seed)
    return {name: w + rng.normal(0, size, w.shape).astype(np.float32) for name, w in random_tensors(ARCH).items()}


def write_run(workdir: Path, config: ConfigDict, checkpoints: dict[int, dict[str, np.ndarray]]) -> Path:
    workdir.mkdir(parents=True, exist_ok=True)
    keep_description(workdir, config, domain_of(config).context, config.model.source)
    for step, params in checkpoints.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            state = {"step": np.int32(step), "params": params}
            checkpointer.save(workdir.absolute() / f"checkpoints/{step}/state", args=ocp.args.PyTreeSave(state))
    return workdir
