"""Weights from safetensors files: what comes out, and the one message about what is wrong."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import TINY_CONFIG, random_tensors
from safetensors.numpy import save_file

from nca_jax.errors import UserError
from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.huggingface import load_params
from nca_jax.sharding import make_mesh, params_sharding

ARCH = architecture_from_config(TINY_CONFIG)
UNTIED = architecture_from_config(TINY_CONFIG | {"tie_word_embeddings": False})
TENSORS = random_tensors(ARCH)
EMBEDDING, QUERY = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"


def write_single(directory, tensors):
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_shards(directory, tensors, **changes):
    """Every other tensor into a second file; `changes` are made to the index only."""
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    write_index(directory, weight_map | changes)
    return directory


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(directory, arch=ARCH) -> str:
    with pytest.raises(UserError) as caught:
        load_params(directory, arch)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def assert_equal(params, others):
    assert params.keys() == others.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return write_single(tmp_path_factory.mktemp("single"), TENSORS)


def test_layers_are_stacked_and_heads_split(single):
    """Written out for one query head: rows 16..31 of the file are head 1, transposed."""
    params = load_params(single, ARCH)
    assert params["query"].shape == (2, 32, 4, 16)
    np.testing.assert_array_equal(params["query"][1, :, 1], TENSORS[QUERY][16:32].T)
    output = TENSORS["model.layers.0.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(params["output"][0, 1], output[:, 16:32].T)
    np.testing.assert_array_equal(params["embedding"], TENSORS[EMBEDDING])


def test_shards_equal_the_single_file(single, tmp_path):
    assert_equal(load_params(write_shards(tmp_path, TENSORS), ARCH), load_params(single, ARCH))


def test_a_bfloat16_file_is_exact_in_float32(tmp_path):
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in TENSORS.items()}
    params = load_params(write_single(tmp_path, half), ARCH)
    assert {p.dtype for p in params.values()} == {jnp.dtype(jnp.float32)}
    np.testing.assert_array_equal(params["embedding"], half[EMBEDDING].astype(np.float32))
    np.testing.assert_array_equal(params["query"][1, :, 1], half[QUERY][16:32].T.astype(np.float32))
    assert_equal(load_params(tmp_path, ARCH, jnp.bfloat16), {n: p.astype(jnp.bfloat16) for n, p in params.items()})


def test_each_device_of_a_mesh_gets_its_part(single):
    sharding = params_sharding(make_mesh({"data": 1, "fsdp": 4, "tensor": 2}), ARCH)
    params = load_params(single, ARCH, sharding=sharding)
    assert {name: p.sharding for name, p in params.items()} == sharding
    assert {shard.data.shape for shard in params["query"].addressable_shards} == {(2, 8, 2, 16)}
    assert_equal(params, load_params(single, ARCH))


def test_by_default_everything_is_on_the_first_device(single):
    for p in load_params(single, ARCH).values():
        assert p.devices() == {jax.devices()[0]}


@pytest.mark.parametrize("write", [write_single, write_shards])
def test_everything_wrong_with_the_tensors_is_in_one_message(write, tmp_path):
    tensors = TENSORS | {QUERY: TENSORS[QUERY].T.copy(), "model.layers.2.mlp.bias": np.zeros(3, np.float32)}
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    message = refusal(write(tmp_path, tensors))
    for said in (
        "missing model.norm.weight",
        "missing model.layers.0.mlp.up_proj.weight",
        "unknown model.layers.2.mlp.bias",
        f"{QUERY} has shape (32, 64), not (64, 32)",
    ):
        assert said in message
    assert message.count(";") == 3  # and nothing else


def test_an_index_that_promises_what_its_file_lacks(tmp_path):
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != QUERY}
    directory = write_shards(tmp_path, tensors, **{QUERY: "model-0.safetensors"})
    assert f"missing {QUERY}" in refusal(directory)


def test_an_index_that_names_absent_files(tmp_path):
    changes = {QUERY: "model-8.safetensors", EMBEDDING: "model-9.safetensors"}
    tensors = {name: tensor for name, tensor in TENSORS.items() if name not in changes} | {"zebra": TENSORS[QUERY]}
    message = refusal(write_shards(tmp_path, tensors, **changes))
    for said in ("model-8.safetensors", "model-9.safetensors", f"missing {QUERY}", "unknown zebra"):
        assert said in message
    assert "absent file model-0" not in message


@pytest.mark.parametrize("text", ['{"weight_map": {', "{}", '{"weight_map": null}'])
def test_an_index_that_is_none(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "index" in refusal(tmp_path)


def test_a_tied_head_without_the_embedding_is_a_missing_tensor(tmp_path):
    tensors = {name: tensor for name, tensor in TENSORS.items() if name != EMBEDDING}
    tensors["lm_head.weight"] = TENSORS[EMBEDDING]
    assert f"missing {EMBEDDING}" in refusal(write_single(tmp_path, tensors))


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
def test_an_index_that_names_a_file_outside_is_not_trusted(relative, tmp_path):
    directory, outside = tmp_path / "model", tmp_path / "outside.safetensors"
    directory.mkdir()
    save_file(TENSORS, outside)
    name = "../outside.safetensors" if relative else str(outside)
    write_index(directory, dict.fromkeys(TENSORS, name))
    assert name in refusal(directory)


def test_a_directory_without_safetensors(tmp_path):
    assert "check the path" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    message = refusal(tmp_path)
    assert "no model.safetensors" in message and "pickle files (pytorch_model.bin)" in message


def test_a_tied_head_may_be_written_out_if_it_is_the_embedding(single, tmp_path):
    write_single(tmp_path, TENSORS | {"lm_head.weight": TENSORS[EMBEDDING].copy()})
    assert_equal(load_params(tmp_path, ARCH), load_params(single, ARCH))
    write_single(tmp_path, TENSORS | {"lm_head.weight": TENSORS[EMBEDDING] + 1e-3})
    assert "lm_head.weight differs from the embedding" in refusal(tmp_path)


def test_an_untied_head_is_read_and_never_replaced_by_the_embedding(single, tmp_path):
    tensors = random_tensors(UNTIED)
    params = load_params(write_single(tmp_path, tensors), UNTIED)
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"])
    assert np.any(params["head"] != params["embedding"])
    assert "missing lm_head.weight" in refusal(single, UNTIED)


def test_rotary_frequencies_of_old_exporters_are_left_alone(single, tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert_equal(load_params(write_single(tmp_path, TENSORS | extra), ARCH), load_params(single, ARCH))


@pytest.mark.parametrize("size", [0, 4, 200, -1])
@pytest.mark.parametrize("write", [write_single, write_shards])
def test_a_truncated_file_is_named(write, size, tmp_path):
    write(tmp_path, TENSORS)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:size])
    message = refusal(tmp_path)
    assert str(path) in message and "download it again" in message
