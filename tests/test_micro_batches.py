"""Parts of a batch and the lengths they are run at."""

import jax.numpy as jnp
import numpy as np
import pytest

from nca_jax import micro_batches
from nca_jax.views import Batch, Retained, View


def batch_of(prompts: list[int], tokens: list[int], retained: tuple[list[int], list[int]] | None = None) -> Batch:
    """Rows of such lengths; P = 6, R = 5. Every prompt token is its row's number."""
    B, P, R = len(prompts), 6, 5

    def view(lengths):
        prompt_BxP = jnp.broadcast_to(jnp.arange(B)[:, None], (B, P))
        return View(jnp.asarray([7, 8]), prompt_BxP, jnp.asarray(lengths))

    def mask(lengths):
        return jnp.arange(R) < jnp.asarray(lengths)[:, None]

    response_BxR = 10 * jnp.arange(B)[:, None] + jnp.arange(R)
    kept = retained and Retained(view(retained[0]), response_BxR, mask(retained[1]))
    return Batch(view(prompts), view(prompts), response_BxR, mask(tokens), kept)


@pytest.mark.parametrize(
    ("longest", "count", "expected"),
    [
        (1024, 1, [1024]),
        (1024, 3, [256, 512, 1024]),
        (1000, 3, [256, 504, 1000]),  # 250 and 500 rounded up to multiples of 8
        (20, 4, [8, 16, 20]),  # two quarters are one
        (5, 3, [5]),
    ],
)
def test_lengths_are_halved(longest, count, expected):
    assert micro_batches.lengths(longest, count) == expected


def test_a_row_needs_its_longest_view_and_without_a_response_nothing():
    batch = batch_of([1, 6, 2, 4], [5, 0, 1, 2])
    np.testing.assert_array_equal(micro_batches.needed(batch), [6, 0, 3, 6])
    kept = batch_of([1, 6, 2, 4], [5, 0, 1, 2], retained=([3, 3, 3, 3], [1, 1, 4, 0]))
    np.testing.assert_array_equal(micro_batches.needed(kept), [6, 4, 7, 6])


@pytest.mark.parametrize(("need", "index"), [([0, 8], 0), ([9, 1], 1), ([16, 3], 1), ([17, 0], 2), ([40, 0], 2)])
def test_the_shortest_length_that_fits_is_taken(need, index):
    assert micro_batches.which(jnp.asarray(need), [8, 16, 32]) == index


def test_rows_are_ordered_with_all_that_is_theirs():
    batch = batch_of([1, 6, 2, 4], [5, 0, 1, 2])
    weights = {"response": jnp.arange(4.0)[:, None] * jnp.ones(5)}
    ordered, ordered_weights = micro_batches.longest_first((batch, weights), micro_batches.needed(batch), None)
    rows = [0, 3, 2, 1]  # of 6, 6, 3 and no tokens; equals stay in their order
    np.testing.assert_array_equal(ordered.no_context.prompt_BxP[:, 0], rows)
    np.testing.assert_array_equal(ordered.with_context.prompt_length_B, [1, 4, 2, 6])
    np.testing.assert_array_equal(ordered.response_BxR[:, 0], [0, 30, 20, 10])
    np.testing.assert_array_equal(ordered.response_mask_BxR.sum(axis=1), [5, 2, 1, 0])
    np.testing.assert_array_equal(ordered_weights["response"][:, 0], rows)
    np.testing.assert_array_equal(ordered.no_context.prefix_C, [7, 8])


def test_only_responses_are_cut():
    batch = batch_of([1, 6], [2, 1], retained=([1, 1], [1, 1]))
    cut, weights = micro_batches.cut(batch, {"response": jnp.ones((2, 5)), "retained": jnp.ones((2, 5))}, 3)
    np.testing.assert_array_equal(cut.response_BxR, [[0, 1, 2], [10, 11, 12]])
    np.testing.assert_array_equal(cut.response_mask_BxR, [[1, 1, 0], [1, 0, 0]])
    assert cut.retained.response_BxR.shape == cut.retained.response_mask_BxR.shape == (2, 3)
    assert weights["response"].shape == weights["retained"].shape == (2, 3)
    assert cut.no_context.prompt_BxP.shape == cut.retained.view.prompt_BxP.shape == (2, 6)
