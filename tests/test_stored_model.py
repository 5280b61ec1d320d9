"""Weights are found and loaded alike, wherever they lie."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY_CONFIG, random_tensors, take_devices

from configs import conventions
from nca_jax import convert
from nca_jax.errors import UserError
from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.layers import piece_names
from nca_jax.sharding import make_mesh, params_sharding
from nca_jax.stored_model import find_model
from nca_jax.train import train

ARCH = architecture_from_config(TINY_CONFIG)


@pytest.fixture(scope="module")
def places(tiny_model, tmp_path_factory):
    """The same weights as a Hugging Face directory, imported, and in a run whose learning rate is next to nothing."""
    root = tmp_path_factory.mktemp("places")
    assert convert.main(["import", f"--source={tiny_model}", f"--output={root}/imported"]) == 0
    config = conventions.get_config()
    config.model.source = str(tiny_model)
    overrides = {"steps": 2, "batch_size": 1, "optimizer.learning_rate": 1e-30, "optimizer.schedule": "constant"}
    overrides |= {"evaluation.max_items": 1, "checkpoint.every": 1, "rollout.max_new_tokens": 2, "mesh.fsdp": 1}
    overrides |= {"evaluation.contexts": (), "data.max_prompt_tokens": 900}
    config.update_from_flattened_dict(overrides)
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        train(config, f"{root}/run")
    return {"huggingface": str(tiny_model), "imported": f"{root}/imported", "run": f"{root}/run"}


@pytest.mark.parametrize("kind", ["huggingface", "imported", "run"])
def test_all_weights_come_back_on_a_mesh_and_piece_by_piece(places, kind):
    stored = find_model(places[kind])
    assert (stored.path, stored.arch, stored.step) == (places[kind], ARCH, 2 if kind == "run" else None)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharding = params_sharding(mesh, ARCH)
    params = stored.load(jnp.dtype("float32"), sharding)
    file = random_tensors(ARCH)
    np.testing.assert_allclose(params["final_norm"], file["model.norm.weight"], rtol=1e-6)
    np.testing.assert_allclose(params["gate"][1], file["model.layers.1.mlp.gate_proj.weight"].T, rtol=1e-6)
    assert all(params[name].sharding.is_equivalent_to(where, params[name].ndim) for name, where in sharding.items())
    read, by_layer = stored.reader()
    for name, layer in piece_names(ARCH, by_layer):
        expected = params[name] if layer is None else params[name][layer]
        np.testing.assert_array_equal(read(name, layer), expected)


def test_a_run_has_steps_to_choose_from(places):
    assert find_model(places["run"], 1).step == 1
    for path, step, said in (
        (places["run"], 7, r"has no checkpoint 7; there are \[1, 2\]"),
        (places["huggingface"], 1, "is no workdir of a run, so it has no step 1"),
        ("nowhere", None, "model 'nowhere' is no directory"),
    ):
        with pytest.raises(UserError, match=said):
            find_model(path, step)
