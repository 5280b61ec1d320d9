"""From a domain's examples to packed views, and the grain iterator over them whose position is saved."""

import logging
from collections.abc import Sequence

import grain.python as grain
import numpy as np

from nca_jax.data.chat import ChatFormat, Context, Message, ViewPair
from nca_jax.domains.base import Example
from nca_jax.errors import UserError
from nca_jax.processes import shared_out

_log = logging.getLogger(__name__)


def encode_pairs(chat: ChatFormat, prompts: Sequence[Sequence[Message]], context: Context) -> list[ViewPair]:
    """Both views of every prompt, each proved to differ in the context only; every process of a job makes its share."""

    def both(messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        pair = chat.view_pair(messages, context)
        return pair.no_context, pair.with_context

    return [ViewPair(*pair) for pair in shared_out(both, prompts)]


def fitting(
    examples: Sequence[Example], views: Sequence[Sequence[ViewPair]], max_prompt_tokens: int, too_long: str
) -> list[int]:
    """Indices of the examples whose prompt fits in every view; nothing is ever cut.

    Args:
      views: for each context, one pair per example.
      max_prompt_tokens: of a whole prompt, context included.
      too_long: "error", or "skip": leave the example out and log how many.

    Raises:
      UserError: an example is too long and that is an error, or all of them are.
    """
    length = [max(max(len(p.no_context), len(p.with_context)) for p in pairs) for pairs in zip(*views, strict=True)]
    kept = [i for i, n in enumerate(length) if n <= max_prompt_tokens]
    if len(kept) < len(length):
        worst = max(range(len(length)), key=length.__getitem__)
        what = f"{len(length) - len(kept)} of {len(length)} prompts exceed data.max_prompt_tokens={max_prompt_tokens}"
        if too_long == "error" or not kept:
            raise UserError(f"{what} (longest: {examples[worst].id!r}, {length[worst]}); raise it or shorten them.")
        _log.warning("%s and are skipped (data.too_long=skip)", what)
    return kept


def some_of(examples: Sequence[Example], count: int | None, seed: int) -> Sequence[Example]:
    """At most `count` of the examples, drawn by the seed, in their order; None: all of them."""
    if count is None or count >= len(examples):
        return examples
    chosen = np.random.default_rng(seed).permutation(len(examples))[:count]
    return [examples[i] for i in sorted(chosen)]


def training_indices(num_examples: int, batch_size: int, seed: int) -> grain.DatasetIterator:
    """An endless iterator over batches of example indices, int [batch_size], shuffled anew every epoch.

    Its `get_state()` and `set_state()` are what a checkpoint keeps. Epochs run into each other, so that every batch is
    full and no example is left out.
    """
    dataset = grain.MapDataset.source(np.arange(num_examples)).seed(seed).shuffle().repeat()
    # An endless data set has no remainder; said so, batches of 1 are possible too.
    dataset = dataset.batch(batch_size, drop_remainder=True)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
