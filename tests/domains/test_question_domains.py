"""MedMCQA and Safety as domains: prompts, splits, scores, contexts."""

import json

import pytest
from conftest import SHARED

from configs import medmcqa
from nca_jax.data import builders
from nca_jax.data import prepare as prepare_command
from nca_jax.domains import domain_of, make_domain
from nca_jax.domains.base import find_context
from nca_jax.errors import UserError

ROW = {"id": "q1", "question": " Which? ", "opa": "one", "opb": "two", "opc": "three", "opd": "four", "cop": 3}
SPLITS = ("train", "validation", "test")


def prepared(tmp_path, domain: str, files: dict[str, list[dict]]) -> str:
    source, data_dir = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    for name, rows in files.items():
        (source / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare_command.main([f"--domain={domain}", f"--source={source}", f"--data_dir={data_dir}"]) == 0
    return str(data_dir)


def questions(count: int, first: int, **changes) -> list[dict]:
    return [
        {**ROW, "id": f"q{i}", "question": f"Question {i}?", "choice_type": "single", "cop": i % 4 + 1, **changes}
        for i in range(first, first + count)
    ]


def test_a_question_asks_for_a_letter_in_the_tag(tmp_path):
    rows = [*questions(3, 1), {**ROW, "id": "last", "choice_type": "single", "cop": 4}]
    data_dir = prepared(tmp_path, "medmcqa", {"train.json": rows, "dev.json": questions(2, 9)})
    domain = make_domain("medmcqa", data_dir=data_dir)
    example = domain.examples("train")[-1]
    assert example.id == "last" and example.answer == "D"
    assert example.prompt == (
        "Which?\n\nA. one\nB. two\nC. three\nD. four\n\n"
        "Which choice is right? Give its letter inside <answer></answer>."
    )
    assert domain.messages(example) == [{"role": "user", "content": example.prompt}]
    assert domain.with_context(domain.messages(example))[0]["role"] == "system"
    assert domain.score(example, "so <answer>d</answer>") == (True, "D")
    assert domain.score(example, "so <answer>A</answer>") == (False, "A")
    assert domain.score(example, "D") == (False, None)


def test_validation_is_halved_where_the_test_split_has_no_answers(tmp_path):
    unanswered = [{k: v for k, v in row.items() if k != "cop"} for row in questions(3, 50)]
    files = {"train.json": questions(4, 1), "dev.json": questions(5, 20), "test.json": unanswered}
    domain = make_domain("medmcqa", data_dir=prepared(tmp_path, "medmcqa", files))
    assert [e.id for e in domain.examples("train")] == ["q1", "q2", "q3", "q4"]
    assert [e.id for e in domain.examples("validation")] == ["q20", "q22", "q24"]
    assert [e.id for e in domain.examples("test")] == ["q21", "q23"]


def test_an_answered_test_split_is_used_as_it_is(tmp_path):
    files = {"train.json": questions(4, 1), "dev.json": questions(3, 20), "test.json": questions(2, 50)}
    domain = make_domain("medmcqa", data_dir=prepared(tmp_path, "medmcqa", files))
    assert [e.id for e in domain.examples("validation")] == ["q20", "q21", "q22"]
    assert [e.id for e in domain.examples("test")] == ["q50", "q51"]


def test_an_item_asks_for_yes_or_no(tmp_path):
    rows = [{"text": f"text {i} ", "label": "yes" if i % 2 else "no", "source": "s"} for i in range(4)]
    domain = make_domain(
        "safety",
        data_dir=prepared(tmp_path, "safety", {"train.jsonl": rows, "test.jsonl": [{"text": "t", "label": "no"}]}),
    )
    example = domain.examples("train")[1]
    assert example.answer == "yes"
    assert (
        example.prompt
        == "Text: text 1\n\nIs this text offensive or hate speech? Give yes or no inside <answer></answer>."
    )
    assert domain.score(example, "<answer>Yes</answer>") == (True, "yes")
    assert domain.score(example, "<answer>no</answer>") == (False, "no")
    assert domain.score(example, "yes") == (False, None)
    with pytest.raises(UserError, match="validation"):
        domain.examples("validation")


@pytest.mark.parametrize("name", ["medmcqa", "safety"])
def test_the_made_up_sets_come_with_the_package(name):
    domain = make_domain(name, data_dir="tiny")
    ids = [{example.id for example in domain.examples(split)} for split in SPLITS]
    assert [len(i) for i in ids] == [48, 24, 12]
    assert len(set.union(*ids)) == 84
    assert {e.answer for e in domain.examples("train")} == ({"yes", "no"} if name == "safety" else set("ABCD"))


@pytest.mark.parametrize("name", ["medmcqa", "safety"])
def test_without_data_it_is_said_how_to_prepare_them(name, tmp_path):
    with pytest.raises(UserError, match=rf"nca_jax\.data\.prepare --domain={name}"):
        make_domain(name)
    with pytest.raises(UserError, match=r"nca_jax\.data\.prepare"):
        make_domain(name, data_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["medmcqa", "safety"])
def test_the_context_never_tells_an_answer_and_brief_is_another(name):
    domain = make_domain(name, data_dir="tiny")
    (system,) = domain.context.messages
    assert "<answer></answer>" in system["content"]
    assert find_context(domain, "brief") != domain.context


def test_the_config_names_the_context(tmp_path):
    config = medmcqa.get_config("tiny")
    own = domain_of(config).context
    (tmp_path / "mine.txt").write_text("Think twice.\n")
    config.context.file = str(tmp_path / "mine.txt")
    assert domain_of(config).context.messages == ({"role": "system", "content": "Think twice."},)
    assert domain_of(medmcqa.get_config("tiny")).context == own
    config.context.text = "Think."
    with pytest.raises(UserError, match="both set"):
        domain_of(config)
    config.context.file = None
    assert domain_of(config).context.messages == ({"role": "system", "content": "Think."},)
    config.context.text = None
    config.context.file = str(tmp_path / "absent.txt")
    with pytest.raises(UserError, match=r"absent\.txt"):
        domain_of(config)


@pytest.mark.skipif(not (SHARED / "data/medmcqa").exists(), reason="the sample data are not here")
def test_the_sample_of_medmcqa(tmp_path):
    data_dir = tmp_path / "data"
    source = SHARED / "data/medmcqa"
    assert prepare_command.main(["--domain=medmcqa", f"--source={source}", f"--data_dir={data_dir}"]) == 0
    assert builders.splits("medmcqa", str(data_dir)) == {"train": 400, "validation": 200}
    domain = make_domain("medmcqa", data_dir=str(data_dir))
    assert [len(domain.examples(split)) for split in SPLITS] == [400, 100, 100]
    raw = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    assert [e.answer for e in domain.examples("train")] == ["ABCD"[row["cop"]] for row in raw]
