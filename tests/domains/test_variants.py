"""Contexts made of a context, by hand-made examples."""

import pytest

from nca_jax.data.chat import Context
from nca_jax.domains import make_domain
from nca_jax.domains.base import system_context
from nca_jax.domains.variants import find_probes, probes_by_name, variants
from nca_jax.errors import UserError


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def demonstrations(*letters: str) -> list[dict[str, str]]:
    return [m for letter in letters for m in (message("user", letter), message("assistant", letter.upper()))]


SYSTEM = message("system", "Shout. Always. Please.")
SHOWN = Context(messages=(SYSTEM, *demonstrations("a", "b", "c", "d", "e")))


def test_demonstrations_are_halved_and_shuffled_in_pairs():
    made = variants(SHOWN)
    assert made["shortened"] == Context(messages=(SYSTEM, *demonstrations("a", "b")))
    shuffled = made["shuffled"].messages
    assert shuffled[0] == SYSTEM
    pairs = list(zip(shuffled[1::2], shuffled[2::2], strict=True))
    assert all(answer["content"] == question["content"].upper() for question, answer in pairs)
    letters = [question["content"] for question, _ in pairs]
    assert sorted(letters) == list("abcde") and letters != list("abcde")
    assert variants(SHOWN) == made, "always the same"


@pytest.mark.parametrize(
    ("text", "half"),
    [
        ("One.\n\nTwo.\nThree.\n", "One."),
        ("First. Second! Third? Fourth.", "First. Second!"),
        ("- a\n- b\n- c\n- d", "- a\n- b"),
    ],
)
def test_texts_are_halved_by_lines_or_sentences(text, half):
    assert variants(system_context(text))["shortened"] == system_context(half)
    assert variants(Context(block=text))["shortened"] == Context(block=half)


def test_list_items_are_shuffled_and_what_is_around_them_stays():
    made = variants(system_context("Do this:\n1. one\n2. two\nand mind\n3. three\nGood."))["shuffled"]
    lines = made.messages[0]["content"].split("\n")
    assert [lines[i] for i in (0, 3, 5)] == ["Do this:", "and mind", "Good."]
    items = [lines[i] for i in (1, 2, 4)]
    assert sorted(items) == ["1. one", "2. two", "3. three"] and items != sorted(items)
    two = variants(system_context("- a\n- b"))["shuffled"]
    assert two == system_context("- b\n- a"), "two items have one other order"


def test_what_cannot_be_made_is_left_out():
    assert set(variants(system_context("One sentence."))) == {"irrelevant", "empty", "adversarial"}


def test_other_texts_stand_where_the_context_stood():
    assert variants(SHOWN)["empty"] == Context(messages=(message("system", ""),))
    assert variants(Context(block="Hint. Hint."))["empty"] == Context()
    for name in ("irrelevant", "adversarial"):
        (only,) = variants(SHOWN)[name].messages
        assert only["role"] == "system" and only["content"]
        assert variants(Context(block="Hint."))[name] == Context(block=only["content"])


@pytest.mark.parametrize(
    ("domain", "settings"),
    [
        ("conventions", {}),
        ("medmcqa", {"data_dir": "tiny"}),
        ("safety", {"data_dir": "tiny"}),
        ("frozenlake", {"max_turns": 5}),
        ("sokoban", {"max_turns": 5, "train_boards": 4, "validation_boards": 2, "test_boards": 2}),
    ],
)
def test_every_domain_has_all_kinds_of_contexts(domain, settings):
    domain = make_domain(domain, **settings)
    probes = probes_by_name(domain)
    assert set(probes) == {
        "paraphrased",
        "other_task",
        "shortened",
        "shuffled",
        "irrelevant",
        "empty",
        "adversarial",
    }
    contexts = [domain.context, *(probe.context for probe in probes.values())]
    assert all(a != b for i, a in enumerate(contexts) for b in contexts[:i])
    example = domain.examples("validation")[0]
    other = probes["other_task"]
    right = other.expected(example)
    written = {"conventions": right, "frozenlake": f"[{right}]", "sokoban": f"[ {right} ]"}
    name = getattr(domain, "name", "conventions" if right.isupper() else "tag")
    response = written.get(name, f"It is <answer>{right.upper()}.</answer>")
    assert other.score(example, response).correct
    assert not other.score(example, "<answer>B</answer>").correct
    assert not other.score(example, "[up]").correct
    assert not probes["paraphrased"].score(example, response).correct


def test_the_word_to_be_copied_is_the_first_of_question_or_text():
    question = make_domain("medmcqa", data_dir="tiny").examples("validation")[0]
    assert make_domain("medmcqa", data_dir="tiny").probes()[1].expected(question) == question.prompt.split()[0]
    text = make_domain("safety", data_dir="tiny").examples("validation")[0]
    assert f"Text: {make_domain('safety', data_dir='tiny').probes()[1].expected(text)} " in text.prompt


def test_probes_are_found_by_name_or_file_and_have_names_of_their_own(tmp_path):
    domain = make_domain("conventions")
    (tmp_path / "mine.txt").write_text("Say it.")
    probes = find_probes(domain, ["other_task", "shortened", f"{tmp_path}/mine.txt", "category"])
    assert [probe.name for probe in probes] == ["with_context", "other_task", "shortened", "mine", "category"]
    assert probes[0].context == domain.context and probes[3].context == system_context("Say it.")
    example = domain.examples("validation")[0]
    assert [probe.score(example, example.answer).correct for probe in probes] == [True, False, True, True, True]
    with pytest.raises(UserError, match="context 'nothing' is no"):
        find_probes(domain, ["nothing"])
    (tmp_path / "with_context.txt").write_text("Say it.")
    with pytest.raises(UserError, match="two views of evaluation are called with_context"):
        find_probes(domain, [f"{tmp_path}/with_context.txt"])
