"""Products with weights: values, gradients, and what a recomputation policy sees of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_jax.models.contract import contract
from nca_jax.models.decoder import REMAT_POLICIES

B, T, D, H, Q, F = 2, 3, 4, 2, 3, 8
# As the decoder has them; in the last, x is larger than what comes out.
CASES = {
    "btd,dhq->bthq": ((B, T, D), (D, H, Q)),
    "bthq,hqd->btd": ((B, T, H, Q), (H, Q, D)),
    "btd,df->btf": ((B, T, D), (D, F)),
    "btf,fd->btd": ((B, T, F), (F, D)),
}


def random(rng, *shape):
    return rng.standard_normal(shape)


@pytest.mark.parametrize("equation", CASES)
def test_value_and_gradients_are_those_of_the_product(equation):
    """By numpy, in float64: d<g, xw>/dx = g w^T, d<g, xw>/dw = x^T g, written out with plain loops over letters."""
    rng = np.random.default_rng(0)
    x, w = (random(rng, *shape) for shape in CASES[equation])
    value = np.einsum(equation, x, w)
    g = random(rng, *value.shape)
    found, pull_back = jax.vjp(
        lambda x, w: contract(equation, x, w), jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    )
    np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5)
    found_x, found_w = pull_back(jnp.asarray(g, jnp.float32))
    # As matrices: the letters that x and w share are the rows of w and the last axes of x.
    shared = [letter for letter in equation.split("->")[0].split(",")[1] if letter in equation.split(",")[0]]
    rows = int(np.prod([w.shape[i] for i in range(len(shared))]))
    x2, w2, g2 = x.reshape(-1, rows), w.reshape(rows, -1), g.reshape(B * T, -1)
    np.testing.assert_allclose(found_x, (g2 @ w2.T).reshape(x.shape), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found_w, (x2.T @ g2).reshape(w.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", CASES)
def test_a_weights_gradient_is_x_transposed_times_g_and_nothing_else_is_transposed(equation):
    """Of a plain einsum it is g transposed times x, and its transpose."""
    x, w = (jnp.zeros(shape) for shape in CASES[equation])

    def gradient_of(product):
        out, pull_back = jax.vjp(lambda w: product(equation, x, w), w)
        equations = jax.make_jaxpr(pull_back)(out).jaxpr.eqns
        # Rows are summed over in that product only.
        (of_weight,) = (e for e in equations if e.params.get("dimension_numbers", [[()]])[0][0] == (0, 1))
        return of_weight.invars[0].aval.shape, sum(e.primitive.name == "transpose" for e in equations)

    assert gradient_of(contract) == (x.shape, 0)
    assert gradient_of(jnp.einsum) == (jnp.einsum(equation, x, w).shape, 1)


@pytest.mark.parametrize(("policy", "products"), [("none", 2), ("dots", 2), ("full", 3)])
def test_a_policy_sees_the_product(policy, products):
    """sin(xw) needs xw again in its backward pass: kept, or as a third product besides those of both gradients."""

    def loss(x, w):
        return jnp.sin(contract("btd,df->btf", x, w)).sum()

    run = jax.checkpoint(loss, policy=REMAT_POLICIES[policy])
    _, pull_back = jax.vjp(run, jnp.ones((B, T, D)), jnp.ones((D, F)))
    assert str(jax.make_jaxpr(pull_back)(jnp.float32(1.0))).count("dot_general") == products
