"""Plans: a small one by the real TPU compiler, and what is made of the facts that it gives."""

import importlib.util
import json

import pytest

from nca_jax import plan
from nca_jax.chips import chip_named
from nca_jax.flops import Tokens
from nca_jax.roofline import COMPUTE, LATENCY, MEMORY, NETWORK, estimate

GIB = 2**30
TINY = ["--config=configs/medmcqa.py:tiny", "--config.batch_size=8", "--config.data.max_prompt_tokens=256"]
BIG = ["--config=configs/medmcqa.py:qwen3_8b", "--topology=v5e:4x4"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_small_job_is_compiled_for_two_slices(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path))
    arguments = [*TINY, "--prompt=64", "--topology=v5e:2x2", "--num_slices=2", "--json"]
    assert plan.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["device"] == "TPU v5 lite" and (found["devices"], found["chips"]) == (8, 8)
    assert found["tokens"] == {"prompt": 64, "template": 64, "context": 192}
    assert found["parameters"] == {"student": 135_488, "teacher": 135_488}
    assert found["meshes"]["train"] == {"replica": 2, "data": 1, "fsdp": 4, "tensor": 1}
    step = found["programs"]["train_step"]
    assert step["kernels"] > 0, "splash attention is on"
    between = [c for c in step["collectives"] if c["between_slices"]]
    assert {"all-reduce"} <= {c["kind"] for c in between}, "gradients are summed over the slices"
    # What leaves a slice is little beside the weights that are gathered within it.
    within = sum(c["nbytes"] for c in step["collectives"] if not c["between_slices"])
    assert 0 < sum(c["nbytes"] for c in between) < within
    for name in ("train_step", "reshard", "rollout"):
        assert 0 < found["programs"][name]["memory"]["peak"] <= found["needs"][name] < found["limit"]
    assert all(value > 0 for seconds in found["seconds"].values() for value in seconds.values())

    # Once more: from the cache.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "plans").iterdir()}
    assert len(before) == 3
    assert plan.main([a for a in arguments if a != "--json"]) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "plans").iterdir()} == before
    text = capsys.readouterr().out
    assert "training         2        1        4        1" in text and text.endswith("it fits\n")


def facts(train_gib=10.0, rollout_gib=3.0, devices=16, **programs):
    """As `plan_compile` gives them."""
    memory = {"arguments": GIB, "results": 0, "temporaries": GIB}
    collectives = [
        {"kind": "all-gather", "between_slices": False, "count": 100, "nbytes": 8e9},
        {"kind": "all-reduce", "between_slices": True, "count": 10, "nbytes": 1e9},
    ]

    def program(gib):
        peak = {"memory": memory | {"peak": gib * GIB}}
        return peak | {"kernels": 9, "collectives": collectives, "compile_seconds": 1.0}

    return {
        "device": "TPU v5 lite",
        "devices": devices,
        "chips": float(devices),
        "parameters": {"student": 8_190_735_360, "teacher": 8_190_735_360},
        "meshes": {
            "train": {"replica": 1, "data": 1, "fsdp": devices, "tensor": 1},
            "decode": {"replica": 1, "data": devices // 8, "fsdp": 1, "tensor": 8},
        },
        "micro_batches": 8,
        "bytes_per_device": {
            "weights": 2 * GIB,
            "optimizer": 4 * GIB,
            "teacher": GIB,
            "teacher_prefixes": GIB // 2,
            "batch": 0,
            "decode_weights": 2 * GIB,
        },
        "programs": {"train_step": program(train_gib), "reshard": program(6.0), "rollout": program(rollout_gib)}
        | programs,
    }


def test_a_rollout_has_the_training_state_beside_it():
    assert plan.needs(facts()) == {"train_step": 10 * GIB, "reshard": 11.5 * GIB, "rollout": 10.5 * GIB}


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        (facts(), True),
        (facts(train_gib=15.7), True),
        (facts(train_gib=15.8), False),
        (facts(rollout_gib=8.5), False),
        (facts(train_step={"refused": "Used 17.2G of 15.75G hbm", "compile_seconds": 1.0}), False),
    ],
    ids=["all", "just", "train step", "rollout", "refused"],
)
def test_every_program_must_fit(found, fits, monkeypatch, capsys):
    monkeypatch.setattr(plan, "compile_for", lambda arguments: found)
    assert plan.main([*BIG, "--search=0"]) == (0 if fits else 1)
    out = capsys.readouterr().out
    assert ("it fits" in out, "IT DOES NOT FIT" in out) == (fits, not fits)
    if "refused" in found["programs"]["train_step"]:
        assert "train_step  refused by the compiler: Used 17.2G of 15.75G hbm" in out


def test_the_smallest_change_that_fits_is_named(monkeypatch, capsys):
    tried = []

    def compile_for(arguments):
        tried.append(arguments[-1])
        return facts(train_gib=5.0 if "v5e:8x8" in arguments[-1] else 20.0)

    monkeypatch.setattr(plan, "compile_for", compile_for)
    assert plan.main(BIG) == 1
    assert tried[1:] == ["--config.loss.chunk_size=256", "--topology=v5e:4x8", "--topology=v5e:8x8"]
    assert capsys.readouterr().out.endswith("it would with --topology=v5e:8x8\n")
    assert plan.main([*BIG, "--search=2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["would_fit"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BIG[:1], "--topology=v9:4x4"], "no figures for a chip 'v9'"),
        ([*BIG, "--prompt=4000", "--context=500"], "a prompt of 4000 tokens behind a context of 500 does not fit"),
        (["--config=configs/conventions.py"], "set config.model.preset"),
        ([*BIG, "--nonsense=1"], "nonsense"),
    ],
)
def test_input_that_cannot_work_ends_in_a_line(arguments, message, capsys):
    assert plan.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_missing_compiler_is_said(monkeypatch, capsys):
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
    assert plan.main(BIG) == 2
    assert 'pip install "jax[tpu]"' in capsys.readouterr().err


def test_the_roofline_of_a_job_that_one_can_compute_by_hand():
    from configs import medmcqa
    from nca_jax.flops import train_step_flops
    from nca_jax.models.presets import preset

    config, arch, chip, tokens = (
        medmcqa.get_config("qwen3_8b"),
        preset("qwen3_8b"),
        chip_named("v5e"),
        Tokens(512, 64, 0),
    )
    times = estimate(config, arch, arch, tokens, facts(), chip, 16)
    flops = sum(train_step_flops(config, arch, arch, tokens).values())
    assert times["train_step"].compute == pytest.approx(flops / (16 * 197e12 * COMPUTE))
    network = 8e9 / (200e9 * NETWORK) + 100 * LATENCY + 1e9 / (3.125e9 * NETWORK) + 10 * LATENCY
    assert times["train_step"].network == pytest.approx(network)
    assert times["train_step"].total == max(times["train_step"][:3])
    # 512 tokens; each reads 2 GiB of weights, and keys and values of 64 rows (512 + 256 tokens) and the template.
    of_token = 2 * 2 * 36 * 8 * 128 / 8
    read = 512 * (2 * GIB + (64 * 768 + 64) * of_token)
    assert times["rollout"].memory == pytest.approx(read / (819e9 * MEMORY))
    halves = estimate(config, arch, arch, tokens, facts(), chip, 8)  # of chips
    assert halves["rollout"].memory == pytest.approx(2 * times["rollout"].memory)
