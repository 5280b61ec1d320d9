"""Contexts that a config names: the domain's own, or files."""

import json

import pytest

from nca_jax.data.chat import Context
from nca_jax.domains import make_domain
from nca_jax.domains.base import context_file, find_context, system_context
from nca_jax.errors import UserError

DOMAIN = make_domain("conventions")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_name_of_the_domain():
    assert find_context(DOMAIN, "plural") == DOMAIN.context
    assert find_context(DOMAIN, "category") != DOMAIN.context


def test_files(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(MESSAGES))
    (tmp_path / "b.txt").write_text("Be brief.\n")
    assert find_context(DOMAIN, str(tmp_path / "a.json")) == Context(messages=tuple(MESSAGES))
    assert find_context(DOMAIN, str(tmp_path / "b.txt")) == Context(messages=(MESSAGES[0],))


def test_what_a_context_file_holds_is_read_back(tmp_path):
    context = Context(messages=tuple(MESSAGES), block="Before the prompt.")
    for other in (context, DOMAIN.context, system_context(" Be brief. ")):
        (tmp_path / "c.json").write_text(json.dumps([dict(message) for message in context_file(other)]))
        assert find_context(DOMAIN, str(tmp_path / "c.json")) == other
    assert context_file(context)[-1] == {"role": "block", "content": "Before the prompt."}
    assert system_context(" Be brief. ").messages == (MESSAGES[0],)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("nobody", None, "none of plural, category, first_letter"),
        ("absent.txt", None, "none of plural"),
        ("code.py", "1", "is no .json or .txt file"),
        ("broken.json", "{", "not a JSON list of messages"),
        ("other.json", '[{"role": "user"}]', "not a JSON list of messages"),
        ("number.json", "7", "not a JSON list of messages"),
    ],
)
def test_what_is_no_context_is_refused(name, content, reason, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=reason):
        find_context(DOMAIN, str(tmp_path / name) if "." in name else name)
