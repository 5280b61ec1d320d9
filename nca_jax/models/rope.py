"""Rotary position embeddings, half-split layout, with Llama-3 scaling (Su et al., arXiv 2104.09864)."""

import jax
import jax.numpy as jnp
import numpy as np

from nca_jax.models.architecture import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angle per position of each pair of channels: float64 [head_dim / 2], in radians.

    Scaling is Llama-3.1's: a wavelength shorter than original/high keeps its frequency, one longer than original/low
    has it divided by `factor`, and those between are interpolated linearly in original/wavelength.
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * np.pi)
    kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor)


def rotate(x_BxTxHxQ: jax.Array, position_BxT: jax.Array, inverse_frequency: np.ndarray) -> jax.Array:
    """Rotates channel i with channel i + Q/2 by position * inverse_frequency[i].

    Angles are float32 (exact positions up to 2**24); the result has the dtype of `x`.
    """
    angle_BxTx1xq = position_BxT[..., None, None].astype(jnp.float32) * jnp.asarray(inverse_frequency, jnp.float32)
    cos, sin = jnp.cos(angle_BxTx1xq), jnp.sin(angle_BxTx1xq)
    first, second = jnp.split(x_BxTxHxQ.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BxTxHxQ.dtype)
