"""Messages to token ids, without and with the context, exactly as the model's chat template renders them.

A server will later send what the template renders for the prompt alone, so that is the no-context view, including what
the template adds by itself. Everything here is proved on the rendered tokens and not assumed of the template.
"""

import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nca_jax.errors import UserError

_log = logging.getLogger(__name__)

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}

# Stands for the prompt when the text around it is asked for; no template or context contains it.
_PROBE = "QXZJPROBE"


@dataclasses.dataclass(frozen=True)
class Context:
    """The privileged context: messages before the prompt, a block inside the last user message, or both.

    Attributes:
      messages: a system message, demonstration turns, or both, in order.
      block: text placed before the prompt in the user message, a blank line between.
    """

    messages: tuple[Message, ...] = ()
    block: str = ""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of the with-context view.

        Raises:
          UserError: both the context and the prompt bring a system message.
        """
        if any(m["role"] == "system" for m in self.messages) and any(m["role"] == "system" for m in messages):
            raise UserError("the prompt has a system message of its own, so the context cannot be one: use a block.")
        *before, last = messages
        if self.block:
            last = {**last, "content": f"{self.block}\n\n{last['content']}"}
        return [*self.messages, *before, last]

    def texts(self) -> list[str]:
        """What must be found, in this order, in the with-context view and nowhere else."""
        texts = [*(message["content"] for message in self.messages), self.block]
        return [text.strip() for text in texts if text.strip()]


@dataclasses.dataclass(frozen=True)
class ViewPair:
    """Token ids of one example's prompt, up to and including the generation prompt, in both views."""

    no_context: tuple[int, ...]
    with_context: tuple[int, ...]


class ChatFormat:
    """A tokenizer's chat template with everything that could vary between two renderings pinned.

    Args:
      tokenizer: a fast Hugging Face tokenizer with a chat template.
      default_system: "template" keeps what the template adds by itself where no system message is given; "none" removes
        it from every view.
      date: "26 Jul 2024"-like; what a template that prints today's date gets, in every view.
      template_kwargs: passed to the template, such as `enable_thinking`.

    Raises:
      UserError: the tokenizer has no template, the date is not one, or "none" is asked of a template whose additions
        cannot be told apart.

    Attributes:
      added_text: what the template adds before a prompt by itself.
      opened: "<think>" if the generation prompt leaves a thinking block open, so that the response begins inside it;
        else "". Responses are judged with it in front.
    """

    def __init__(
        self,
        tokenizer,
        *,
        default_system: str = "template",
        date: str = "26 Jul 2024",
        template_kwargs: Mapping[str, Any] | None = None,
    ):
        if not tokenizer.chat_template:
            raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no chat template; use an instruct model.")
        if default_system not in ("template", "none"):
            raise UserError(f"chat.default_system is {default_system!r}; it must be 'template' or 'none'.")
        try:
            datetime.datetime.strptime(date, "%d %b %Y")
        except ValueError as error:
            raise UserError(f"chat.date is {date!r} but must look like '26 Jul 2024'.") from error
        self._tokenizer = tokenizer
        # Templates ask for today's date by a variable, or by a function, which a macro of its name replaces.
        self._template_kwargs = {**(template_kwargs or {}), "date_string": date}
        self._chat_template = f"{{% macro strftime_now(format) %}}{date}{{% endmacro %}}{tokenizer.chat_template}"
        self._around: dict[Any, tuple[str, str]] = {}
        self._dividers = tuple(t.content for t in tokenizer.added_tokens_decoder.values() if t.special and not t.lstrip)
        self._heads: dict[str, tuple] = {}  # text -> what `_tokenize` says of it
        self._removed: list[tuple[str, str]] = []  # (leading text, what stands there instead)
        self.added_text = self._find_additions(remove=default_system == "none")
        tail = self.render([{"role": "user", "content": _PROBE}]).rpartition(_PROBE)[2]
        self.opened = "<think>" if tail.rfind("<think>") > tail.rfind("</think>") else ""

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a prompt, generation prompt included."""
        text = self._template(messages, add_generation_prompt=True)
        for leading, instead in self._removed:
            if text.startswith(leading):
                return instead + text.removeprefix(leading)
        return text

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the rendered text; the template has written all special tokens itself."""
        head, _ = self._text_around(messages, None)
        return self._tokenize(self.render(messages), len(head))[0]

    def view_pair(self, messages: Sequence[Message], context: Context) -> ViewPair:
        """Both views of a prompt.

        Raises:
          UserError: unless the context is in the with-context view and not in the other, and the tokens of the prompt
            and of what follows it are the same in both.
        """
        texts = context.texts()
        if not texts:
            raise UserError("the context is empty, so both views are the same; give it at least one message.")
        ids_x, prompt_x, tail_x, outside_x = self._proved_parts(messages, None)
        ids_c, prompt_c, tail_c, outside_c = self._proved_parts(messages, context)
        shown = repr(messages[-1]["content"][:60])
        if not _in_order(texts, outside_c):
            raise UserError(f"the context does not reach the with-context view of {shown}; does the template drop it?")
        if _in_order(texts, outside_x):
            raise UserError(f"the context is in the no-context view of {shown} too; the template adds it by itself.")
        if prompt_x != prompt_c:
            raise UserError(f"the prompt {shown} has other tokens after the context; end the context with a newline.")
        if tail_x != tail_c or not tail_x:
            raise UserError(f"what follows the prompt {shown} differs between the views; fix chat.template_kwargs.")
        return ViewPair(ids_x, ids_c)

    def log_pair(self, pair: ViewPair) -> None:
        """Shows one decoded pair, so that a person can see what each view says."""
        _log.info("no-context view: %r", self.decode(pair.no_context))
        _log.info("with-context view: %r", self.decode(pair.with_context))

    def _proved_parts(self, messages, context):
        """(all ids, ids that overlap the prompt's text, ids after it, decoded text around the prompt)."""
        full = context.apply(messages) if context else list(messages)
        text = self.render(full)
        head, tail = self._text_around(messages, context)
        if not (text.startswith(head) and text.endswith(tail)):
            raise UserError(f"the chat template breaks up the prompt {messages[-1]['content'][:60]!r}.")
        start, stop = len(head), len(text) - len(tail)
        ids, offsets, decoded = self._tokenize(text, start)
        if decoded != text:
            raise UserError(f"the tokenizer does not reproduce the text of {messages[-1]['content'][:60]!r}.")
        overlap = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
        if not overlap:
            raise UserError("a prompt is empty; every example needs a text.")
        first, end = overlap[0], overlap[-1] + 1
        # Tokens decode to their part of the text, all of which was compared above.
        outside = decoded[: offsets[first][0]] + decoded[offsets[end - 1][1] :]
        return ids, ids[first:end], ids[end:], outside

    def _text_around(self, messages, context) -> tuple[str, str]:
        """What the template writes before and after the last message's own text; the same for all plain prompts."""
        key = (context and (tuple(map(_frozen, context.messages)), context.block), tuple(map(_frozen, messages[:-1])))
        if key not in self._around:
            probe = [*messages[:-1], {**messages[-1], "content": _PROBE}]
            text = self.render(context.apply(probe) if context else probe)
            if text.count(_PROBE) != 1:
                raise UserError(f"the chat template shows a user message {text.count(_PROBE)} times, not once.")
            self._around[key] = tuple(text.split(_PROBE))
        return self._around[key]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included, nothing cleaned up."""
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _template(self, messages, add_generation_prompt: bool) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        except Exception as error:  # whatever the template's author raises
            raise UserError(f"the chat template of {self._tokenizer.name_or_path} refuses: {error}.") from error

    def _tokenize(self, text: str, constant: int = 0) -> tuple[tuple[int, ...], list[tuple[int, int]], str]:
        """Ids, their offsets in the text, and the text that the ids decode to.

        Args:
          text: rendered.
          constant: so many leading characters are shared with other texts. Special tokens divide a text before anything
            else does, so what precedes the last of them in there (a long context, say) is tokenised once.
        """
        cut = max((text.rfind(token, 0, constant) for token in self._dividers), default=-1)
        if cut <= 0:
            return self._tokenize_all(text)
        head, rest = text[:cut], self._tokenize_all(text[cut:])
        if head not in self._heads:
            self._heads[head] = self._tokenize_all(head)
            ids = self._heads[head][0] + rest[0]
            if ids != self._tokenize_all(text)[0]:  # a tokenizer that looks across its special tokens
                self._dividers = ()
                return self._tokenize(text)
        before = self._heads[head]
        shifted = [(a + cut, b + cut) for a, b in rest[1]]
        return before[0] + rest[0], before[1] + shifted, before[2] + rest[2]

    def _tokenize_all(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]], str]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = tuple(encoded["input_ids"])
        return ids, encoded["offset_mapping"], self.decode(ids)

    def _find_additions(self, remove: bool) -> str:
        """Detects what the template writes before a user message by itself, logs it, and removes it if told to.

        In [user, assistant, user] the text between the assistant's and the second user's words is an end of turn and
        the bare user header; what precedes that header at the start of a conversation is an addition.
        """
        user, assistant = {"role": "user", "content": _PROBE}, {"role": "assistant", "content": "ZAQ"}
        first = self._template([user], add_generation_prompt=False)
        before, _, end_of_turn = first.partition(_PROBE)
        dialogue = self._template([user, assistant, user], add_generation_prompt=False)
        header = dialogue.rpartition("ZAQ")[2].partition(_PROBE)[0].removeprefix(end_of_turn)
        bos = self._tokenizer.bos_token or ""
        bos = bos if before.startswith(bos) and not header.startswith(bos) else ""
        if not header or not before.endswith(header):
            if remove:
                raise UserError("what this chat template adds cannot be told apart; set chat.default_system=template.")
            _log.warning("the chat template's own additions, if any, could not be told apart: it starts %r", before)
            return ""
        added = before.removesuffix(header).removeprefix(bos)

        # Some templates also add to a system message that is given (Llama-3.1: a date before the text).
        system_header = header.replace("user", "system")
        added_to_system = ""
        try:
            with_system = self._template([{"role": "system", "content": "ZAQ"}, user], add_generation_prompt=False)
        except UserError:
            with_system = ""  # this template takes no system message, so it adds nothing to one
        before_system, found, _ = with_system.removeprefix(bos).partition("ZAQ")
        if found and before_system.startswith(system_header):
            added_to_system = before_system.removeprefix(system_header)
        if added or added_to_system:
            _log.info(
                "the chat template adds by itself, without a system message: %r; to a system message: %r (%s)",
                added,
                added_to_system,
                "removed from all views: chat.default_system=none" if remove else "kept in the views that render it",
            )
        if remove and added:
            self._removed.append((bos + added + header, bos + header))
        if remove and added_to_system:
            self._removed.append((bos + system_header + added_to_system, bos + system_header))
        return added


def _frozen(message: Message):
    return tuple(sorted(message.items()))


def _in_order(texts: Sequence[str], text: str) -> bool:
    """Whether all texts occur one after the other."""
    position = 0
    for wanted in texts:
        found = text.find(wanted, position)
        if found < 0:
            return False
        position = found + len(wanted)
    return True


@dataclasses.dataclass(frozen=True)
class PackedView:
    """Prompts of many examples: the tokens that lead all of them once, and the rest of each, right padded.

    `prompt_length_E` is at least 1: a prefix never swallows a whole prompt. E counts examples of the data set.
    """

    prefix_C: np.ndarray
    prompt_ExP: np.ndarray
    prompt_length_E: np.ndarray

    def rows(self, index: Sequence[int]) -> "PackedView":
        """The view of some of the examples."""
        return PackedView(self.prefix_C, self.prompt_ExP[index], self.prompt_length_E[index])


def pack_view(prompts: Sequence[Sequence[int]], length_multiple: int = 16, prefix_multiple: int = 1) -> PackedView:
    """Splits prompts into their longest common prefix and right-padded rests.

    P is the longest rest, rounded up to `length_multiple`: fewer different shapes, fewer compilations. C is rounded
    down to `prefix_multiple`, so that so many devices can divide the prefix; what is left leads every rest.
    """
    shortest, longest = min(prompts), max(prompts)
    # The common prefix of all is that of the lexicographically smallest and largest.
    common = next((i for i, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), len(shortest))
    common = min(common, min(map(len, prompts)) - 1) // prefix_multiple * prefix_multiple
    prompt_ExP, length_E = pad_prompts([prompt[common:] for prompt in prompts], length_multiple)
    return PackedView(np.array(prompts[0][:common], np.int32), prompt_ExP, length_E)


def pad_prompts(
    prompts: Sequence[Sequence[int]], length_multiple: int, at_least: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts right padded to [N, P], P a multiple of `length_multiple` and not below `at_least`; their lengths [N].

    Both are int32.
    """
    length_N = np.array([len(prompt) for prompt in prompts], np.int32)
    P = -(-max(int(length_N.max()), at_least) // length_multiple) * length_multiple
    prompt_NxP = np.zeros((len(prompts), P), np.int32)
    for row, prompt in zip(prompt_NxP, prompts, strict=True):
        row[: len(prompt)] = prompt
    return prompt_NxP, length_N
