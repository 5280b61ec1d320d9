"""Products of activations and weights, with gradients in the layout that the next product wants."""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """`jnp.einsum(equation, x, weight)`, whose gradient for the weight is a product x^T g in that order.

    jax's own rule computes (g^T x)^T. On a CPU that is a transposed copy of g, in the mlp the largest array of a layer,
    with the nonlinearity's derivative computed anew in the wrong order, and another copy of the gradient
    (benchmarks/arrangement.py).

    Only reverse mode: jax does not differentiate a custom rule forwards.

    Args:
      equation: "x,weight->out"; every letter of one of the three stands in exactly one of the other two.
      x: activations.
      weight: of the same dtype.

    Returns:
      as the equation says, in the operands' dtype; both gradients too.
    """
    return jnp.einsum(equation, x, weight)


def _forward(equation, x, weight):
    # Not `contract` itself: what is to be recomputed is decided by products that a policy can see.
    return jnp.einsum(equation, x, weight), (x, weight)


def _backward(equation, operands, gradient):
    x, weight = operands
    inputs, out = equation.split("->")
    of_x, of_weight = inputs.split(",")
    return (
        jnp.einsum(f"{out},{of_weight}->{of_x}", gradient, weight),
        jnp.einsum(f"{of_x},{out}->{of_weight}", x, gradient),
    )


contract.defvjp(_forward, _backward)
