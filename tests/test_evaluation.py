"""Views that fit in all, and what a run logs of an evaluation."""

import pytest
from conftest import byte_tokenizer

from nca_jax.data.chat import ChatFormat, Context
from nca_jax.domains import make_domain
from nca_jax.domains.base import Example, Probe
from nca_jax.domains.variants import find_probes
from nca_jax.errors import UserError
from nca_jax.evaluation import build_views, summarise
from nca_jax.items import ItemResult

PROBES = ("paraphrased", "other_task")


def item(view="no_context", correct=True, length=2, truncated=False, text="0", divergence=None) -> ItemResult:
    return ItemResult("item 0", view, "0", text, text, correct, length, truncated, divergence=divergence)


def test_summary_has_pair_metrics_and_the_accuracy_of_further_views():
    summary = summarise(
        {
            "no_context": [item(), item(correct=False)],
            "with_context": [item(length=3), item(length=3, truncated=True)],
            "paraphrased": [item(), item()],
            "other_task": [item(divergence=0.5), item(correct=False, divergence=1.0), item(divergence=None)][:2],
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
        "other_task": 0.5,
        "divergence_other_task": 0.75,
        "truncated_no_context": 0.0,
        "truncated_with_context": 0.5,
        "truncated_paraphrased": 0.0,
        "truncated_other_task": 0.0,
        "no_answer_no_context": 0.0,
        "no_answer_with_context": 0.0,
        "no_answer_paraphrased": 0.0,
        "no_answer_other_task": 0.0,
    }


def test_views_are_without_and_with_the_context_and_the_probes_over_items_that_fit_in_all():
    chat, domain = ChatFormat(byte_tokenizer()), make_domain("conventions")
    examples = domain.examples("validation")[:5]
    items, views = build_views(chat, domain, examples, find_probes(domain, PROBES), 4096, "error", length_multiple=9)
    assert items == examples
    assert list(views) == ["no_context", "with_context", "paraphrased", "other_task"]
    contexts = [None, domain.context, *(probe.context for probe in domain.probes())]
    for view, context in zip(views.values(), contexts, strict=True):
        assert view.prompt_ExP.shape[1] % 9 == 0
        for row, example in enumerate(items):
            own = view.prompt_ExP[row, : view.prompt_length_E[row]]
            messages = domain.messages(example)
            expected = chat.render(context.apply(messages) if context else messages)
            assert chat.decode([*view.prefix_C, *own]) == expected


def test_items_too_long_in_any_view_are_left_out_of_all():
    chat, domain = ChatFormat(byte_tokenizer()), make_domain("conventions")
    contexts = [domain.context, *(probe.context for probe in domain.probes())]
    overhead = max(len(chat.view_pair([{"role": "user", "content": "x"}], c).with_context) for c in contexts) - 1
    examples = [Example(word, word, f"{word}s") for word in ("ape", "squid", "monkey")]
    items, views = build_views(chat, domain, examples, find_probes(domain, PROBES), overhead + 5, "skip")
    assert items == examples[:2]
    assert {len(view.prompt_length_E) for view in views.values()} == {2}
    with pytest.raises(UserError, match="max_prompt_tokens"):
        build_views(chat, domain, examples, find_probes(domain, PROBES), overhead + 5, "error")


def test_an_empty_context_is_encoded_as_the_template_renders_it():
    chat, domain = ChatFormat(byte_tokenizer()), make_domain("conventions")
    examples = domain.examples("validation")[:3]
    nothing = Probe("empty", Context(messages=({"role": "system", "content": ""},)), domain.score)
    _, views = build_views(chat, domain, examples, [*find_probes(domain, ()), nothing], 4096, "error")
    texts = {}
    for name in ("no_context", "empty"):
        view = views[name]
        own = view.prompt_ExP[0, : view.prompt_length_E[0]]
        texts[name] = chat.decode([*view.prefix_C, *own])
    # The template adds a system message where there is none, and not where there is an empty one.
    assert texts["no_context"].startswith("<|im_start|>system\nYou are tiny.<|im_end|>")
    assert texts["empty"].startswith("<|im_start|>system\n<|im_end|>")
    assert texts["empty"].endswith(f"{examples[0].prompt}<|im_end|>\n<|im_start|>assistant\n")
