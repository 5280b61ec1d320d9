"""The command that takes models in and out: bit-equal both ways, strict, and never half-written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import GOLDEN, TINY_CONFIG, byte_tokenizer, random_tensors, write_model
from safetensors.numpy import load_file, save_file

from nca_jax import convert
from nca_jax.models.architecture import architecture_from_config, load_architecture
from nca_jax.models.huggingface import load_params
from nca_jax.models.presets import TINY_PRESETS
from nca_jax.models.source import load_weights
from nca_jax.sharding import make_mesh, params_sharding

FAMILIES = ["llama3", "qwen2", "qwen3", "smollm2"]


def run(capsys, *arguments) -> tuple[int, str]:
    code = convert.main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def all_tensors(directory) -> dict[str, np.ndarray]:
    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.tobytes() == other[name].tobytes(), name


def in_bfloat16(directory, target):
    """A copy of a model with its weights in bfloat16, as published ones are."""
    shutil.copytree(directory, target)
    half = {name: t.astype(ml_dtypes.bfloat16) for name, t in load_file(target / "model.safetensors").items()}
    save_file(half, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return target


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tensor=2,data=2"], ids=["all fsdp", "2x2x2"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_change_no_bit(family, half, mesh, tmp_path, capsys):
    source = in_bfloat16(GOLDEN / family, tmp_path / "source") if half else GOLDEN / family
    code, printed = run(capsys, "import", f"--source={source}", f"--output={tmp_path / 'in'}", f"--mesh={mesh}")
    assert code == 0 and "peak memory" in printed
    code, printed = run(
        capsys, "export", f"--source={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--shard_gb=5e-5"
    )
    assert code == 0
    before, after = all_tensors(source), all_tensors(tmp_path / "out")
    assert_same_bits(after, before)
    assert f"{len(before)} tensors, {sum(t.nbytes for t in before.values()):,} bytes" in printed
    shards = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 1 and max(s.stat().st_size for s in shards) < 5e4 + 5000
    assert load_architecture(tmp_path / "out") == load_architecture(source)


def test_round_trip_command_prints_what_it_compared(capsys):
    code, printed = run(capsys, "roundtrip")
    lines = printed.splitlines()
    assert code == 0 and [line.split(":")[0] for line in lines[:-1]] == list(TINY_PRESETS)
    for line, arch in zip(lines, TINY_PRESETS.values(), strict=False):
        parameters = sum(t.size for t in random_tensors(arch).values())
        assert f"{2 * parameters:,} bytes of bfloat16, bit-equal" in line


def test_round_trip_notices_a_changed_bit(capsys, monkeypatch, tmp_path):
    original = convert.write_huggingface

    def spoiled(target, arch, tensors, *arguments, **settings):
        if "exported" in str(target):
            tensors[3] = tensors[3]._replace(values=lambda values=tensors[3].values: np.asarray(values()) * 2)
        return original(target, arch, tensors, *arguments, **settings)

    monkeypatch.setattr(convert, "write_huggingface", spoiled)
    code, printed = run(capsys, "roundtrip", f"--source={GOLDEN / 'qwen3'}")
    assert code == 2 and "1 tensors came back changed" in printed


def test_an_imported_model_is_loaded_onto_any_mesh(tmp_path, capsys):
    run(capsys, "import", f"--source={GOLDEN / 'qwen3'}", f"--output={tmp_path / 'in'}", "--mesh=fsdp=4,tensor=2")
    arch = load_architecture(tmp_path / "in")
    expected = load_params(GOLDEN / "qwen3", arch)
    sharding = params_sharding(make_mesh({"data": 4, "fsdp": 1, "tensor": 2}), arch)
    for where in (None, sharding):
        params = load_weights(str(tmp_path / "in"), arch, np.float32, where)
        assert list(params) == list(expected)
        for name, array in params.items():
            np.testing.assert_array_equal(array, expected[name])
            assert where is None or array.sharding == where[name]
    half = load_weights(str(tmp_path / "in"), arch, jax.numpy.bfloat16)
    np.testing.assert_array_equal(half["query"], expected["query"].astype(jax.numpy.bfloat16))


def test_tokenizer_files_and_end_tokens_go_along(tmp_path, capsys):
    source = write_model(tmp_path / "model")
    (source / "LICENSE.txt").write_text("licence")
    (source / "modeling_own.py").write_text("code")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    run(capsys, "import", f"--source={source}", f"--output={tmp_path / 'in'}")
    run(capsys, "export", f"--source={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--dtype=bfloat16")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "LICENSE.txt", "generation_config.json"} <= names
    assert not {"modeling_own.py", "pytorch_model.bin"} & names
    # The source had no generation_config.json; servers look for end tokens there.
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 2}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    # Both places that versions of transformers look at.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


def test_a_head_that_was_written_out_is_not_exported(tmp_path, capsys):
    source = write_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, source / "model.safetensors")
    code, _ = run(capsys, "export", f"--source={source}", f"--output={tmp_path / 'out'}")
    assert code == 0
    assert_same_bits(all_tensors(tmp_path / "out"), tensors)


@pytest.mark.parametrize("command", ["import", "export", "random"])
def test_nothing_is_replaced_unasked(command, tmp_path, capsys):
    source = write_model(tmp_path / "model")
    what = "--preset=tiny_qwen3" if command == "random" else f"--source={source}"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("old")
    code, printed = run(capsys, command, what, f"--output={tmp_path / 'out'}")
    assert code == 2 and "pass --overwrite" in printed
    assert (tmp_path / "out" / "config.json").read_text() == "old"
    code, _ = run(capsys, command, what, f"--output={tmp_path / 'out'}", "--overwrite")
    assert code == 0
    assert load_architecture(tmp_path / "out")


def test_a_failure_half_way_leaves_nothing(tmp_path, capsys):
    source = write_model(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e38
    save_file(tensors, source / "model.safetensors")
    code, printed = run(capsys, "export", f"--source={source}", f"--output={tmp_path / 'out'}", "--dtype=float16")
    assert code == 2 and "model.norm.weight is not finite in float16" in printed
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    pieces = convert.huggingface.read_pieces

    def full(*arguments):
        yield next(pieces(*arguments))  # the directory is being filled
        assert [p.name for p in tmp_path.iterdir()] == [".out.partial"]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.huggingface, "read_pieces", full)
    code, printed = run(capsys, "import", f"--source={GOLDEN / 'qwen2'}", f"--output={tmp_path / 'out'}")
    assert code == 2 and "No space left on device" in printed and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["import", "--source=SOURCE", "--output=SOURCE"], "is the source"),
        (["export", "--source=SOURCE", "--output=SOURCE", "--overwrite"], "is the source"),
        (["import", "--source=IMPORTED", "--output=OUT"], "imported model already"),
        (["import", "--source=SOURCE", "--output=OUT", "--mesh=rows=2"], "no axis rows"),
        (["import", "--source=SOURCE", "--output=OUT", "--mesh=fsdp"], "--mesh=fsdp is wrong"),
        (["import", "--source=SOURCE", "--output=OUT", "--mesh=fsdp=3"], "do not fit"),
        (["import", "--source=nothing", "--output=OUT"], "no directory"),
        (["export", "--source=WORKDIR", "--output=OUT"], "has no config.json"),
        (["random", "--preset=gpt2", "--output=OUT"], "no preset 'gpt2'"),
    ],
)
def test_what_cannot_work_is_one_line(arguments, reason, tmp_path, capsys):
    (tmp_path / "workdir" / "checkpoints").mkdir(parents=True)
    source = write_model(tmp_path / "model")
    if "IMPORTED" in str(arguments):
        run(capsys, "import", f"--source={source}", f"--output={tmp_path / 'imported'}")
    places = {"SOURCE": source, "IMPORTED": tmp_path / "imported", "OUT": tmp_path / "out"}
    places["WORKDIR"] = tmp_path / "workdir"
    for name, place in places.items():
        arguments = [argument.replace(f"={name}", f"={place}") for argument in arguments]
    code, printed = run(capsys, *arguments)
    assert code == 2 and reason in printed and printed.startswith("error: ") and printed.count("\n") == 1
    assert not (tmp_path / "out").exists() and (source / "model.safetensors").exists()


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_an_imported_model_that_does_not_fit_its_config_is_refused(change, tmp_path, capsys):
    source = write_model(tmp_path / "model")
    run(capsys, "import", f"--source={source}", f"--output={tmp_path / 'in'}")
    wrong = {"missing": {"tie_word_embeddings": False}, "shape": {"intermediate_size": 48}}[change]
    (tmp_path / "in" / "config.json").write_text(json.dumps(TINY_CONFIG | wrong))
    arch = architecture_from_config(TINY_CONFIG | wrong)
    with pytest.raises(convert.UserError) as caught:
        load_weights(str(tmp_path / "in"), arch, np.float32)
    expected = "head: None there" if change == "missing" else "layers.1.gate: (32, 64) there, (32, 48) expected"
    assert expected in str(caught.value)


def test_an_imported_model_that_is_broken_is_refused(tmp_path, capsys):
    source = write_model(tmp_path / "model")
    run(capsys, "import", f"--source={source}", f"--output={tmp_path / 'in'}")
    for file in (tmp_path / "in" / "params" / "d").iterdir():
        file.unlink()
    with pytest.raises(convert.UserError, match="cannot be read"):
        load_weights(str(tmp_path / "in"), load_architecture(tmp_path / "in"), np.float32)


def test_through_a_bucket(bucket, tmp_path, capsys):
    """A Hugging Face directory in a bucket is read in ranges, and an export goes there."""
    source = write_model(tmp_path / "model")
    code, printed = run(capsys, "export", f"--source={source}", f"--output={bucket}/model", "--shard_gb=1e-5")
    assert code == 0, printed
    code, printed = run(capsys, "export", f"--source={bucket}/model", f"--output={tmp_path / 'out'}")
    assert code == 0, printed
    assert_same_bits(all_tensors(tmp_path / "out"), all_tensors(source))
    code, printed = run(capsys, "export", f"--source={bucket}/nothing", f"--output={tmp_path / 'out'}")
    assert code == 2 and "has no config.json" in printed


def test_random_models_differ_in_every_tensor_and_by_seed(tmp_path, capsys):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        arguments = [f"--seed={seed}", f"--output={tmp_path / name}", f"--tokenizer={tmp_path / 'tokenizer'}"]
        assert run(capsys, "random", "--preset=tiny_qwen2_5", *arguments)[0] == 0
    a, b, c = (all_tensors(tmp_path / name) for name in "abc")
    assert_same_bits(a, b)
    assert not any(np.array_equal(a[name], c[name]) for name in a)
    assert (tmp_path / "a" / "tokenizer.json").exists()
    assert len({tensor.tobytes() for tensor in a.values()}) == len(a)


def test_the_command_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "nca_jax.convert", "random", "--preset=tiny_llama3", f"--output={tmp_path / 'm'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], env=os.environ)
    assert done.returncode == 0 and done.stdout.startswith("random tiny_llama3: 20 tensors, 270,976 bytes\n")
    assert done.stderr == ""
