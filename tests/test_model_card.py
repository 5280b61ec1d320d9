"""The model card of a workdir made by hand, read as the Hub and as Markdown would read it."""

import ast
import json
import re

import pytest
from etils import epath
from huggingface_hub import ModelCard
from test_metrics import five_items

from nca_jax.errors import UserError
from nca_jax.model_card import model_card

CONFIG = {
    "seed": 3,
    "steps": 50,
    "batch_size": 128,
    "model": {"source": "acme/Tiny-1B-Instruct", "param_dtype": "float32"},
    "teacher": {"kind": "frozen", "source": None},
    "domain": {"name": "medmcqa"},
    "chat": {"default_system": "template", "template_kwargs": {"enable_thinking": False}},
    "rollout": {"policy": "student", "max_new_tokens": 512, "temperature": 1.0},
    "loss": {"divergence": "reverse_kl"},
    "anchor": {
        "beta": 0.5,
        "target": "student",
        "divergence": "forward_kl",
        "stop_gradient": True,
        "every": 1,
        "schedule": "gated",
        "start_step": 0,
        "warmup_steps": 10,
        "tau": 0.25,
    },
    "retention": {"gamma": 0.0, "contexts": []},
    "optimizer": {"learning_rate": 5e-6, "schedule": "constant"},
    "evaluation": {"split": "validation", "temperature": 1.0, "top_p": 0.95, "top_k": 20},
}
ENVIRONMENT = {
    "command": ["python", "-m", "nca_jax.main", "--workdir=/home/somebody/secret"],
    "started": "2026-11-30T17:00:00+00:00",
    "python": "3.11.9",
    "platform": "Linux",
    "packages": {"jax": "0.10.2", "flax": "0.12.8"},
    "devices": {"kind": "TPU v5e", "count": 16, "processes": 4},
}
CONTEXT = [{"role": "system", "content": "Choose the safest answer."}]


@pytest.fixture(autouse=True)
def no_cached_card(monkeypatch):
    """What this machine has of the Hub does not matter."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: None)


@pytest.fixture
def workdir(tmp_path) -> epath.Path:
    """Evaluated before training and after step 50; nothing is right without the context before."""
    path = epath.Path(tmp_path / "run")
    (path / "evaluations").mkdir(parents=True)
    (path / "model").mkdir()
    write(path / "model" / "config.json", {"model_type": "llama"})
    write(path / "config.json", CONFIG)
    write(path / "context.json", CONTEXT)
    write(path / "environment.json", ENVIRONMENT)
    after = five_items()
    before = [line | {"correct": line["view"] != "no_context"} for line in after]
    write_lines(path / "evaluations" / "step_00000050.jsonl", after)
    write_lines(path / "evaluations" / "step_00000000.jsonl", before)
    return path


def write(path, content):
    path.write_text(json.dumps(content))


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def changed(workdir, **changes):
    """The workdir with other config values, such as anchor={"beta": 0}."""
    config = json.loads((workdir / "config.json").read_text())
    for room, values in changes.items():
        config[room] = config[room] | values
    write(workdir / "config.json", config)
    return workdir


def rows(card: str) -> dict[str, list[str]]:
    """First cell of every table row -> the others; a pipe that is escaped divides no cells."""
    lines = [line for line in card.split("\n") if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {first.replace("\\", ""): rest for first, *rest in cells}


def front_matter(card: str) -> dict:
    return ModelCard(card).data.to_dict()


def test_front_matter_is_what_the_hub_reads(workdir):
    assert front_matter(model_card(workdir, 50)) == {
        "base_model": "acme/Tiny-1B-Instruct",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["nca_jax", "context-distillation"],
    }


@pytest.mark.parametrize(
    ("source", "base_model", "title"),
    [
        ("acme/Tiny-1B-Instruct@v2", "acme/Tiny-1B-Instruct", "acme/Tiny-1B-Instruct@v2"),
        ("smollm2_135m_instruct", None, "smollm2\\_135m\\_instruct"),
        ("/home/somebody/models/mine/", None, "mine"),
        ("gs://bucket/models/mine", None, "mine"),
    ],
)
def test_only_a_hub_id_is_a_base_model_and_paths_stay_private(workdir, bucket, source, base_model, title):
    card = model_card(changed(workdir, model={"source": source}), 50)
    assert front_matter(card).get("base_model") == base_model
    assert f"# {title} with its context distilled in\n" in card
    assert "somebody" not in card and "bucket" not in card


def test_a_path_that_looks_like_a_hub_id_is_none(workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "base_model" not in front_matter(model_card(changed(workdir, model={"source": "models/mine"}), 50))


def test_licence_is_the_one_that_the_source_models_card_names(workdir, tmp_path, monkeypatch):
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: other\nlicense_name: acme-1\nlicense_link: LICENSE\nlanguage: en\n---\n# Tiny\n")
    data = front_matter(model_card(changed(workdir, model={"source": str(tmp_path)}), 50))
    assert {key: value for key, value in data.items() if key.startswith("license")} == {
        "license": "other",
        "license_name": "acme-1",
        "license_link": "LICENSE",
    }
    assert "language" not in data
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: asked.append((args, kwargs)) or str(card)
    )
    data = front_matter(model_card(changed(workdir, model={"source": "acme/Tiny@v2"}), 50))
    assert data["license_name"] == "acme-1"
    assert asked == [(("acme/Tiny", "README.md"), {"revision": "v2"})]


def test_licence_of_a_model_in_a_bucket(workdir, bucket):
    epath.Path(f"{bucket}/models/mine/README.md").write_text("---\nlicense: apache-2.0\n---\n")
    data = front_matter(model_card(changed(workdir, model={"source": f"{bucket}/models/mine"}), 50))
    assert data["license"] == "apache-2.0"


@pytest.mark.parametrize(
    "card", ["no front matter", "---\nlanguage: en\n---\n", "---\nlicense: [\n---\n", "---\n- a\n---\n"]
)
def test_a_card_without_a_licence_names_none(workdir, tmp_path, card):
    (tmp_path / "README.md").write_text(card)
    changed(workdir, model={"source": str(tmp_path)})
    assert "license" not in front_matter(model_card(workdir, 50))
    write(workdir / "model" / "config.json", {"license": "mit"})
    assert front_matter(model_card(workdir, 50))["license"] == "mit"


def test_the_method_is_told_in_words(workdir):
    card = model_card(workdir, 50)
    assert "On-policy distillation (OPD)" in card and "a frozen copy of itself" in card and "reverse\\_kl" in card
    assert "NCA, arXiv 2606.11627" in card and "beta = 0.5 times `KL(sg[q_x] || q_c)`" in card
    assert "exp(-D / 0.25)" in card
    assert "Retention" not in card


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({"anchor": {"beta": 0.0}}, ["On-policy"], ["NCA", "beta"]),
        ({"anchor": {"schedule": "constant", "every": 2}}, ["a constant weight, on one row in 2"], ["exp("]),
        (
            {"anchor": {"schedule": "warmup", "start_step": 4}},
            ["from 0 to 1 over 10 steps from step 4 on"],
            ["exp("],
        ),
        ({"anchor": {"target": "teacher", "divergence": "reverse_kl"}}, ["An anchor", "`KL(q_c || sg[f])`"], ["2606"]),
        (
            {"anchor": {"divergence": "symmetric_kl", "stop_gradient": False}},
            ["(KL(q_x || q_c) + KL(q_c || q_x)) / 2"],
            ["2606"],
        ),
        ({"teacher": {"kind": "ema"}}, ["a running average of itself"], ["frozen"]),
        ({"teacher": {"source": "/home/x/big_one"}}, ["the frozen model big\\_one"], ["/home"]),
        (
            {"rollout": {"policy": "teacher"}, "loss": {"divergence": "nll"}},
            ["Off-policy", "maximum likelihood"],
            ["OPD"],
        ),
        (
            {"retention": {"gamma": 0.25, "contexts": ["brief", "/home/x/c.txt"]}},
            ["Retention of other contexts (brief, c.txt): 0.25"],
            ["/home"],
        ),
    ],
)
def test_other_methods_are_told_apart(workdir, changes, present, absent):
    card = model_card(changed(workdir, **changes), 50).split("## What was done")[1].split("## Context")[0]
    assert [text for text in present if text not in card] == []
    assert [text for text in absent if text in card] == []


def test_context_is_shown_in_full_and_cannot_break_out(workdir):
    text = "Line one.\n```\n## Not a heading\n`````\n<script>alert(1)</script>\n"
    write(workdir / "context.json", [{"role": "system", "content": text}, {"role": "block", "content": "a | b"}])
    card = model_card(workdir, 50)
    assert f"system:\n\n``````text\n{text}\n``````\n" in card
    assert "At the beginning of the user's message:\n\n```text\na | b\n```\n" in card


def test_a_run_that_kept_no_context_says_so(workdir):
    (workdir / "context.json").unlink()
    assert "did not keep the context" in model_card(workdir, 50)


def snippet(card: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)\n```$", card, re.DOTALL | re.MULTILINE)
    return code


def test_the_snippet_samples_as_the_evaluation_did(workdir):
    code = snippet(model_card(workdir, 50))
    ast.parse(code)
    assert "max_new_tokens=512, do_sample=True, temperature=1.0, top_p=0.95, top_k=20)" in code
    assert "enable_thinking=False" in code
    greedy = changed(workdir, evaluation={"temperature": 0.0}, chat={"template_kwargs": {}})
    code = snippet(model_card(greedy, 50))
    assert "do_sample=False)" in code and "enable_thinking" not in code


@pytest.mark.parametrize("block", [None, "Rules: win."])
def test_the_snippet_builds_the_messages_of_both_views(workdir, block):
    """Run up to the model; what a context of messages and a block gives is what `Context.apply` gives."""
    write(workdir / "context.json", [*CONTEXT, *([{"role": "block", "content": block}] if block else [])])
    code = snippet(model_card(workdir, 50)).partition("context = ")[2].partition("\n\ninputs")[0]
    values = {}
    code = f"context = {code}".replace("[...]", repr(CONTEXT)).replace('block = "..."', f"block = {block!r}")
    exec(code.replace('prompt = "..."', 'prompt = "Move."'), values)
    assert values["without_context"] == [{"role": "user", "content": "Move."}]
    told = f"{block}\n\nMove." if block else "Move."
    assert values["with_context"] == [*CONTEXT, {"role": "user", "content": told}]


def test_the_evaluation_is_a_table_with_intervals(workdir):
    """The figures of five_items, counted by hand in test_metrics; before training 0 without a context and 1 with."""
    card = model_card(workdir, 50)
    table = rows(card)
    assert "## Evaluation at step 50" in card
    assert "5 items of the validation split, 1 response each, sampled at temperature 1.0." in card
    accuracy, interval, before, tokens, cut, no_answer = table["with_context"]
    assert (accuracy, before, tokens, cut, no_answer) == ("0.600", "1.000", "5.4", "0.200", "0.000")
    low, high = map(float, interval.split(" to "))
    assert 0 <= low < 0.6 < high <= 1
    assert table["no_context"][2] == "0.000"
    assert table["harm (1 of 3)"][0] == "0.333"
    assert table["help (1 of 2)"][0] == "0.500"
    assert table["both right"][0] == "0.400"
    assert table["change of length"][0] == "0.350"
    assert "Regime C" in card and "McNemar" in card
    for column in ("accuracy", "tokens", "harm", "change of length"):
        assert f"- {column}:" in card or f" {column}: " in card


def test_a_step_without_an_evaluation_says_so(workdir):
    card = model_card(workdir, 40)
    assert "was not evaluated at step 40" in card
    assert "harm (" not in card and "Measured on" not in card


def test_training_and_hardware_are_listed_and_the_command_is_not(workdir):
    card = model_card(workdir, 50)
    table = rows(card)
    assert table["prompts a step"] == ["128"]
    assert table["learning rate"] == ["5e-06"]
    assert table["seed"] == ["3"]
    assert table["hardware"] == ["16 x TPU v5e, 4 processes"]
    assert table["versions"] == ["python 3.11.9, jax 0.10.2, flax 0.12.8"]
    assert "somebody" not in card
    (workdir / "environment.json").unlink()
    assert "hardware" not in rows(model_card(workdir, 50))


def test_limits_say_what_was_measured(workdir):
    """Under the context of another task 2 of 5 of its answers, all 5 before training."""
    limits = model_card(workdir, 50).split("## Limits")[1]
    assert "Measured on 5 items of this task only." in limits
    assert "its own answers were given to 0.400 (" in limits and "1.000 before training" in limits
    path = workdir / "evaluations" / "step_00000050.jsonl"
    write_lines(path, [line for line in five_items() if line["view"] != "other_task"])
    assert "this was not measured" in model_card(workdir, 50).split("## Limits")[1]
    changed(workdir, chat={"default_system": "none"})
    assert "remove it there too" in model_card(workdir, 50)


def test_names_from_outside_stay_text_in_tables(workdir):
    """A view's name can be that of a file, and a task's anything."""
    name = "a|b`c` <img src=x onerror=alert(1)> [x](y)\n## z"
    lines = [line | {"view": name} if line["view"] == "other_task" else line for line in five_items()]
    write_lines(workdir / "evaluations" / "step_00000050.jsonl", lines)
    card = model_card(changed(workdir, domain={"name": name}), 50)
    escaped = "a\\|b\\`c\\` &lt;img src=x onerror=alert(1)&gt; \\[x\\](y) \\#\\# z"
    assert f"| {escaped} | 0.400 |" in card
    assert f"| task | {escaped} |" in card
    assert "<img" not in card


def test_what_is_no_workdir_or_no_evaluation_is_said(workdir, tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json"):
        model_card(epath.Path(tmp_path), 50)
    path = workdir / "evaluations" / "step_00000050.jsonl"
    write_lines(path, five_items()[:-2])
    with pytest.raises(UserError, match=r"step_00000050\.jsonl cannot be summed up"):
        model_card(workdir, 50)
    write(workdir / "context.json", ["x"])
    with pytest.raises(UserError, match=r"context\.json is not a JSON list of messages"):
        model_card(workdir, 50)
