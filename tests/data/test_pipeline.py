"""Which examples are used, and in which order."""

import itertools
import json
import logging

import pytest
from conftest import byte_tokenizer

from nca_jax.data.chat import ChatFormat, ViewPair
from nca_jax.data.pipeline import encode_pairs, fitting, training_indices
from nca_jax.domains import make_domain
from nca_jax.domains.base import Example
from nca_jax.errors import UserError

EXAMPLES = [Example(name, name, name) for name in ("one", "two", "three")]


def pairs(*lengths: tuple[int, int]) -> list[ViewPair]:
    """Views of so many tokens, without and with the context."""
    return [ViewPair((1,) * x, (1,) * c) for x, c in lengths]


def take(iterator, batches: int) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(iterator, batches)]


def test_prompts_of_exactly_the_limit_fit():
    assert fitting(EXAMPLES, [pairs((1, 4), (4, 2), (3, 3))], 4, "error") == [0, 1, 2]


def test_too_long_is_an_error_that_names_the_longest():
    with pytest.raises(UserError, match=r"2 of 3 .*max_prompt_tokens=4 .*'three', 9"):
        fitting(EXAMPLES, [pairs((1, 4), (5, 2), (3, 9))], 4, "error")


def test_too_long_can_be_skipped_counted_and_logged(caplog):
    with caplog.at_level(logging.WARNING):
        assert fitting(EXAMPLES, [pairs((1, 4), (5, 2), (3, 3))], 4, "skip") == [0, 2]
    assert "1 of 3 prompts exceed data.max_prompt_tokens=4 and are skipped" in caplog.text


def test_an_example_is_skipped_if_any_context_makes_it_too_long():
    assert fitting(EXAMPLES, [pairs((1, 1), (1, 1), (1, 1)), pairs((1, 1), (1, 9), (1, 1))], 4, "skip") == [0, 2]


def test_skipping_all_examples_is_an_error():
    with pytest.raises(UserError, match="3 of 3"):
        fitting(EXAMPLES, [pairs((5, 5), (5, 5), (5, 5))], 4, "skip")


def test_nothing_is_cut():
    chat, domain = ChatFormat(byte_tokenizer()), make_domain("conventions")
    encoded = encode_pairs(chat, [domain.messages(e) for e in EXAMPLES], domain.context)
    kept = fitting(EXAMPLES, [encoded], len(encoded[0].with_context), "skip")
    assert [EXAMPLES[i].prompt for i in kept] == ["one", "two"]
    for example, pair in zip(EXAMPLES, encoded, strict=True):
        assert chat.decode(pair.no_context) == chat.render(domain.messages(example))
        assert chat.decode(pair.with_context) == chat.render(domain.with_context(domain.messages(example)))


@pytest.mark.parametrize("batch_size", [4, 1])
def test_every_example_comes_once_an_epoch_in_full_batches(batch_size):
    epochs = 3  # 10 examples: epochs of batches of 4 end inside a batch
    batches = take(training_indices(10, batch_size, seed=0), epochs * 10 // batch_size + 1)
    assert {len(batch) for batch in batches} == {batch_size}
    flat = list(itertools.chain(*batches))
    orders = [flat[i * 10 : i * 10 + 10] for i in range(epochs)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == epochs, "each epoch has an order of its own"
    assert list(range(10)) not in orders


def test_same_seed_same_order():
    first, again, other = (take(training_indices(10, 4, seed), 6) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize("read", [0, 1, 2, 7])
def test_a_saved_position_continues_as_the_straight_run_does(read):
    straight = training_indices(10, 4, seed=3)
    take(straight, read)
    position = json.loads(json.dumps(straight.get_state()))
    restored = training_indices(10, 4, seed=3)
    take(restored, 5)  # wherever it stood before
    restored.set_state(position)
    assert take(restored, 8) == take(straight, 8)
