"""Answer conventions that only the context tells: the prompt is a word, the answer is checked exactly.

Small enough for a 135M model and a laptop, and yet the real thing: without the context the model answers something
else, with it (a system line and a few demonstration turns) it answers as shown.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from nca_jax.data.chat import Context
from nca_jax.domains.base import Domain, Example, Probe, Score
from nca_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class _Convention:
    """How a convention answers, and two ways of telling it: the context, and a paraphrase with other words."""

    words: str  # which list: "nouns", with their plurals, or "things", animals and objects in equal number
    answer: Callable[[dict[str, str]], str]
    system: str
    paraphrase: str
    demonstrations: int
    prompt: str = "{word}"  # how a word is asked for where this convention is the task
    any_word: bool = False  # whether words of every list have an answer


_CONVENTIONS = {
    "plural": _Convention(
        "nouns",
        lambda row: row["plural"],
        system="Give the plural.",
        paraphrase="Write the word for more than one.",
        demonstrations=4,
    ),
    "category": _Convention(
        "things",
        lambda row: f"{row['word']} is an {row['kind']}",
        system="Answer animal or object.",
        paraphrase="Say whether it is an animal or an object.",
        demonstrations=6,
    ),
    "first_letter": _Convention(
        "nouns",
        lambda row: row["word"][0].upper(),
        system="Give the first letter of the word.",
        paraphrase="Which letter does it begin with?",
        demonstrations=6,
        any_word=True,
    ),
    # Changes an answer that there is already: the prompt alone makes the model name the word, once. Done on top of
    # itself it would be wrong.
    "twice": _Convention(
        "nouns",
        lambda row: f"{row['word']} {row['word']}",
        system="Say the word twice.",
        paraphrase="Say it, and say it again.",
        demonstrations=4,
        prompt="What is the word? The word is {word}",
        any_word=True,
    ),
    "capitals": _Convention(
        "nouns",
        lambda row: row["word"].upper(),
        system="Write the word in capitals.",
        paraphrase="Use only capital letters.",
        demonstrations=4,
        any_word=True,
    ),
}

# The first 16 words of a list are for demonstrations only, then 112 for training; the others (64 or more) are held out.
_DEMONSTRATIONS, _TRAINING = 16, 112


class Conventions(Domain):
    """One convention to be distilled, its paraphrase, and another convention that should still be followed.

    Args:
      convention: "plural", "category", "first_letter", "twice" or "capitals": what the context tells. Every context is
        shown with the prompts of this one.
      other_task: another one, tried at evaluation only and scored by its own answers.

    Raises:
      UserError: an unknown convention, the same one twice, or another one that the words have no answer for.
    """

    def __init__(self, convention: str = "plural", other_task: str = "first_letter"):
        for name in (convention, other_task):
            if name not in _CONVENTIONS:
                raise UserError(f"convention {name!r} is unknown; choose one of {', '.join(_CONVENTIONS)}.")
        self._rows = {row["word"]: row for row in _word_list(_CONVENTIONS[convention].words)}
        ours, other = _CONVENTIONS[convention], _CONVENTIONS[other_task]
        answerable = other.any_word or other.words == ours.words
        if convention == other_task or not answerable:
            raise UserError(f"{other_task!r} cannot be the other task of {convention!r}; use first_letter.")
        self._convention = convention
        self._other_task = other_task
        self.context = self._context(convention, paraphrased=False)

    def examples(self, split: str) -> Sequence[Example]:
        words = list(self._rows)
        parts = {
            "train": (_DEMONSTRATIONS, _DEMONSTRATIONS + _TRAINING),
            "validation": (_DEMONSTRATIONS + _TRAINING, len(words)),
        }
        if split not in parts:
            raise UserError(f"conventions has no {split} split; set config.evaluation.split=validation.")
        start, stop = parts[split]
        return [
            Example(word, self._prompt(word), self._answer(self._convention, word), self._rows[word].get("kind", ""))
            for word in words[start:stop]
        ]

    def score(self, example: Example, response_text: str) -> Score:
        return _exact(example.answer, response_text)

    def probes(self) -> Sequence[Probe]:
        def expected(example: Example) -> str:
            return self._answer(self._other_task, example.id)

        return (
            Probe("paraphrased", self._context(self._convention, paraphrased=True), self.score),
            Probe(
                "other_task",
                self._context(self._other_task, paraphrased=False),
                lambda example, response_text: _exact(expected(example), response_text),
                expected,
            ),
        )

    def named_contexts(self) -> Mapping[str, Context]:
        return {name: self._context(name, paraphrased=False) for name in _CONVENTIONS}

    def _answer(self, convention: str, word: str) -> str:
        return _CONVENTIONS[convention].answer(self._rows[word])

    def _prompt(self, word: str) -> str:
        return _CONVENTIONS[self._convention].prompt.format(word=word)

    def _context(self, name: str, paraphrased: bool) -> Context:
        """A system line and demonstration turns; the paraphrase has another line and other words."""
        shown = _CONVENTIONS[name]
        start = shown.demonstrations if paraphrased else 0
        turns = [{"role": "system", "content": shown.paraphrase if paraphrased else shown.system}]
        for row in _word_list(shown.words)[start : start + shown.demonstrations]:
            turns.append({"role": "user", "content": self._prompt(row["word"])})
            turns.append({"role": "assistant", "content": shown.answer(row)})
        return Context(messages=tuple(turns))


def _word_list(name: str) -> list[dict[str, str]]:
    return json.loads(resources.files("nca_jax.domains").joinpath(f"{name}.json").read_text(encoding="utf-8"))


def _exact(answer: str, response_text: str) -> Score:
    given = response_text.strip()
    return Score(given == answer, given or None)
