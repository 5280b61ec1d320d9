"""What counts as an answer."""

import pytest

from nca_jax.domains.answers import after_thinking, last_tag, read_letter, read_yes_no

LETTERS = {
    "<answer>B</answer>": "B",
    "<answer>(b)</answer>": "B",
    "<answer>B. Aspirin</answer>": "B",
    "<answer>c) Aspirin,\nin a low dose</answer>": "C",
    "<answer> D: none of these </answer>": "D",
    "<answer>Aspirin</answer>": None,
    "<answer>A or B</answer>": None,
    "<answer>A good choice</answer>": None,
    "<answer>(B</answer>": None,
    "<answer>E</answer>": None,
    "<answer>AB</answer>": None,
    "<answer></answer>": None,
    "Because of this, B.": None,
    "": None,
    "<answer>B": None,
    "B</answer>": None,
    "<answer>A</answer> No: <answer>C</answer>": "C",
    "<answer>A</answer> No: <answer>none of them</answer>": None,
    "<answer>A</answer> and <answer>B": "A",
    "Inside <answer></answer> I put <answer>D</answer>.": "D",
    "<answer>maybe <answer>C</answer>": "C",
    "<think>It is <answer>A</answer>.</think>So <answer>B</answer>": "B",
    "<think>It is <answer>A</answer>.</think>So": None,
    "<think>It is <answer>A</answer>.": None,
    "It is <answer>A</answer>. <think>Or not": None,
    "thought before</think><answer>B</answer>": "B",
}
YES_NO = {
    "<answer>yes</answer>": "yes",
    "<answer> No. </answer>": "no",
    "<answer>YES!</answer>": "yes",
    "<answer>yes, it is</answer>": None,
    "<answer>nothing</answer>": None,
    "<answer>yes or no</answer>": None,
    "yes": None,
    "<answer>yes</answer><answer>no</answer>": "no",
    "<think><answer>yes</answer>": None,
}


@pytest.mark.parametrize(("response", "letter"), LETTERS.items(), ids=repr)
def test_letter(response, letter):
    assert read_letter(response) == letter


@pytest.mark.parametrize(("response", "answer"), YES_NO.items(), ids=repr)
def test_yes_or_no(response, answer):
    assert read_yes_no(response) == answer


def test_what_follows_thinking():
    assert after_thinking("plain") == "plain"
    assert after_thinking("<think>a</think> b <think>c</think> d") == " d"
    assert after_thinking("<think>a</think> b <think>c") is None
    assert last_tag("<answer>\n two\nlines </answer>") == "two\nlines"
