"""The kernels, interpreted or replaced by plain XLA on a CPU, against `attend`, alone, on a mesh and in the decoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from flax import nnx

from nca_jax.axes import RULES, named
from nca_jax.errors import UserError
from nca_jax.models.architecture import load_architecture
from nca_jax.models.attention import KeyBlock, attend
from nca_jax.models.decoder import Past, decoder_graph, encode_prefix
from nca_jax.models.fused_attention import _block, attend_causal, attention_kind
from nca_jax.models.huggingface import load_params
from nca_jax.sharding import make_mesh, params_sharding

FUSED = ["splash", "cudnn"]


def draw(B, T, C, H, K, Q):
    """Queries, own keys and values, and the prefix's keys and values, which are missing for C of 0."""
    rng = np.random.default_rng(0)
    shapes = [(B, T, H, Q), (B, T, K, Q), (B, T, K, Q), *([(C, K, Q)] * 2 if C else [])]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def out_and_gradients(run, arrays):
    """Of a loss that weighs every output differently."""

    def loss(arrays):
        out = run(*arrays)
        weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * weight).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return [out, *gradients]


def fused(q, k, v, *prefix, kind, mesh=None):
    return attend_causal(q, k, v, KeyBlock(*prefix) if prefix else None, kind, mesh)


def plain(q, k, v, *prefix):
    position_T = jnp.arange(q.shape[1])
    own = KeyBlock(k, v, position_T[None, :, None] >= position_T)
    return attend(q, [KeyBlock(*prefix), own] if prefix else [own])


def assert_close(actual, expected):
    for name, a, b in zip(["out", "q", "k", "v", "prefix k", "prefix v"], actual, expected, strict=False):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)
    assert len(actual) == len(expected)


SHAPES = {
    "one block": (2, 5, 3, 4, 2, 16),
    "no prefix": (2, 5, 0, 4, 4, 64),
    "one key head": (1, 130, 7, 2, 1, 16),
    "two blocks": (1, 130, 150, 2, 2, 64),
    "no prefix, two blocks": (1, 130, 0, 2, 1, 16),
    "whole blocks": (1, 128, 128, 2, 1, 64),
    "prefix of one": (2, 2, 1, 2, 1, 16),
}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_values_and_gradients_equal_attend(kind, shape):
    arrays = draw(*shape)
    run = functools.partial(fused, kind=kind)
    assert_close(out_and_gradients(run, arrays), out_and_gradients(plain, arrays))


def test_xla_is_attend():
    arrays = draw(2, 5, 3, 4, 2, 16)
    np.testing.assert_array_equal(fused(*arrays, kind="xla"), plain(*arrays))


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("B", [8, 1], ids=["a batch to split", "one row"])
def test_a_mesh_of_eight_devices_equals_one_device(kind, B):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    arrays = draw(B, 5, 3, 4, 2, 16)
    rows = named(mesh, "batch" if B > 1 else None, None, "heads", None)
    split = [jax.device_put(x, rows if x.ndim == 4 else named(mesh, None, "kv_heads", None)) for x in arrays]
    actual = out_and_gradients(functools.partial(fused, kind=kind, mesh=mesh), split)
    assert actual[0].sharding.is_equivalent_to(rows, 4)
    assert_close(actual, out_and_gradients(plain, arrays))


def test_on_a_mesh_each_device_runs_its_own_examples_and_heads():
    """And none of the whole: the kernel's padded operands are an eighth of the arrays'."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    program = str(jax.make_jaxpr(functools.partial(fused, kind="splash", mesh=mesh))(*draw(8, 5, 3, 4, 2, 16)))
    assert "pallas_call" in program and "f32[2,2,128,16]" in program and "f32[2,1,128,16]" in program
    assert "f32[8,4,128,16]" not in program and "f32[8,2,128,16]" not in program
    assert RULES["heads"] == RULES["kv_heads"]  # or queries and keys would be split differently


@pytest.mark.parametrize("kind", FUSED)
def test_bfloat16_stays_near_float32(kind):
    """Within a few roundings of 2^-8 of outputs of about one."""
    arrays = draw(2, 5, 3, 4, 2, 16)
    out = jax.jit(functools.partial(fused, kind=kind))(*(x.astype(jnp.bfloat16) for x in arrays))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), plain(*arrays), atol=3e-2)


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, 128), (128, 128), (256, 256), (384, 128), (512, 512), (520, 128), (1395, 512), (4096, 512)],
)
def test_blocks_are_wide_where_that_pads_little(length, block):
    assert _block(length) == block


@functools.cache
def golden():
    arch = load_architecture(GOLDEN / "llama3")
    tokens = jnp.asarray(np.load(GOLDEN / "llama3" / "fixture.npz")["tokens"])
    return arch, load_params(GOLDEN / "llama3", arch), tokens


@functools.partial(jax.jit, static_argnames="graph")
def loss_and_gradient(params, token_BxT, graph):
    """Through two prefixes, one over the other, whose keys get their gradient from all examples."""

    def loss(params):
        model = nnx.merge(graph, params)
        first = encode_prefix(model, token_BxT[0, :5])
        second = encode_prefix_after(model, token_BxT[0, 5:8], first)
        position_1xT = 8 + jnp.arange(12)[None]
        hidden_BxTxD, (k, _) = model(token_BxT[:, 8:], position_1xT, [first, second])
        return (hidden_BxTxD**2 * jnp.cos(jnp.arange(hidden_BxTxD.size)).reshape(hidden_BxTxD.shape)).sum() + k.sum()

    return jax.value_and_grad(loss)(params)


def encode_prefix_after(model, token_C, past):
    _, (k, v) = model(token_C[None], past.k.shape[1] + jnp.arange(token_C.shape[0])[None], [past])
    return Past(k[:, 0], v[:, 0])


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])
def test_the_decoder_with_a_kernel_equals_the_decoder_without(kind, on_mesh):
    arch, params, token_BxT = golden()
    token_BxT = jnp.tile(token_BxT[:, :20], (2, 1))
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}) if on_mesh else None
    expected_loss, expected = loss_and_gradient(params, token_BxT, decoder_graph(arch))
    if on_mesh:
        params = jax.device_put(params, params_sharding(mesh, arch))
        token_BxT = jax.device_put(token_BxT, named(mesh, "batch", None))
    loss, gradient = loss_and_gradient(params, token_BxT, decoder_graph(arch, attention=kind, mesh=mesh))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name in expected:
        # Against the largest of each weight, as gradients add up hundreds of terms of either sign.
        atol = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient[name], expected[name], atol=atol, err_msg=name)


def test_the_decoder_hands_its_mesh_to_the_kernel():
    """Interpreted, a kernel is a plain program that XLA can split by itself; a compiled one is not."""
    arch, params, token_BxT = golden()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    for given in (None, mesh):
        model = nnx.merge(decoder_graph(arch, attention="splash", mesh=given), params)
        program = str(jax.make_jaxpr(model)(token_BxT[:, :4], jnp.arange(4)[None]))
        assert ("shard_map" in program) == (given is not None)


def test_a_kernel_runs_for_a_sequence_over_shared_prefixes_and_for_nothing_else():
    arch, params, _ = golden()
    model = nnx.merge(decoder_graph(arch, attention="splash"), params)
    L, K, Q = arch.num_layers, arch.num_kv_heads, arch.head_dim
    shared = Past(*[jnp.zeros((L, 3, K, Q))] * 2)
    own = Past(*[jnp.zeros((L, 2, 3, K, Q))] * 2)
    some = jnp.ones((1, 1, 3), bool)

    def has_kernel(T, *past):
        tokens, positions = jnp.zeros((2, T), jnp.int32), jnp.arange(T)[None]
        return "pallas_call" in str(jax.make_jaxpr(model)(tokens, positions, past))

    assert has_kernel(4) and has_kernel(4, shared) and has_kernel(4, shared, shared)
    assert not has_kernel(1) and not has_kernel(1, shared)
    assert not has_kernel(1, shared._replace(visible=some)) and not has_kernel(1, own._replace(visible=some))
    assert not has_kernel(4, shared._replace(visible=some.repeat(4, 1))) and not has_kernel(4, own)
    assert not has_kernel(4, shared, own)


@pytest.mark.parametrize(
    ("backend", "dtype", "kind"),
    [
        ("cpu", jnp.float32, "xla"),
        ("tpu", jnp.float32, "splash"),
        ("tpu", jnp.bfloat16, "splash"),
        ("gpu", jnp.bfloat16, "cudnn"),
        ("gpu", jnp.float32, "xla"),
    ],
)
def test_auto_is_what_the_backend_has(monkeypatch, backend, dtype, kind):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert attention_kind("auto", dtype) == kind
    assert attention_kind("xla", dtype) == "xla" and attention_kind("splash", dtype) == "splash"


def test_kinds_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(UserError, match="'flash' is not known; choose one of auto, xla, splash, cudnn"):
        attention_kind("flash")
    assert attention_kind("cudnn", jnp.float32) == "cudnn"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match="not float32"):
        attention_kind("cudnn", jnp.float32)
