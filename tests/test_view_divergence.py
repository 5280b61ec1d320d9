"""KL between views against dense logits, a row at a time and without any padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY_CONFIG
from flax import nnx
from scipy.special import log_softmax

from nca_jax.models.architecture import architecture_from_config
from nca_jax.models.decoder import decoder_graph, random_params
from nca_jax.sharding import make_mesh, params_sharding
from nca_jax.view_divergence import make_view_divergence
from nca_jax.views import View, shared_prefix

ARCH = architecture_from_config(TINY_CONFIG)
VOCAB, B, R = 259, 8, 5
PREFIX_X, PREFIX_C = (3, 4), (3, 7, 8, 9, 10, 11, 12, 13)
RNG = np.random.default_rng(0)
PROMPTS = [tuple(RNG.integers(3, VOCAB, n)) for n in (1, 4, 2, 3, 4, 1, 2, 3)]
RESPONSES = [tuple(RNG.integers(3, VOCAB, n)) for n in (5, 1, 3, 0, 2, 5, 4, 1)]


@pytest.fixture(scope="module")
def params():
    # Large enough that the views differ.
    return {name: 8 * w if w.ndim > 1 else w for name, w in random_params(ARCH, 0).items()}


def padded(rows, width: int) -> tuple[np.ndarray, np.ndarray]:
    array = np.zeros((B, width), np.int32)
    for row, ids in zip(array, rows, strict=True):
        row[: len(ids)] = ids
    return array, np.array([len(ids) for ids in rows], np.int32)


def values(params, mesh_sizes=None) -> np.ndarray:
    mesh = make_mesh(mesh_sizes) if mesh_sizes else None
    graph = decoder_graph(ARCH, mesh=mesh)
    if mesh:
        params = jax.device_put(params, params_sharding(mesh, ARCH))
    divergence = make_view_divergence(graph, vocab_size=VOCAB, chunk_size=16)
    prompt, length = padded(PROMPTS, 4)
    response, count = padded(RESPONSES, R)
    mask, hidden = np.arange(R) < count[:, None], []
    for prefix in (PREFIX_X, PREFIX_C):
        prefix_C = np.array(prefix, np.int32)
        past = jax.jit(lambda p, ids: shared_prefix(nnx.merge(graph, p), ids))(params, jnp.asarray(prefix_C))
        hidden.append(divergence.hidden(params, View(prefix_C, prompt, length), past, response))
    return np.asarray(divergence.compare(params, *hidden, mask))


@jax.jit
def plain_logits(params, ids_1xT):
    model = nnx.merge(decoder_graph(ARCH), params)
    hidden_1xTxD, _ = model(ids_1xT, jnp.arange(ids_1xT.shape[1])[None])
    return hidden_1xTxD[0] @ model.head_VxD[:VOCAB].T


def dense(params, prefix, prompt, response) -> np.ndarray:
    """Log-probabilities [R, V] that predict each response token, from one plain pass over the row."""
    logits = np.asarray(plain_logits(params, jnp.asarray([[*prefix, *prompt, *response]], jnp.int32)), np.float64)
    first = len(prefix) + len(prompt) - 1
    return log_softmax(logits[first : first + len(response)], axis=-1)


def test_values_are_those_of_dense_logits(params):
    found = values(params)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        log_x, log_c = (dense(params, prefix, prompt, response) for prefix in (PREFIX_X, PREFIX_C))
        expected = np.sum(np.exp(log_x) * (log_x - log_c), axis=-1)
        np.testing.assert_allclose(found[row, : len(response)], expected, rtol=2e-4, atol=1e-6)
        assert not found[row, len(response) :].any()
    assert found.max() > 0.01


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 1, "fsdp": 8, "tensor": 1}], ids=str)
def test_a_mesh_changes_nothing(params, sizes):
    np.testing.assert_allclose(values(params, sizes), values(params), rtol=1e-4, atol=1e-6)
