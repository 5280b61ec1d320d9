"""The command on tiny models: the run's own figures, any checkpoint, and going on after a stop."""

import json

import pytest
from conftest import SHORT_RUN, take_devices, write_model

from configs import conventions
from nca_jax.evaluate import main
from nca_jax.evaluator import Evaluator
from nca_jax.train import train

RUN = SHORT_RUN | {
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "steps": 3,
    "evaluation.every": 3,
    "evaluation.temperature": 0.7,
    "evaluation.samples": 2,
    "evaluation.divergence": "all",
    "checkpoint.every": 3,
    "export.huggingface": True,
    "export.dtype": "float32",
}
# What the evaluation in training has tried.
CONTEXTS = "--contexts=paraphrased,other_task"


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    take_devices(monkeypatch, 1)


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """A finished run and the flags that describe it."""
    workdir = tmp_path_factory.mktemp("run")
    config = conventions.get_config()
    settings = RUN | {"model.source": str(tiny_model)}
    config.update_from_flattened_dict(settings)
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        train(config, str(workdir))
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    return workdir, ["--config=configs/conventions.py", *flags]


def by_key(path) -> dict:
    lines = [json.loads(line) for line in path.read_text().split("\n") if line]
    found = {(line["view"], line["sample"], line["id"]): line for line in lines}
    assert len(found) == len(lines)
    return found


def test_an_export_has_exactly_the_figures_of_the_run(run, tmp_path, capsys):
    workdir, flags = run
    trained = by_key(workdir / "evaluations" / "step_00000003.jsonl")
    assert len(trained) == 4 * 2 * 6
    for checkpoint in (workdir / "huggingface", workdir):
        output = tmp_path / checkpoint.name
        assert main([f"--checkpoint={checkpoint}", CONTEXTS, f"--output={output}", *flags]) == 0
        assert by_key(output / "items.jsonl") == trained
    shown = capsys.readouterr().out
    record = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()][-1]
    summary = json.loads((output / "summary.json").read_text())
    for name in ("no_context", "with_context"):
        assert summary["views"][name]["accuracy"]["value"] == record[f"eval/{name}"]
        assert f"{record[f'eval/{name}']:.3f} [" in shown
    assert summary["pairs"]["with_context"]["both"]["value"] == record["eval/both"]
    nats = summary["views"]["other_task"]["divergence"]["value"]
    assert nats == pytest.approx(record["eval/divergence_other_task"])
    assert "regime" in shown.lower()


def test_the_default_is_all_contexts_and_a_place_beside_the_run(run, capsys):
    workdir, flags = run
    assert main([f"--checkpoint={workdir}", *flags]) == 0
    found = by_key(workdir / "evaluate_step_3" / "items.jsonl")
    views = list(dict.fromkeys(view for view, _, _ in found))
    assert views == [
        "no_context",
        "with_context",
        "paraphrased",
        "other_task",
        "shortened",
        "shuffled",
        "irrelevant",
        "empty",
        "adversarial",
    ]
    letters = {line["id"]: line["expected"] for (view, _, _), line in found.items() if view == "other_task"}
    assert all(letter == word[0].upper() for word, letter in letters.items())
    described = json.loads((workdir / "evaluate_step_3" / "evaluation.json").read_text())
    assert (described["step"], described["contexts"]["other_task"]["scored_by"]) == (3, "own")
    environment = json.loads((workdir / "evaluate_step_3" / "environment.json").read_text())
    assert environment["devices"]["kind"] == "cpu" and environment["packages"]["jax"]


def test_a_model_that_was_never_trained_here_and_contexts_from_files(tmp_path, run):
    _, flags = run
    other = write_model(tmp_path / "other", seed=5)
    (tmp_path / "mine.txt").write_text("Say it twice.")
    flags = [*flags, "--config.evaluation.samples=1", f"--contexts={tmp_path}/mine.txt", f"--output={tmp_path}/out"]
    assert main([f"--checkpoint={other}", *flags]) == 0
    assert {view for view, _, _ in by_key(tmp_path / "out" / "items.jsonl")} == {"no_context", "with_context", "mine"}


def test_a_stopped_command_goes_on_with_the_same_answers(run, tmp_path, monkeypatch, capsys):
    workdir, flags = run
    arguments = [f"--checkpoint={workdir}", CONTEXTS, *flags]
    assert main([*arguments, f"--output={tmp_path}/whole"]) == 0
    real, calls = Evaluator.part, []

    def dies(self, *args, **kwargs):
        calls.append(args[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Evaluator, "part", dies)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, f"--output={tmp_path}/stopped"])
    lines = tmp_path / "stopped" / "items.jsonl"
    whole = (tmp_path / "whole" / "items.jsonl").read_text()
    with lines.open("a") as file:  # and what a process leaves that is killed while it writes
        file.write(lines.read_text()[:500])
    del calls[:]
    monkeypatch.setattr(Evaluator, "part", lambda self, *args, **kw: calls.append(args[1]) or real(self, *args, **kw))
    assert main([*arguments, f"--output={tmp_path}/stopped"]) == 0
    assert [(part.sample, part.items) for part in calls] == [(1, range(0, 4)), (1, range(4, 6))]
    assert lines.read_text() == whole
    assert main([*arguments, f"--output={tmp_path}/stopped"]) == 0
    assert len(calls) == 2, "what is finished is not done again"
    capsys.readouterr()
    assert main([*arguments, f"--output={tmp_path}/stopped", "--config.seed=9"]) == 2
    assert "holds another evaluation" in capsys.readouterr().err
    assert lines.read_text() == whole


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--checkpoint=nowhere"], "model 'nowhere' is no directory"),
        (["--checkpoint={run}", "--step=7"], "has no checkpoint 7; there are [3]"),
        (["--checkpoint={run}/huggingface", "--step=3"], "is no workdir of a run"),
        (["--checkpoint={run}", "--contexts=rumour"], "context 'rumour' is no .json or .txt file"),
        (["--checkpoint={run}", "--contexts=empty,empty"], "two views of evaluation are called empty"),
    ],
)
def test_what_cannot_work_is_one_line(run, given, said, capsys, tmp_path):
    workdir, flags = run
    given = [argument.replace("{run}", str(workdir)) for argument in given]
    assert main([*given, f"--output={tmp_path}/out", *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ")
    assert not (tmp_path / "out").exists()
