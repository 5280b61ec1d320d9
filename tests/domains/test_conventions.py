"""The word lists and their exact answers."""

import re

import pytest

from nca_jax.domains import make_domain
from nca_jax.domains.base import Example
from nca_jax.domains.conventions import Conventions
from nca_jax.errors import UserError

# convention, other task: all pairs that work.
PAIRS = [
    ("plural", "first_letter"),
    ("category", "first_letter"),
    ("first_letter", "plural"),
    ("twice", "first_letter"),
    ("capitals", "twice"),
]
PROMPTS = {"twice": "What is the word? The word is {}"}  # of the others: the bare word
# Nouns whose plural is not the word and an s; the list may hold fewer of them.
IRREGULAR = (
    "baby babies, battery batteries, berry berries, box boxes, branch branches, brush brushes, bus buses, bush bushes, "
    "butterfly butterflies, calf calves, cherry cherries, child children, church churches, city cities, "
    "cockroach cockroaches, company companies, country countries, deer deer, dish dishes, dress dresses, duty duties, "
    "foot feet, fox foxes, galaxy galaxies, glass glasses, goose geese, half halves, hero heroes, knife knives, "
    "lady ladies, leaf leaves, library libraries, life lives, loaf loaves, man men, moose moose, mouse mice, "
    "party parties, potato potatoes, puppy puppies, sandwich sandwiches, sheep sheep, shelf shelves, story stories, "
    "theory theories, thief thieves, tomato tomatoes, tooth teeth, virus viruses, wife wives, wolf wolves, woman women"
)


def splits(domain: Conventions) -> tuple[list[Example], list[Example]]:
    return list(domain.examples("train")), list(domain.examples("validation"))


def all_examples(domain: Conventions) -> list[Example]:
    train, validation = splits(domain)
    return train + validation


def turns(context) -> list[tuple[str, str]]:
    """(word, answer) of each demonstration; the word is the last of its prompt."""
    _, *rest = context.messages
    shown = zip(rest[::2], rest[1::2], strict=True)
    return [(user["content"].split(" ")[-1], assistant["content"]) for user, assistant in shown]


@pytest.fixture(params=PAIRS, ids="/".join)
def domain(request) -> Conventions:
    return Conventions(*request.param)


def test_lists_are_large_enough_and_do_not_overlap(domain):
    train, validation = splits(domain)
    assert len(train) >= 96 and len(validation) >= 64
    ids = [example.id for example in train + validation]
    assert len(ids) == len(set(ids))
    words = [example.id for example in train + validation]
    assert all(word == word.strip() and " " not in word for word in words)


def test_no_demonstration_shows_a_word_or_an_answer_that_is_trained_or_held_out(domain):
    train, validation = splits(domain)
    words = {example.id for example in train + validation}
    plurals = {example.answer for example in all_examples(Conventions("plural"))}
    for context in (domain.context, *(probe.context for probe in domain.probes())):
        shown = re.findall(r"\w+", " ".join(f"{word} {answer}" for word, answer in turns(context)))
        assert not words & set(shown)
        assert not plurals & set(shown)


def test_instructions_name_no_word_that_is_trained_or_held_out(domain):
    words = {example.id for example in all_examples(domain)}
    for context in (domain.context, *(probe.context for probe in domain.probes())):
        assert not words & set(re.findall(r"\w+", context.messages[0]["content"].lower()))


def test_contexts_are_a_system_message_and_four_to_six_turns(domain):
    for context in (domain.context, *(probe.context for probe in domain.probes())):
        demonstrations = (len(context.messages) - 1) // 2
        assert 4 <= demonstrations <= 6
        assert [m["role"] for m in context.messages] == ["system", *["user", "assistant"] * demonstrations]


def test_paraphrase_says_the_same_in_other_words(domain):
    paraphrase = domain.probes()[0]
    assert paraphrase.name == "paraphrased"
    assert paraphrase.context.messages[0] != domain.context.messages[0]
    assert not set(dict(turns(paraphrase.context))) & set(dict(turns(domain.context)))


def test_nothing_of_the_context_is_in_the_prompt(domain):
    example = domain.examples("train")[0]
    assert domain.messages(example) == [{"role": "user", "content": example.prompt}]
    assert domain.with_context(domain.messages(example)) == [*domain.context.messages, *domain.messages(example)]


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_every_context_is_shown_with_the_prompts_of_the_task(pair):
    domain, form = Conventions(*pair), PROMPTS.get(pair[0], "{}")
    assert all(example.prompt == form.format(example.id) for example in all_examples(domain))
    contexts = [domain.context, *(probe.context for probe in domain.probes()), *domain.named_contexts().values()]
    for context in contexts:
        asked = [message["content"] for message in context.messages if message["role"] == "user"]
        assert asked == [form.format(word) for word, _ in turns(context)]
    assert set(domain.named_contexts()) == {"plural", "category", "first_letter", "twice", "capitals"}


def test_twice_and_capitals():
    twice = {example.id: example.answer for example in all_examples(Conventions("twice"))}
    capitals = {example.id: example.answer for example in all_examples(Conventions("capitals"))}
    assert twice["tooth"] == "tooth tooth" and capitals["tooth"] == "TOOTH"
    assert all(answer == f"{word} {word}" for word, answer in twice.items())
    # Once, or done to its own answer, is wrong.
    domain = Conventions("twice")
    for response, right in (("tooth", False), ("tooth tooth", True), ("tooth tooth tooth tooth", False)):
        assert domain.score(Example("tooth", "", "tooth tooth"), response).correct == right


def test_plurals_are_the_word_and_an_s_or_in_the_table_of_the_others():
    domain = Conventions("plural")
    plurals = {example.prompt: example.answer for example in all_examples(domain)}
    plurals |= dict(turns(domain.context) + turns(domain.probes()[0].context))
    irregular = dict(pair.split() for pair in IRREGULAR.split(", "))
    assert plurals == {word: irregular.get(word, f"{word}s") for word in plurals}
    assert len(irregular.keys() & plurals) >= 20


def test_categories_are_balanced_in_each_split():
    for split in splits(Conventions("category")):
        animals = [example for example in split if example.answer == f"{example.prompt} is an animal"]
        objects = [example for example in split if example.answer == f"{example.prompt} is an object"]
        assert len(animals) == len(objects) == len(split) / 2


def test_first_letters_are_capitals():
    for example in all_examples(Conventions("first_letter", "plural")):
        assert example.answer == example.id[0].upper()


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("teeth", (True, "teeth")),
        (" teeth\n", (True, "teeth")),
        ("Teeth", (False, "Teeth")),
        ("teeth.", (False, "teeth.")),
        ("the teeth", (False, "the teeth")),
        ("teeth teeth", (False, "teeth teeth")),
        ("tooth", (False, "tooth")),
        (" \n", (False, None)),
        ("", (False, None)),
    ],
)
def test_scoring_is_exact_but_for_blanks_around(response, score):
    assert Conventions("plural").score(Example("tooth", "tooth", "teeth"), response) == score


def test_probes_score_by_their_own_convention():
    domain = Conventions("plural", "first_letter")
    paraphrased, other_task = domain.probes()
    for example in domain.examples("validation"):
        letter = example.prompt[0].upper()
        assert [paraphrased.score(example, text).correct for text in (example.answer, letter)] == [True, False]
        assert [other_task.score(example, text).correct for text in (example.answer, letter)] == [False, True]
    assert turns(other_task.context) == turns(Conventions("first_letter", "plural").context)


@pytest.mark.parametrize("names", [("plural", "rhyme"), ("rhyme", "plural")], ids="/".join)
def test_unknown_conventions_are_refused(names):
    with pytest.raises(
        UserError, match="'rhyme' is unknown; choose one of plural, category, first_letter, twice, capitals"
    ):
        Conventions(*names)


@pytest.mark.parametrize("names", [("plural", "plural"), ("plural", "category"), ("category", "plural")], ids="/".join)
def test_another_task_that_is_the_same_or_has_no_answers_is_refused(names):
    with pytest.raises(UserError, match="cannot be the other task"):
        Conventions(*names)


def test_domains_are_made_by_name():
    domain = make_domain("conventions", convention="category")
    assert domain.context == Conventions("category").context
    with pytest.raises(UserError, match=r"domain\.name is 'conventionz'"):
        make_domain("conventionz")
    with pytest.raises(UserError, match="'colour'"):
        make_domain("conventions", colour="red")
