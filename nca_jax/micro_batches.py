"""A step's batch in parts, each run at a length that its rows need.

Responses differ in length, and what is padded costs as much as what counts. With rows in the order of their length, a
part holds rows of about one length, and a part of short rows runs a program of half the length, or a quarter.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nca_jax.axes import constrain
from nca_jax.views import Batch, View

_MULTIPLE = 8  # of the shorter lengths: odd ones make arrays that fill registers badly


def _is_prefix(path) -> bool:
    """Whether a path in a batch is that of a shared prefix, which has no axis of examples."""
    return any(getattr(key, "name", None) == "prefix_C" for key in path)


def some_rows(tree: Any, rows: slice | jax.Array) -> Any:
    """Some of the examples; prefixes are those of all."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if _is_prefix(path) else x[rows], tree)


def split(tree: Any, parts: int) -> Any:
    """[B, ...] -> [parts, B / parts, ...]; prefixes are repeated by reference."""

    def split_array(path, x):
        if _is_prefix(path):
            return jnp.broadcast_to(x, (parts, *x.shape))
        return x.reshape(parts, -1, *x.shape[1:])

    return jax.tree_util.tree_map_with_path(split_array, tree)


def lengths(whole: int, count: int) -> list[int]:
    """Up to `count` lengths, ascending: the whole, half of it, a quarter, ..."""
    return sorted({min(whole, -(-whole // (2**i * _MULTIPLE)) * _MULTIPLE) for i in range(count)})


def longest_first(tree: Any, need_B: jax.Array, mesh: Mesh | None) -> Any:
    """The examples in the order of what they need; those that need nothing are last, as parts without work must be."""
    ordered = some_rows(tree, jnp.argsort(-need_B, stable=True))
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x if _is_prefix(path) else constrain(mesh, x, "batch", *[None] * (x.ndim - 1)), ordered
    )


def which(need_B: jax.Array, choices: Sequence[int]) -> jax.Array:
    """Index of the shortest of ascending lengths that all rows fit in; beyond the longest nothing is needed."""
    return jnp.sum(need_B.max() > jnp.asarray(choices[:-1]))


def longest(batch: Batch) -> int:
    """Tokens of prompt and response, as padded, in the view that has most of them."""
    return max(view.prompt_BxP.shape[1] + mask_BxR.shape[1] for view, mask_BxR in _views(batch))


def needed(batch: Batch) -> jax.Array:
    """Tokens of prompt and response, [B], in the view that has most of them; 0 of rows without a response."""

    def of_view(view: View, mask_BxR: jax.Array) -> jax.Array:
        tokens_B = mask_BxR.sum(axis=1)
        return jnp.where(tokens_B > 0, view.prompt_length_B + tokens_B, 0)

    return jnp.stack([of_view(*view) for view in _views(batch)]).max(axis=0)


def _views(batch: Batch) -> list[tuple[View, jax.Array]]:
    """Each view with the mask [B, R] of its responses."""
    views = [(view, batch.response_mask_BxR) for view in (batch.no_context, batch.with_context)]
    if batch.retained is not None:
        views.append((batch.retained.view, batch.retained.response_mask_BxR))
    return views


def cut(batch: Batch, weights: Mapping[str, jax.Array], length: int) -> tuple[Batch, dict[str, jax.Array]]:
    """Without the ends of responses that no row of so many tokens can have; weights are [B, R] too."""

    def begin(responses):
        return responses.replace(
            response_BxR=responses.response_BxR[:, :length], response_mask_BxR=responses.response_mask_BxR[:, :length]
        )

    batch = begin(batch).replace(retained=None if batch.retained is None else begin(batch.retained))
    return batch, {name: weight_BxR[:, :length] for name, weight_BxR in weights.items()}
