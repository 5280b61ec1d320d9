"""What a domain has to say about itself: its examples, its context, and when an answer is right."""

import abc
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from etils import epath

from nca_jax.data.chat import Context, Message
from nca_jax.domains.answers import last_tag
from nca_jax.errors import UserError
from nca_jax.items import OTHER_TASK


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt and its right answer. `id` is unique within the domain, over all splits; `group` is what the example
    is counted under where results are broken down, such as its subject."""

    id: str
    prompt: str
    answer: str
    group: str = ""


class Score(NamedTuple):
    """Whether a response is right, and the answer read from it (None: it holds none)."""

    correct: bool
    answer: str | None


@dataclasses.dataclass(frozen=True)
class Probe:
    """Another context that evaluation tries on the same prompts.

    Attributes:
      name: of the view.
      context: what leads the prompts.
      score: this context's idea of a right answer.
      expected: the right answer, to be shown; None: the example's own.
      plays: in a game: False asks for one response, to the prompt of the first turn, and scores that.
    """

    name: str
    context: Context
    score: Callable[[Example, str], Score]
    expected: Callable[[Example], str] | None = None
    plays: bool = True


class Domain(abc.ABC):
    """A task whose answers a context makes better. A new domain is a subclass in a file of its own."""

    context: Context
    is_multi_turn = False  # True: a game, see `domains.games.BoardGame`

    @abc.abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """The examples of "train", "validation" or "test"; no example is in two of them.

        Raises:
          UserError: the domain has no such split.
        """

    @abc.abstractmethod
    def score(self, example: Example, response_text: str) -> Score:
        """Judges the text of a response, special tokens removed."""

    def messages(self, example: Example) -> list[Message]:
        """The prompt as chat messages, without the context."""
        return [{"role": "user", "content": example.prompt}]

    def with_context(self, messages: Sequence[Message]) -> list[Message]:
        """The same prompt with the context."""
        return self.context.apply(messages)

    def named_contexts(self) -> Mapping[str, Context]:
        """Contexts that a config can name, for retention; none by default."""
        return {}

    def probes(self) -> Sequence[Probe]:
        """Contexts of the domain's own for evaluation: the training context told in other words ("paraphrased"), and
        that of another task, scored by its own answers ("other_task"); none by default."""
        return ()


def system_context(text: str) -> Context:
    """A context that is one system message."""
    return Context(messages=({"role": "system", "content": text.strip()},))


def copying_probe(instruction: str, word: Callable[[Example], str]) -> Probe:
    """The context of another task for prompts that are answered inside a tag: a word of the prompt is copied into it.

    Args:
      instruction: a system message that asks for it.
      word: which word is right.
    """

    def score(example: Example, response_text: str) -> Score:
        given = last_tag(response_text)
        return Score(given is not None and _bare(given) == _bare(word(example)), given)

    return Probe(OTHER_TASK, system_context(instruction), score, word)


def _bare(word: str) -> str:
    return re.sub(r"[\W_]+", "", word).casefold()


def find_context(domain: Domain, name: str) -> Context:
    """A context by the name the domain gives it, or from a file.

    Args:
      domain: whose names are looked at first.
      name: or the path of a .json file, a list of chat messages (a last one of role "block" is text that goes before
        the prompt in its own message), or of a .txt file, the text of a system message.

    Raises:
      UserError: there is no such context, or the file is not what its ending says.
    """
    known = domain.named_contexts()
    if name in known:
        return known[name]
    path = epath.Path(name)
    if path.suffix not in (".json", ".txt") or not path.exists():
        raise UserError(f"context {name!r} is no .json or .txt file, and none of {', '.join(known) or 'no names'}.")
    if path.suffix == ".txt":
        return system_context(path.read_text())
    try:
        messages = [{"role": m["role"], "content": m["content"]} for m in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a JSON list of messages with role and content.") from error
    block = messages.pop()["content"] if messages and messages[-1]["role"] == "block" else ""
    return Context(messages=tuple(messages), block=block)


def context_file(context: Context) -> list[Message]:
    """What a .json file of this context holds; `find_context` reads it."""
    return [*context.messages, *([{"role": "block", "content": context.block}] if context.block else [])]
