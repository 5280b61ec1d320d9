"""The whole job on a tiny model: trains, evaluates, resumes, and stops as it should."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import SHORT_RUN, TINY_CONFIG, records, take_devices, write_model
from safetensors.numpy import load_file, save_file

from configs import conventions
from nca_jax import assembly, convert
from nca_jax import train as train_module
from nca_jax.chips import chip_named
from nca_jax.errors import Preempted, UserError
from nca_jax.models.source import open_model
from nca_jax.preemption import StopSignals
from nca_jax.train import train
from nca_jax.workdir_lock import locked

REPOSITORY = Path(__file__).parents[1]
# On one device, whatever number the tests simulate.
OVERRIDES = SHORT_RUN | {"mesh.data": 1, "mesh.fsdp": 1}


SHORT = {"steps": 3, "evaluation.max_items": 1, "evaluation.every": 3, "log.samples_every": 3, "checkpoint.every": 3}


def tiny_config(model: Path, **overrides):
    config = conventions.get_config()
    config.model.source = str(model)
    for key, value in (OVERRIDES | overrides).items():
        config.update_from_flattened_dict({key: value})
    return config


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    take_devices(monkeypatch, 1)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """A run that nobody interrupted."""
    workdir = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        summary = train(tiny_config(tiny_model), str(workdir))
    return workdir, summary


def test_a_run_learns_and_leaves_everything_behind(finished):
    workdir, summary = finished
    assert summary.startswith("summary method=nca_gated no_context=")
    for name in ("with_context", "harm", "both", "length_change", "other_context", "seconds"):
        assert f" {name}=" in summary
    assert summary.split(" steps=")[1].startswith("6 ")
    assert (workdir / "summary.txt").read_text() == summary + "\n"
    assert json.loads((workdir / "config.json").read_text())["batch_size"] == 4
    assert json.loads((workdir / "environment.json").read_text())["devices"] == {
        "kind": "cpu",
        "count": 1,
        "processes": 1,
    }
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["4", "6"]
    assert list((workdir / "tensorboard").iterdir())

    steps = [r for r in records(workdir) if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["opd"] < 0.5 * steps[0]["opd"]
    # Frozen initial student as teacher: both terms are equal before the first update.
    np.testing.assert_allclose(steps[0]["nca"], steps[0]["opd"], rtol=1e-6)
    assert [r["step"] for r in records(workdir) if "eval/harm" in r] == [0, 4, 6]

    items = [json.loads(line) for line in (workdir / "evaluations/step_00000006.jsonl").read_text().splitlines()]
    assert len(items) == 6 * 4
    assert {item["view"] for item in items} == {"no_context", "with_context", "paraphrased", "other_task"}
    samples = records(workdir, "samples")
    assert [s["step"] for s in samples] == [3, 3, 6, 6]
    assert set(samples[0]) == {"step", "id", "prompt", "no_context", "with_context"}


def test_metrics_say_where_time_and_memory_went(finished):
    workdir, _ = finished
    all_records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in all_records if "loss" in r]
    for record in steps:
        parts = [record[f"time/{phase}_seconds"] for phase in ("rollout", "step")]
        assert all(value >= 0 for value in parts) and sum(parts) <= record["time/seconds"] + 1e-6
        assert 0 < record["memory/host_gb"] <= record["memory/host_peak_gb"] < 100
        assert "time/mfu" not in record, "nobody knows the peak of a CPU"
    evaluations = [r for r in all_records if "eval/harm" in r]
    assert all(0 <= r["time/goodput"] < 1 for r in evaluations)


def test_the_share_of_the_peak_is_logged_where_the_chip_is_known(tiny_model, tmp_path, monkeypatch):
    slow = chip_named("v5e")._replace(flops_bf16=1e9, cores=1)
    monkeypatch.setattr("nca_jax.step_log.chip_of", lambda kind: slow)
    monkeypatch.setattr("nca_jax.step_log.model_flops", lambda parts: 5e7)
    train(tiny_config(tiny_model, **SHORT), str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for record in (r for r in lines if "loss" in r):
        assert record["time/mfu"] == pytest.approx(5e7 / (record["time/step_seconds"] * 1e9))


def test_a_trace_is_written_by_config(tiny_model, tmp_path):
    train(tiny_config(tiny_model, **SHORT, **{"profile.steps": 1, "profile.first_step": 2}), str(tmp_path))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_fewer_slots_than_rows_draw_the_same_responses(finished, tiny_model, tmp_path):
    straight, _ = finished
    train(tiny_config(tiny_model, **{"rollout.slots": 3, "evaluation.batch_size": 6}), str(tmp_path))
    assert records(tmp_path, "samples") == records(straight, "samples")
    for ours, theirs in zip(records(tmp_path), records(straight), strict=True):
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5, atol=1e-6)


def test_a_run_need_not_be_evaluated_before_its_first_step(tiny_model, tmp_path):
    train(tiny_config(tiny_model, **SHORT, **{"evaluation.at_start": False}), str(tmp_path))
    assert [r["step"] for r in records(tmp_path) if "eval/harm" in r] == [3]
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["step_00000003.jsonl"]


def test_the_best_checkpoint_stays_beside_the_newest(tiny_model, tmp_path, monkeypatch):
    accuracy = iter([0.0, 0.5, 0.9, 0.1, 0.2, 0.3])
    real = train_module.summarise
    monkeypatch.setattr(train_module, "summarise", lambda results: real(results) | {"no_context": next(accuracy)})
    overrides = {"steps": 5, "evaluation.every": 1, "checkpoint.every": 100, "checkpoint.keep": 1}
    train(tiny_config(tiny_model, **overrides, **{"checkpoint.keep_best": 1}), str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "5"]


def test_checkpoints_by_time_come_whatever_the_step(tiny_model, tmp_path):
    overrides = {"checkpoint.every": 100, "checkpoint.keep": 10, "checkpoint.minutes": 1e-9}
    train(tiny_config(tiny_model, **SHORT | overrides), str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2", "3"]


def stopping_after(step: int) -> type[StopSignals]:
    """A signal comes during that step; alone, the loop looks once a step."""

    class Stopping(StopSignals):
        looked = 0

        @property
        def received(self):
            Stopping.looked += 1
            return signal.SIGTERM if Stopping.looked >= step else None

        @received.setter
        def received(self, value):
            pass

    return Stopping


@pytest.mark.parametrize("step", [3, 4, 6], ids=["no evaluation is due", "one is due", "after the last step"])
def test_a_signal_ends_the_run_after_its_step_and_the_same_call_continues(step, finished, tiny_model, tmp_path):
    straight, summary = finished
    with pytest.MonkeyPatch.context() as patch:
        take_devices(patch, 1)
        patch.setattr(train_module, "StopSignals", stopping_after(step))
        with pytest.raises(Preempted, match=f"stopped at step {step} of 6 by a signal; the same command continues"):
            train(tiny_config(tiny_model, **{"checkpoint.every": 100}), str(tmp_path))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    assert not (tmp_path / "summary.txt").exists()
    last = train(tiny_config(tiny_model), str(tmp_path))
    assert last.split(" seconds=")[0] == summary.split(" seconds=")[0]
    assert records(tmp_path) == records(straight)
    if step == 4:  # what was owed is paid once, also where the run was killed before its next checkpoint
        shutil.rmtree(tmp_path / "checkpoints" / "6")
        (tmp_path / "summary.txt").unlink()
        train(tiny_config(tiny_model), str(tmp_path))
        assert records(tmp_path) == records(straight)


def test_a_second_run_in_the_same_workdir_is_refused(tiny_model, tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on "):
        train(tiny_config(tiny_model), str(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_constant_anchor_logs_the_sum_of_its_terms(tiny_model, tmp_path):
    train(tiny_config(tiny_model, **{"steps": 1, "anchor.schedule": "constant"}), str(tmp_path))
    first = next(r for r in records(tmp_path) if "loss" in r)
    np.testing.assert_allclose(first["nca"], first["opd"], rtol=1e-6)
    np.testing.assert_allclose(first["loss"], 1.5 * first["opd"], rtol=1e-6)


def test_a_run_in_two_parts_equals_the_straight_run_bitwise(finished, tiny_model, tmp_path):
    straight, _ = finished
    train(tiny_config(tiny_model, steps=3, **{"checkpoint.every": 3, "evaluation.every": 4}), str(tmp_path))
    train(tiny_config(tiny_model), str(tmp_path))
    # The short run evaluated at its last step; that record is the only one the straight run does not have.
    parts = [r for r in records(tmp_path) if not (r["step"] == 3 and "eval/harm" in r)]
    assert parts == records(straight)
    assert records(tmp_path, "samples") == records(straight, "samples")
    for name in ("step_00000004.jsonl", "step_00000006.jsonl"):
        assert (tmp_path / "evaluations" / name).read_bytes() == (straight / "evaluations" / name).read_bytes()


def test_a_checkpoint_written_while_training_went_on_continues_to_the_same_end(finished, tiny_model, tmp_path):
    """Step 4 was being written when step 5 took its buffers; from it, steps 5 and 6 must come out the same."""
    straight, _ = finished
    workdir = tmp_path / "copy"
    shutil.copytree(straight, workdir)
    shutil.rmtree(workdir / "checkpoints" / "6")
    (workdir / "summary.txt").unlink()
    train(tiny_config(tiny_model), str(workdir))
    assert records(workdir) == records(straight)
    assert records(workdir, "samples") == records(straight, "samples")


def test_a_finished_run_only_prints_its_summary_again(finished, tiny_model):
    workdir, summary = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    assert train(tiny_config(tiny_model), str(workdir)) == summary
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_another_config_does_not_continue_a_run(finished, tiny_model):
    workdir, _ = finished
    before = (workdir / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"optimizer\.learning_rate"):
        train(tiny_config(tiny_model, **{"optimizer.learning_rate": 1e-3}), str(workdir))
    assert (workdir / "config.json").read_bytes() == before


def test_plain_distillation_has_no_anchor(tiny_model, tmp_path):
    summary = train(tiny_config(tiny_model, **{"steps": 2, "anchor.beta": 0.0}), str(tmp_path))
    assert summary.startswith("summary method=opd ")
    assert all(r["nca"] == 0 for r in records(tmp_path) if "loss" in r)


RETENTION = {"retention.gamma": 0.5, "retention.contexts": ("category", "first_letter")}


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("off_policy", {"rollout.policy": "teacher", "loss.divergence": "forward_kl", "anchor.beta": 0.0}),
        ("sft", {"rollout.policy": "teacher", "loss.divergence": "nll", "anchor.beta": 0.0}),
        ("dual_gated", {"anchor.target": "teacher", "anchor.divergence": "reverse_kl", "anchor.every": 2}),
        ("nca_gated", {"teacher.kind": "ema", "loss.support": "teacher_top_k", "loss.top_k": 8}),
        ("nca_gated", {"teacher.kind": "live", "anchor.stop_gradient": False, "loss.entry_clip": 1.0}),
        pytest.param("nca_gated_retention", RETENTION, marks=pytest.mark.slow),  # test_train_games.py has one
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(f"{k}={v}" for k, v in x.items()),
)
def test_every_variant_trains(method, overrides, tiny_model, tmp_path):
    summary = train(tiny_config(tiny_model, **SHORT | overrides), str(tmp_path))
    assert summary.startswith(f"summary method={method} ")
    steps = [r for r in records(tmp_path) if "loss" in r]
    assert len(steps) == 3 and all(np.isfinite(r["loss"]) for r in steps)
    assert ("retention" in steps[0]) == ("retention" in method)
    if overrides.get("teacher.kind") == "live":
        # The student as it is teaches in every step: the terms stay equal, as at step 1 with any teacher that it is.
        np.testing.assert_allclose([r["nca"] for r in steps], [r["opd"] for r in steps], rtol=1e-5)
    if "retention" in method:
        # At step 1 the student is the teacher in the other context too.
        assert abs(steps[0]["retention"]) < 1e-6 < steps[2]["retention"]


@pytest.mark.parametrize("samples", [pytest.param("step", marks=pytest.mark.slow), "cached"])
def test_retention_in_two_parts_equals_the_straight_run_bitwise(samples, tiny_model, tmp_path):
    """With an averaged teacher or with cached responses: whatever retention adds to a run's state is restored."""
    overrides = SHORT | RETENTION | {"retention.samples": samples, "checkpoint.every": 1}
    overrides["teacher.kind"] = {"step": "ema", "cached": "frozen"}[samples]
    train(tiny_config(tiny_model, **overrides), str(tmp_path / "straight"))
    parts = tmp_path / "parts"
    train(tiny_config(tiny_model, **overrides | {"steps": 2}), str(parts))
    assert (parts / "retention.npz").exists() == (samples == "cached")
    train(tiny_config(tiny_model, **overrides), str(parts))
    found, expected = ([r for r in records(w) if "loss" in r] for w in (parts, tmp_path / "straight"))
    assert found == expected


def test_another_checkpoint_can_teach(tiny_model, tmp_path):
    other = write_model(tmp_path / "teacher", seed=1)
    train(tiny_config(tiny_model, steps=1, **{"teacher.source": str(other)}), str(tmp_path / "run"))
    first = next(r for r in records(tmp_path / "run") if "loss" in r)
    assert abs(first["nca"] - first["opd"]) > 1e-3


def test_a_teacher_of_another_size_and_padding_teaches(tiny_model, tmp_path):
    """Cross-model: rows beyond the tokenizer's 259 tokens, 13 here and 41 there, are cut before the softmax."""
    wider = TINY_CONFIG | {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "tie_word_embeddings": False}
    teacher = write_model(tmp_path / "teacher", wider, seed=1)
    loss = []
    for padding in (0.0, 50.0):
        tensors = load_file(teacher / "model.safetensors")
        tensors["lm_head.weight"][259:] = padding
        save_file(tensors, teacher / "model.safetensors")
        workdir = tmp_path / f"run{padding}"
        train(tiny_config(tiny_model, steps=1, **{"teacher.source": str(teacher)}), str(workdir))
        loss.append(next(r for r in records(workdir) if "loss" in r))
    assert loss[0] == loss[1] and np.isfinite(loss[0]["loss"]) and abs(loss[0]["nca"] - loss[0]["opd"]) > 1e-3


def test_the_end_is_exported_by_config_and_any_checkpoint_by_command(finished, tiny_model, tmp_path):
    straight, _ = finished
    assert not (straight / "huggingface").exists()
    workdir = tmp_path / "copy"
    shutil.copytree(straight, workdir)
    train(tiny_config(tiny_model, **{"export.huggingface": True, "export.dtype": "float32"}), str(workdir))
    exported = load_file(workdir / "huggingface" / "model.safetensors")
    source = load_file(tiny_model / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(not np.array_equal(exported[name], source[name]) for name in source)  # all of it was trained
    open_model(str(tiny_model)).check_same_tokenizer(open_model(str(workdir / "huggingface")))

    assert "## Evaluation at step 6\n" in (workdir / "huggingface" / "README.md").read_text()

    for step, equal in ((None, True), (6, True), (4, False)):
        output = tmp_path / f"step{step}"
        chosen = [] if step is None else [f"--step={step}"]
        assert convert.main(["export", f"--source={workdir}", f"--output={output}", *chosen]) == 0
        tensors = load_file(output / "model.safetensors")
        assert all(np.array_equal(tensors[name], exported[name]) == equal for name in exported)
        assert f"## Evaluation at step {step or 6}\n" in (output / "README.md").read_text()
    assert convert.main(["export", f"--source={workdir}", f"--output={tmp_path / 'none'}", "--step=5"]) == 2

    # The exported model is where the next run begins.
    train(tiny_config(workdir / "huggingface", steps=1), str(tmp_path / "next"))
    first = next(r for r in records(tmp_path / "next") if "eval/no_context" in r)
    last = [r for r in records(straight) if "eval/no_context" in r][-1]
    assert {k: v for k, v in first.items() if k != "step"} == {k: v for k, v in last.items() if k != "step"}


def test_a_non_finite_loss_stops_the_run_and_keeps_the_last_checkpoint(tiny_model, tmp_path, monkeypatch):
    real = assembly.make_train_step

    def breaks_at_step_four(*args, **kwargs):
        step = real(*args, **kwargs)

        def broken(state, teacher, batch):
            state, metrics = step(state, teacher, batch)
            bad = state.step >= 4
            nan = {name: metrics[name] / (1 - bad) for name in ("loss", "grad_norm")}
            return state, metrics | nan | {"finite": metrics["finite"] * (1 - bad)}

        return broken

    monkeypatch.setattr(assembly, "make_train_step", breaks_at_step_four)
    with pytest.raises(UserError, match=r"step 4: .* not finite"):
        train(tiny_config(tiny_model, **{"checkpoint.every": 2}), str(tmp_path))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["2"]
    saved = np.load(tmp_path / "not_finite_step_4.npz")
    assert saved["response_BxR"].shape == (4, 4) and "no_context.prompt_BxP" in saved
    assert max(r["step"] for r in records(tmp_path)) == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.source": "nowhere"}, "nowhere"),
        ({"data.max_prompt_tokens": 20}, "max_prompt_tokens"),
        ({"data.max_prompt_tokens": 4000}, "1024 positions"),
        ({"accumulation": 3}, "accumulation"),
        ({"domain.name": "chess"}, "chess"),
        ({"teacher.source": "nowhere"}, "nowhere"),
        ({"retention.gamma": 0.5, "retention.contexts": ("nobody",)}, "none of plural, category, first_letter"),
    ],
)
def test_input_that_cannot_work_is_refused_before_anything_is_written(overrides, message, tiny_model, tmp_path):
    with pytest.raises(UserError, match=message):
        train(tiny_config(tiny_model, **overrides), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def job(model: Path, workdir: Path) -> subprocess.Popen:
    """The command itself, in a process that can be killed."""
    flags = [f"--config.{key}={value}" for key, value in OVERRIDES.items()]
    command = [sys.executable, "-m", "nca_jax.main", "--config=configs/conventions.py", f"--workdir={workdir}"]
    environment = os.environ | {"XLA_FLAGS": ""}
    return subprocess.Popen(
        [*command, f"--config.model.source={model}", *flags], cwd=REPOSITORY, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_stopped_at_twenty_random_moments_the_job_ends_as_if_nothing_had_happened(number, tiny_model, tmp_path):
    unbroken = job(tiny_model, tmp_path / "unbroken")
    assert unbroken.wait(timeout=300) == 0
    rng, stopped = np.random.default_rng(), 0
    for _ in range(20):
        process = job(tiny_model, tmp_path / "killed")
        deadline = time.monotonic() + rng.uniform(3, 15)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(number)
            stopped += 1
        _, error = process.communicate(timeout=300)
        # Before jax is up a signal ends the process as any; a finished run is not stopped any more.
        assert process.returncode in ((-number, 0) if number == signal.SIGKILL else (75, -number, 0)), error
    assert stopped
    last = job(tiny_model, tmp_path / "killed")
    assert last.communicate(timeout=300)[0].startswith("summary ") and last.returncode == 0
    assert records(tmp_path / "killed") == records(tmp_path / "unbroken")
    assert records(tmp_path / "killed", "samples") == records(tmp_path / "unbroken", "samples")
