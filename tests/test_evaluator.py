"""Every item counts once in every view, whatever the batches."""

import jax
import numpy as np
import pytest

from nca_jax.data.chat import Context, pack_view
from nca_jax.domains.base import Example, Probe, Score
from nca_jax.evaluation import summarise
from nca_jax.evaluator import Evaluator, Part
from nca_jax.items import ItemResult
from nca_jax.rollout import Rollout, Sampling, example_keys
from nca_jax.view_divergence import ViewDivergence

EOS, R = 0, 4
# Seven items; the prompt of item i is its token, and the fake model answers with it, or in one view with another.
EXAMPLES = [Example(f"item {i}", str(i), f"{i}.", group="odd" if i % 2 else "even") for i in range(7)]
TOKENS = range(10, 17)
WRONG = 5


class FakeSampler:
    """Answers [last prompt token, EOS]; from the fifth item on, after prefix 2, a wrong token. Rubbish follows EOS."""

    def __init__(self):
        self.calls = []

    def __call__(self, params, prefix, prompt_BxP, prompt_length_B, active_B, key_B, sampling):
        self.calls.append((np.asarray(active_B), np.asarray(jax.random.key_data(key_B)), sampling))
        token_B = prompt_BxP[np.arange(len(prompt_BxP)), prompt_length_B - 1]
        token_B = np.where((prefix == 2) & (token_B >= TOKENS[4]), WRONG, token_B)
        response_BxR = np.stack([token_B, np.full_like(token_B, EOS), *[token_B] * (R - 2)], axis=1)
        mask_BxR = (np.arange(R) < 2) & active_B[:, None]
        return Rollout(response_BxR, mask_BxR, np.zeros(mask_BxR.shape), token_B == WRONG)


class FakeDomain:
    """An answer is right if it is the example's."""

    def score(self, example: Example, text: str) -> Score:
        return Score(text == example.answer, text)


# What was compared, in digits: prefixes of both views, and the position where the response is read.
DIVERGENCE = ViewDivergence(
    hidden=lambda params, view, prefix, response_BxR: prefix,
    compare=lambda params, x, c, mask_BxR: np.where(mask_BxR, 10.0 * x + c + np.arange(R) / 10, np.nan),
)


def evaluator(sample, batch_size: int, names=("no_context", "with_context"), samples=1, compared=()) -> Evaluator:
    """Views whose shared prefix is token 1, 2, …; the items have prompts of two lengths."""
    prompts = [[9] * (i % 2) + [token] for i, token in enumerate(TOKENS)]
    domain = FakeDomain()
    probes = {name: Probe(name, Context(), domain.score) for name in names} | {"no_context": None}
    return Evaluator(
        sample=sample,
        encode=lambda params, prefix_C: int(prefix_C[0]),
        divergence=DIVERGENCE,
        compared=compared,
        decode=lambda ids: "".join("." if i == EOS else str(i - TOKENS[0]) for i in ids),
        domain=domain,
        examples=EXAMPLES,
        views={n: pack_view([[v, *p] for p in prompts]) for v, n in enumerate(names, start=1)},
        probes={name: probes[name] for name in names},
        batch_size=batch_size,
        samples=samples,
        seed=3,
        sampling=Sampling(0.5, 0.9),
    )


@pytest.mark.parametrize("batch_size", [4, 1, 7, 9])
def test_accuracy_is_exact_over_seven_items_in_batches(batch_size):
    results = evaluator(FakeSampler(), batch_size)({})
    assert {name: [r.id for r in items] for name, items in results.items()} == {
        name: [example.id for example in EXAMPLES] for name in ("no_context", "with_context")
    }
    summary = summarise(results)
    assert summary["no_context"] == 1.0
    assert summary["with_context"] == 4 / 7
    assert (summary["harmed"], summary["right_without"]) == (3, 7)


def test_a_result_holds_the_masked_response():
    results = evaluator(FakeSampler(), 4)({})
    shared = {"sample": 0, "divergence": None}
    expected = ItemResult(
        "item 2", "no_context", "2", "2.", "2.", True, 2, False, **shared, expected="2.", group="even"
    )
    assert results["no_context"][2] == expected
    expected = ItemResult(
        "item 6", "with_context", "6", "-5.", "-5.", False, 2, True, **shared, expected="6.", group="even"
    )
    assert results["with_context"][6] == expected


def test_rows_past_the_last_item_are_inactive():
    sample = FakeSampler()
    evaluator(sample, 4)({})
    active = [call[0].tolist() for call in sample.calls]
    assert active == [[True] * 4] * 2 + [[True, True, True, False]] * 2


def test_every_view_and_every_call_has_the_same_keys_and_sampling():
    sample = FakeSampler()
    evaluate = evaluator(sample, 4)
    evaluate({}), evaluate({})
    # Both calls of: the first four items in both views, then the others.
    keys = np.stack([call[1] for call in sample.calls]).reshape(2, 2, 2, 4, -1)
    expected = jax.random.key_data(example_keys(3, 0, np.arange(8))).reshape(2, 1, 4, -1)
    np.testing.assert_array_equal(keys, np.broadcast_to(expected, keys.shape))
    assert {call[2] for call in sample.calls} == {Sampling(0.5, 0.9)}


def test_further_samples_have_keys_of_their_own():
    sample = FakeSampler()
    results = evaluator(sample, 7, samples=3)({})
    assert [(r.id, r.sample) for r in results["with_context"][6:9]] == [("item 6", 0), ("item 0", 1), ("item 1", 1)]
    keys = np.stack([call[1] for call in sample.calls])
    for number in range(3):
        expected = jax.random.key_data(example_keys(3, number, np.arange(7)))
        np.testing.assert_array_equal(keys[2 * number], expected)
        np.testing.assert_array_equal(keys[2 * number + 1], expected)
    assert len(np.unique(keys, axis=0)) == 3


def test_divergence_is_the_mean_over_the_tokens_of_the_response_without_a_context():
    views = ("no_context", "with_context", "other")
    results = evaluator(FakeSampler(), 4, views, compared=views[1:])({})
    assert {r.divergence for r in results["no_context"]} == {None}
    # Two tokens each: 12.0 and 12.1; 13.0 and 13.1.
    np.testing.assert_allclose([r.divergence for r in results["with_context"]], [12.05] * 7)
    np.testing.assert_allclose([r.divergence for r in results["other"]], [13.05] * 7)
    one = evaluator(FakeSampler(), 4, views, compared=["with_context"])({})
    assert one["with_context"] == results["with_context"]
    assert {r.divergence for r in one["other"]} == {None}


def test_some_views_only_and_parts_one_by_one_give_the_same():
    whole = evaluator(FakeSampler(), 4)({})
    assert evaluator(FakeSampler(), 4)({}, ["with_context"]) == {"with_context": whole["with_context"]}
    seen, evaluate = [], evaluator(FakeSampler(), 4)
    assert evaluate.parts == [Part(0, range(0, 4)), Part(0, range(4, 7))]
    last = dict(evaluate.part({}, evaluate.parts[1], before=seen.append))
    assert last == {name: items[4:] for name, items in whole.items()}
    assert seen == ["no_context", "with_context"]
