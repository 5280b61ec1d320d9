"""Runs that must be the same wherever they are computed: a config, and a comparison of two workdirs."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from conftest import TINY_CONFIG, records, write_model
from etils import epath

from configs import conventions
from nca_jax.items import evaluation_path, read_items

# Heads, mlp and vocabulary that eight devices divide.
WIDE = TINY_CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
OVERRIDES = {
    "steps": 3,
    "batch_size": 16,
    "accumulation": 2,
    "data.max_prompt_tokens": 900,
    "optimizer.learning_rate": 1e-2,
    "optimizer.schedule": "constant",
    # Updates in proportion to the gradient. Adam's own would turn the last digit of a gradient near 0 into a step.
    "optimizer.eps": 1e-2,
    "rollout.max_new_tokens": 4,
    "evaluation.every": 3,
    "evaluation.max_items": 6,
    "evaluation.batch_size": 8,
    "checkpoint.every": 3,
    "log.samples_every": 3,
    "log.samples": 2,
    "log.figures": False,
    "mesh.data": 1,
    "mesh.fsdp": 1,
}


def wide_model(directory: Path) -> Path:
    """A Hugging Face directory."""
    return write_model(directory, WIDE)


def overrides_on(replica: int, data: int, fsdp: int, tensor: int) -> dict:
    """The run on a mesh."""
    return OVERRIDES | {
        "mesh.replica": replica,
        "mesh.data": data,
        "mesh.fsdp": fsdp,
        "mesh.tensor": tensor,
        "mesh.decode_tensor": tensor,
    }


def config_of(model: Path, overrides: dict):
    config = conventions.get_config()
    config.model.source = str(model)
    config.update_from_flattened_dict(overrides)
    return config


def saved_params(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """The weights of a checkpoint, as they are on disk."""
    checkpointer = ocp.PyTreeCheckpointer()
    how = ocp.RestoreArgs(restore_type=np.ndarray)
    item = checkpointer.metadata(workdir / "checkpoints" / str(step) / "state").item_metadata.tree
    import jax

    tree = jax.tree.map(lambda _: how, item, is_leaf=lambda x: hasattr(x, "shape"))
    return checkpointer.restore(workdir / "checkpoints" / str(step) / "state", restore_args=tree)["params"]


def assert_same(found: Path, expected: Path) -> None:
    """Losses, parameters after the last step, samples and evaluations of two runs are equal to 1e-5."""
    assert len(records(found)) == len(records(expected)) == 5
    for ours, theirs in zip(records(found), records(expected), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert records(found, "samples") == records(expected, "samples")
    for step in (0, 3):
        paths = [evaluation_path(epath.Path(workdir), step) for workdir in (found, expected)]
        for ours, theirs in zip(*map(read_items, paths), strict=True):
            nats = ours.pop("divergence"), theirs.pop("divergence")
            assert ours == theirs and (nats[0] is None) == (nats[1] is None) == (theirs["view"] != "with_context")
            if nats[0] is not None:
                np.testing.assert_allclose(*nats, rtol=1e-5, atol=1e-6)
    params, wanted = saved_params(found, 3), saved_params(expected, 3)
    assert params.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(params[name], weight, atol=1e-5 * np.abs(weight).max(), err_msg=name)
