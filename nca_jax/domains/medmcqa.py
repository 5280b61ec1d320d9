"""MedMCQA: medical questions with four choices, one of them right (Pal et al. 2022). The context is a system prompt."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from nca_jax.data import builders
from nca_jax.data.chat import Context
from nca_jax.domains.answers import read_letter
from nca_jax.domains.base import Domain, Example, Probe, Score, copying_probe, system_context
from nca_jax.errors import UserError

_log = logging.getLogger(__name__)

_SYSTEM = """\
You are an experienced clinician who helps candidates prepare for medical entrance examinations.

How to work on a question:
1. Name the topic and what is really being asked. Watch for words that turn the question round: not, except, least, \
false, all but.
2. Recall the facts that decide it: mechanism, anatomy, first-line treatment, diagnostic test of choice, most common \
cause. Prefer what standard textbooks and guidelines teach over rare exceptions.
3. Go through the four choices one by one and say in a few words why each fits or does not. Two choices that say the \
same cannot both be right. With numbers, check the unit and the population.
4. Where two choices remain, take the one that is more specific to the case as it is described, and do not change it \
without a reason.

Keep the reasoning short. End with the letter of exactly one choice inside <answer></answer>, even if you are not \
certain."""

# The same advice in other words and another order.
_PARAPHRASED = """\
Think like a senior doctor who sets and marks the entrance paper.

- Read the stem twice; if it asks for the exception, the false statement or the least likely choice, keep that in mind.
- Say to yourself which field the item is from and which fact it hangs on: how it works, where it lies, what is tried \
first, which test settles it, what is seen most often. Go by the textbook rather than by the odd case.
- Test each of A, B, C and D against that fact. Choices that mean the same are both wrong; check units, ages and doses.
- If two survive, the one that fits this patient more closely wins, and the first decision stands.

Be brief, and always commit to one choice: its letter goes inside <answer></answer> at the end."""

_COPY = """\
You keep the index of a question bank. Do not answer the questions. Write the first word of the question, as it stands \
there, inside <answer></answer>, and nothing else."""

_QUESTION = """\
{question}

A. {opa}
B. {opb}
C. {opc}
D. {opd}

Which choice is right? Give its letter inside <answer></answer>."""

# Another context, for retention: how to answer, and nothing about what.
_BRIEF = system_context("Answer with the tag and nothing else.")


class Medmcqa(Domain):
    """Prepared MedMCQA questions.

    The published test split has no answers. Where that is so, the published validation split is cut into two halves by
    position, every other question, so that what is chosen on "validation" can be reported on "test".

    Args:
      data_dir: where `nca_jax.data.prepare` has written them, or "tiny": the made-up questions that ship.

    Raises:
      UserError: nothing is prepared there.
    """

    def __init__(self, data_dir: str | None = None):
        if data_dir is None:
            raise UserError(
                "config.domain.settings.data_dir is not set; prepare your copy of MedMCQA with python -m "
                "nca_jax.data.prepare --domain=medmcqa, and give its --data_dir."
            )
        self._data_dir = data_dir
        self._has = builders.splits("medmcqa", data_dir)
        self.context = system_context(_SYSTEM)

    def examples(self, split: str) -> Sequence[Example]:
        if split in ("validation", "test") and not self._test_is_answered:
            _log.info("medmcqa: the test split has no answers; %r is every other question of validation", split)
            rows = self._rows("validation")[split == "test" :: 2]
        else:
            rows = self._rows(split)
        return [_example(row) for row in rows if row["cop"] >= 0]

    def score(self, example: Example, response_text: str) -> Score:
        letter = read_letter(response_text)
        return Score(letter == example.answer, letter)

    def probes(self) -> Sequence[Probe]:
        return (
            Probe("paraphrased", system_context(_PARAPHRASED), self.score),
            copying_probe(_COPY, lambda example: example.prompt.split()[0]),
        )

    def named_contexts(self) -> Mapping[str, Context]:
        return {"brief": _BRIEF}

    @cached_property
    def _test_is_answered(self) -> bool:
        return "test" in self._has and any(row["cop"] >= 0 for row in self._rows("test"))

    def _rows(self, split: str) -> list[dict[str, Any]]:
        return builders.load("medmcqa", self._data_dir, split)


def _example(row: dict[str, Any]) -> Example:
    choices = {key: row[key].strip() for key in ("opa", "opb", "opc", "opd")}
    prompt = _QUESTION.format(question=row["question"].strip(), **choices)
    return Example(id=row["id"], prompt=prompt, answer="ABCD"[row["cop"]], group=row["subject_name"])
