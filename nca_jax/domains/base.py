"""What a domain has to say about itself: its examples, its context, and when an answer is right."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nca_jax.data.chat import Context, Message


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt and its right answer. `id` is unique within the domain, over all splits."""

    id: str
    prompt: str
    answer: str


class Score(NamedTuple):
    """Whether a response is right, and the answer read from it (None: it holds none)."""

    correct: bool
    answer: str | None


@dataclasses.dataclass(frozen=True)
class Probe:
    """Another context that evaluation tries on the same prompts, with its own idea of the right answer."""

    name: str
    context: Context
    score: Callable[[Example, str], Score]


class Domain(abc.ABC):
    """A task whose answers a context makes better. A new domain is a subclass in a file of its own."""

    context: Context
    is_multi_turn = False

    @abc.abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """The examples of "train" or "validation"; no example is in both."""

    @abc.abstractmethod
    def score(self, example: Example, response_text: str) -> Score:
        """Judges the text of a response, special tokens removed."""

    def messages(self, example: Example) -> list[Message]:
        """The prompt as chat messages, without the context."""
        return [{"role": "user", "content": example.prompt}]

    def with_context(self, messages: Sequence[Message]) -> list[Message]:
        """The same prompt with the context."""
        return self.context.apply(messages)

    def probes(self) -> Sequence[Probe]:
        """Other contexts for evaluation; none by default."""
        return ()
