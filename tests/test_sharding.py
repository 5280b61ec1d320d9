"""Meshes of eight simulated devices: what is refused, where things go, and the same gradient on each."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TINY_CONFIG, take_devices
from flax import nnx
from same_run import OVERRIDES, assert_same, config_of, overrides_on, wide_model

from nca_jax.errors import UserError
from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.decoder import decoder_graph, random_params, weight_table
from nca_jax.sharding import batch_sharding, like_params, make_mesh, named, params_sharding
from nca_jax.train import train
from nca_jax.train_step import Objective, Teacher, TrainState, make_loss_and_gradient
from nca_jax.views import Batch, Retained, View, shared_prefix
from nca_jax.vocab_loss import AnchorTerm, Terms

ARCH = architecture_from_config(TINY_CONFIG)


def mesh_of(data, fsdp, tensor):
    return make_mesh({"data": data, "fsdp": fsdp, "tensor": tensor})


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((2, 2, 2), (2, 2, 2)),
        ((1, 8, 1), (1, 8, 1)),
        ((-1, 2, 2), (2, 2, 2)),
        ((1, -1, 2), (1, 4, 2)),
        ((8, 1, -1), (8, 1, 1)),
    ],
)
def test_mesh_sizes(sizes, shape):
    mesh = mesh_of(*sizes)
    assert mesh.shape == dict(zip(("replica", "data", "fsdp", "tensor"), (1, *shape), strict=True))


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (16, 1, 1), (3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 8, 1), (0, -1, 1), (-1, 16, 1)]
)
def test_mesh_sizes_that_do_not_fit_the_devices_are_refused(sizes):
    with pytest.raises(UserError, match=f"'data': {sizes[0]}.*8 devices"):
        mesh_of(*sizes)


def test_a_replica_that_would_span_slices_is_refused():
    devices = [SimpleNamespace(slice_index=i // 4) for i in range(8)]
    with pytest.raises(UserError, match=r"replica 1 is no multiple of the 2 slices.*set it to 0"):
        make_mesh({"replica": 1, "data": 1, "fsdp": 8, "tensor": 1}, devices)
    with pytest.raises(UserError, match="8 devices in 2 slices"):
        make_mesh({"replica": 0, "data": 1, "fsdp": 8, "tensor": 1}, devices)


def test_weights_are_split_along_the_axes_of_their_table():
    mesh = mesh_of(1, 4, 2)
    split = {name: s.shard_shape(weight_table(ARCH)[name].shape) for name, s in params_sharding(mesh, ARCH).items()}
    assert split["embedding"] == (136, 8)
    assert split["query"] == (2, 8, 2, 16) and split["key"] == split["value"] == (2, 8, 1, 16)
    assert split["output"] == (2, 2, 16, 8)
    assert split["gate"] == split["up"] == (2, 8, 32) and split["down"] == (2, 32, 8)
    assert split["final_norm"] == (32,) and split["attention_norm"] == (2, 32)


@pytest.mark.parametrize(
    ("sizes", "change", "named"),
    [
        (
            (1, 2, 4),
            {},
            "weight key: its kv_heads dimension of 2 does not divide by 4 devices (tensor); set config.mesh.tensor to "
            "one of 1, 2.",
        ),
        (
            (1, 8, 1),
            {"hidden_size": 36},
            "weight embedding: its embed dimension of 36 does not divide by 8 devices (fsdp)",
        ),
        ((4, 1, 2), {"vocab_size": 271}, "weight embedding: its vocab dimension of 271"),
        ((4, 1, 2), {"intermediate_size": 63}, "weight gate: its mlp dimension of 63"),
    ],
)
def test_a_dimension_that_does_not_divide_is_named(sizes, change, named):
    with pytest.raises(UserError) as caught:
        params_sharding(mesh_of(*sizes), architecture_from_config(TINY_CONFIG | change))
    assert named in str(caught.value)


def test_moments_of_the_optimizer_lie_where_their_weights_do():
    mesh = mesh_of(1, 4, 2)
    weights, replicated = params_sharding(mesh, ARCH), named(mesh)
    state = jax.eval_shape(optax.adamw(1e-3).init, jax.eval_shape(lambda: random_params(ARCH, 0)))
    adam = like_params(state, weights, replicated)[0]
    assert adam.mu == adam.nu == weights and adam.count == replicated


def random_batch(B=8, P=5, R=4, C=3) -> Batch:
    rng = np.random.default_rng(0)
    ids = lambda *shape: jnp.asarray(rng.integers(3, 259, shape), jnp.int32)  # noqa: E731

    def view(C):
        return View(ids(C), ids(B, P), jnp.asarray(rng.integers(1, P + 1, B), jnp.int32))

    # Lengths 0, 1, 2, ...: devices have different numbers of tokens, and one has none.
    mask = jnp.arange(R) < (jnp.arange(B) % (R + 1))[:, None]
    return Batch(view(C), view(C + 5), ids(B, R), mask, Retained(view(C + 13), ids(B, R), mask[::-1]))


def loss_and_gradient(params, teacher_params, batch, mesh=None, accumulation=1, lengths=1):
    terms = Terms(vocab_size=259, anchor=AnchorTerm(gate_tau=1.0), chunk_size=16)
    graph = decoder_graph(ARCH, mesh=mesh)
    run = make_loss_and_gradient(graph, graph, Objective(terms, beta=0.5, gamma=0.5), accumulation, mesh, lengths)

    @jax.jit
    def with_prefixes(params, teacher_params, batch):
        model = nnx.merge(graph, teacher_params)
        prefixes = [shared_prefix(model, v.prefix_C) for v in (batch.with_context, batch.retained.view)]
        return run(TrainState(jnp.int32(0), params, None), Teacher(teacher_params, *prefixes), batch)

    return with_prefixes(params, teacher_params, batch)


@pytest.fixture(scope="module")
def on_one_device():
    params, teacher_params = random_params(ARCH, 0), random_params(ARCH, 1)
    # Embeddings, which are the head too, much larger than fresh ones, for divergences that are not nearly 0.
    params, teacher_params = (p | {"embedding": 8 * p["embedding"]} for p in (params, teacher_params))
    return params, teacher_params, loss_and_gradient(params, teacher_params, random_batch())


@pytest.mark.parametrize(
    ("sizes", "accumulation", "lengths"),
    [((8, 1, 1), 1, 1), ((2, 2, 2), 1, 1), ((1, 4, 2), 1, 1), ((1, 4, 2), 2, 1), ((2, 2, 2), 2, 2), ((8, 1, 1), 1, 2)],
)
def test_loss_and_gradient_equal_those_of_one_device(sizes, accumulation, lengths, on_one_device):
    params, teacher_params, (loss, gradient, terms) = on_one_device
    mesh = mesh_of(*sizes)
    weights = params_sharding(mesh, ARCH)
    found_loss, found_gradient, found_terms = loss_and_gradient(
        jax.device_put(params, weights),
        jax.device_put(teacher_params, weights),
        jax.device_put(random_batch(), batch_sharding(mesh)),
        mesh,
        accumulation,
        lengths,
    )
    assert (found_terms["computed"] < 1) == (lengths > 1), "no part was short enough for the shorter program"
    assert all(terms[name] > 0.1 for name in ("opd", "nca", "retention"))
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for name in set(terms) - {"computed"}:
        np.testing.assert_allclose(found_terms[name], terms[name], rtol=1e-5, err_msg=name)
    for name, g in gradient.items():
        np.testing.assert_allclose(found_gradient[name], g, atol=1e-5 * np.abs(g).max(), err_msg=name)


def test_a_batch_lies_over_the_data_axes_and_a_prefix_everywhere():
    sharding = batch_sharding(mesh_of(2, 2, 2))
    batch = jax.device_put(random_batch(), sharding)
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        whole = "prefix_C" in jax.tree_util.keystr(path)
        rows = x.shape[0] if whole else 2
        assert all(part.data.shape == (rows, *x.shape[1:]) for part in x.addressable_shards), path
    assert batch.with_context.prefix_C.sharding.is_fully_replicated


def test_the_work_of_encoding_a_prefix_is_divided():
    """Each of 4 x 2 devices computes the mlp for a quarter of the tokens (and its half of the features)."""
    mesh, C, F = mesh_of(1, 4, 2), 24, 80
    arch = dataclasses.replace(ARCH, mlp_size=F)
    graph, weights = decoder_graph(arch, mesh=mesh), params_sharding(mesh, arch)

    def program(tokens):
        params = jax.device_put(random_params(arch, 0), weights)
        encode = jax.jit(lambda params, prefix_C: shared_prefix(nnx.merge(graph, params), prefix_C))
        return encode.lower(params, jnp.arange(tokens)).compile().as_text()

    divided, whole = program(C), program(C + 1)  # 25 tokens do not divide
    assert f"f32[1,{C // 4},{F // 2}]" in divided or f"f32[{C // 4},{F // 2}]" in divided
    assert f"f32[1,{C},{F // 2}]" not in divided and f"f32[{C},{F // 2}]" not in divided
    assert f"f32[1,{C + 1},{F // 2}]" in whole or f"f32[{C + 1},{F // 2}]" in whole


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """A model, and a run of it on one device."""
    model, workdir = wide_model(tmp_path_factory.mktemp("wide") / "model"), tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        train(config_of(model, OVERRIDES), str(workdir))
    return model, workdir


def mesh_runs(*sizes, marks=()):
    return [pytest.param(s, marks=marks, id="x".join(map(str, s))) for s in sizes]


@pytest.mark.parametrize(
    "sizes",
    mesh_runs((1, 4, 2, 1), (2, 1, 2, 2)) + mesh_runs((1, 8, 1, 1), (1, 2, 2, 2), (1, 1, 1, 8), marks=pytest.mark.slow),
)
def test_losses_parameters_samples_and_evaluations_are_those_of_one_device(sizes, one_device, tmp_path):
    model, alone = one_device
    train(config_of(model, overrides_on(*sizes)), str(tmp_path))
    assert_same(tmp_path, alone)
