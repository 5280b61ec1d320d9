"""Every item counts once in every view, whatever the batches."""

import json

import jax
import numpy as np
import pytest
from conftest import byte_tokenizer
from etils import epath

from nca_jax.data.chat import ChatFormat, pack_view
from nca_jax.domains import make_domain
from nca_jax.domains.base import Example, Score
from nca_jax.errors import UserError
from nca_jax.evaluate import EvaluationView, Evaluator, ItemResult, all_probes, build_views, summarise, write_items
from nca_jax.rollout import Rollout, Sampling, example_keys

EOS, R = 0, 4
# Seven items; the prompt of item i is its token, and the fake model answers with it, or in one view with another.
EXAMPLES = [Example(f"item {i}", str(i), f"{i}.") for i in range(7)]
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


def score(example: Example, text: str) -> Score:
    return Score(text == example.answer, text)


def evaluator(sample, batch_size: int, names=("no_context", "with_context")) -> Evaluator:
    """Views whose shared prefix is token 1, 2, …; the items have prompts of two lengths."""
    prompts = [[9] * (i % 2) + [token] for i, token in enumerate(TOKENS)]
    return Evaluator(
        sample=sample,
        encode=lambda params, prefix_C: int(prefix_C[0]),
        decode=lambda ids: "".join("." if i == EOS else str(i - TOKENS[0]) for i in ids),
        examples=EXAMPLES,
        views=[EvaluationView(n, pack_view([[v, *p] for p in prompts]), score) for v, n in enumerate(names, start=1)],
        batch_size=batch_size,
        seed=3,
        sampling=Sampling(0.5, 0.9),
    )


def item(view="no_context", correct=True, length=2, truncated=False, text="0") -> ItemResult:
    return ItemResult("item 0", view, "0", text, text, correct, length, truncated)


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
    assert results["no_context"][2] == ItemResult("item 2", "no_context", "2", "2.", "2.", True, 2, False)
    assert results["with_context"][6] == ItemResult("item 6", "with_context", "6", "-5.", "-5.", False, 2, True)


def test_rows_past_the_last_item_are_inactive():
    sample = FakeSampler()
    evaluator(sample, 4)({})
    active = [call[0].tolist() for call in sample.calls]
    assert active == [[True] * 4, [True, True, True, False]] * 2


def test_every_view_and_every_call_has_the_same_keys_and_sampling():
    sample = FakeSampler()
    evaluate = evaluator(sample, 4)
    evaluate({}), evaluate({})
    keys = np.stack([call[1] for call in sample.calls]).reshape(4, 8, -1)
    expected = jax.random.key_data(example_keys(3, 0, np.arange(8)))
    np.testing.assert_array_equal(keys, np.broadcast_to(expected, keys.shape))
    assert {call[2] for call in sample.calls} == {Sampling(0.5, 0.9)}


def test_summary_has_pair_metrics_and_the_accuracy_of_further_views():
    summary = summarise(
        {
            "no_context": [item(), item(correct=False)],
            "with_context": [item(length=3), item(length=3, truncated=True)],
            "paraphrased": [item(), item()],
            "irrelevant": [item(), item(correct=False)],
        }
    )
    assert summary == {
        "no_context": 0.5,
        "with_context": 1.0,
        "both": 0.5,
        "harm": 0.0,
        "help": 1.0,
        "harmed": 0,
        "right_without": 1,
        "length_change": 0.5,
        "paraphrased": 1.0,
        "irrelevant": 0.5,
        "truncated_no_context": 0.0,
        "truncated_with_context": 0.5,
        "truncated_paraphrased": 0.0,
        "truncated_irrelevant": 0.0,
        "no_answer_no_context": 0.0,
        "no_answer_with_context": 0.0,
        "no_answer_paraphrased": 0.0,
        "no_answer_irrelevant": 0.0,
    }


def test_one_line_an_item_and_view_and_nothing_else_is_left(tmp_path):
    path = epath.Path(tmp_path) / "evaluations" / "step.jsonl"
    results = {"no_context": [item(), item(text="né\u2028\n")], "with_context": [item(view="with_context")]}
    write_items(path, results)
    assert [other.name for other in path.parent.iterdir()] == ["step.jsonl"]
    lines = path.read_text().rstrip("\n").split("\n")
    assert [(json.loads(line)["view"], json.loads(line)["response"]) for line in lines] == [
        ("no_context", "0"),
        ("no_context", "né\u2028\n"),
        ("with_context", "0"),
    ]


def test_views_are_without_and_with_the_context_and_the_probes_over_items_that_fit_in_all():
    chat, domain = ChatFormat(byte_tokenizer()), make_domain("conventions")
    examples = domain.examples("validation")[:5]
    items, views = build_views(chat, domain, examples, all_probes(domain), 4096, "error")
    assert items == examples
    assert [view.name for view in views] == ["no_context", "with_context", "paraphrased", "irrelevant"]
    contexts = [None, domain.context, *(probe.context for probe in domain.probes())]
    for view, context in zip(views, contexts, strict=True):
        for row, example in enumerate(items):
            own = view.view.prompt_ExP[row, : view.view.prompt_length_E[row]]
            messages = domain.messages(example)
            expected = chat.render(context.apply(messages) if context else messages)
            assert chat.decode([*view.view.prefix_C, *own]) == expected
    assert [view.score(examples[0], examples[0].answer).correct for view in views] == [True, True, True, False]


def test_items_too_long_in_any_view_are_left_out_of_all():
    chat, domain = ChatFormat(byte_tokenizer()), make_domain("conventions")
    contexts = [domain.context, *(probe.context for probe in domain.probes())]
    overhead = max(len(chat.view_pair([{"role": "user", "content": "x"}], c).with_context) for c in contexts) - 1
    examples = [Example(word, word, f"{word}s") for word in ("ape", "squid", "monkey")]
    items, views = build_views(chat, domain, examples, all_probes(domain), overhead + 5, "skip")
    assert items == examples[:2]
    assert {len(view.view.prompt_length_E) for view in views} == {2}
    with pytest.raises(UserError, match="max_prompt_tokens"):
        build_views(chat, domain, examples, all_probes(domain), overhead + 5, "error")
