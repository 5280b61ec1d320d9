"""Tiny models that are made where they are asked for."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from nca_jax.errors import UserError
from nca_jax.models.presets import TINY_PRESETS, preset
from nca_jax.models.random_model import tiny_model, write_random
from nca_jax.models.source import open_model, resolve


@pytest.mark.parametrize("name", TINY_PRESETS)
def test_a_tiny_preset_is_a_source(name, tmp_path, monkeypatch):
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path))
    model = open_model(resolve(name), name)
    assert model.arch == preset(name)
    assert model.directory == str(tmp_path / name)
    text = "Größe 😀\n <|im_end|>"
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert model.tokenizer.decode(ids) == text
    assert ids[-1] in model.eos_ids
    rendered = model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n"


def test_it_is_made_once_and_always_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path / "a"))
    first = tiny_model("tiny_qwen3")
    before = first.stat().st_mtime_ns
    assert tiny_model("tiny_qwen3") == first and first.stat().st_mtime_ns == before
    monkeypatch.setenv("NCA_JAX_CACHE", str(tmp_path / "b"))
    ours, theirs = (load_file(d / "model.safetensors") for d in (first, tiny_model("tiny_qwen3")))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)
    flat = np.concatenate([x.ravel() for k, x in ours.items() if "norm" not in k])
    assert abs(flat.std() - 0.02) < 1e-3


def test_an_architecture_other_than_the_configs_is_refused(tmp_path):
    write_random(str(tmp_path / "m"), "tiny_qwen3", "float32", companions=str(resolve("tiny_qwen3")))
    with pytest.raises(UserError, match=r"is not the tiny_llama3 that the config names \(.*family.*differ\)"):
        open_model(str(tmp_path / "m"), "tiny_llama3")
    with pytest.raises(UserError, match="no preset 'nope'"):
        open_model(str(tmp_path / "m"), "nope")
