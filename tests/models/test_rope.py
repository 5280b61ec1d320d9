"""Rotary embeddings against numbers from the papers' formulas."""

import jax.numpy as jnp
import numpy as np

from nca_jax.models.architecture import RopeScaling
from nca_jax.models.rope import inverse_frequencies, rotate

LLAMA_3_2 = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def rotated(x_Q, position, theta=1e4, dtype=jnp.float32):
    frequency = inverse_frequencies(len(x_Q), theta, None)
    return rotate(jnp.asarray(x_Q, dtype)[None, None, None], jnp.array([[position]]), frequency)[0, 0, 0]


def test_plain_frequencies():
    np.testing.assert_allclose(inverse_frequencies(8, 1e4, None), [1, 0.1, 0.01, 0.001], rtol=1e-12)


def test_llama3_scaling():
    ratio = inverse_frequencies(64, 5e5, LLAMA_3_2) / inverse_frequencies(64, 5e5, None)
    np.testing.assert_allclose(ratio[:15], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[15:18], [0.605573, 0.303743, 0.103448], atol=1e-6)
    np.testing.assert_allclose(ratio[18:], 0.03125, rtol=1e-12)


def test_halves_are_rotated_and_not_neighbours():
    np.testing.assert_allclose(rotated([1, 0, 0, 0], 1), [0.540302, 0, 0.841471, 0], atol=1e-6)
    np.testing.assert_allclose(rotated([0, 0, 1, 0], 1), [-0.841471, 0, 0.540302, 0], atol=1e-6)
    np.testing.assert_allclose(rotated([0, 1, 0, 0], 1), [0, np.cos(0.01), 0, np.sin(0.01)], atol=1e-6)


def test_each_example_and_head_is_rotated_by_its_own_position():
    x_BxTxHxQ = np.random.default_rng(0).normal(size=(2, 3, 2, 4)).astype(np.float32)
    position_BxT = np.array([[0, 1, 2], [7, 5, 300]])
    out = rotate(jnp.asarray(x_BxTxHxQ), jnp.asarray(position_BxT), inverse_frequencies(4, 1e4, None))
    np.testing.assert_array_equal(out[0, 0], x_BxTxHxQ[0, 0])  # position 0 leaves everything as it is
    for b, t, h in np.ndindex(2, 3, 2):
        np.testing.assert_allclose(out[b, t, h], rotated(x_BxTxHxQ[b, t, h], position_BxT[b, t]), atol=1e-6)


def test_scores_depend_on_the_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 16))
    scores = [rotated(q, 5 + shift) @ rotated(k, 2 + shift) for shift in (0, 1, 40)]
    np.testing.assert_allclose(scores, scores[0], atol=1e-4)
    assert abs(scores[0] - rotated(q, 6) @ rotated(k, 2)) > 1e-2


def test_angles_are_float32_whatever_the_dtype_of_the_queries():
    """A bfloat16 position knows 4000 only to the next multiple of 16."""
    x = np.array([1, 0, 0, 0])
    out = rotated(x, 4003, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), rotated(x, 4003), atol=2**-8)
