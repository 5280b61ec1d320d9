"""A model from wherever the config says, and its end tokens."""

import dataclasses
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EOS, TINY_CONFIG, byte_tokenizer, write_model
from test_gguf import make_metadata, make_tensors, write_gguf

from nca_jax.errors import UserError
from nca_jax.models import source
from nca_jax.models.source import load_model, resolve


def load(directory):
    return load_model(str(directory), jnp.float32, lambda arch: None)


@pytest.fixture
def model_directory(tiny_model, tmp_path):
    """A copy of the tiny model, to be changed."""
    return shutil.copytree(tiny_model, tmp_path / "model")


def write_json(path, change, **changes):
    """Replaces keys of a JSON file, which may not exist yet."""
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | change | changes))


def test_everything_of_a_directory(tiny_model):
    model = load(tiny_model)
    assert model.directory == str(tiny_model)
    assert (model.arch.vocab_size, len(model.tokenizer), model.eos_ids) == (272, 259, (EOS,))
    assert model.params["embedding"].shape == (272, 32)
    assert model.decode([*model.tokenizer("dü't").input_ids, EOS]) == "dü't"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_architecture_and_dtype_reach_the_weights(dtype, tiny_model):
    seen = []
    model = load_model(str(tiny_model), dtype, seen.append)
    assert {p.dtype for p in model.params.values()} == {jnp.dtype(dtype)} and seen == [model.arch]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, [258, 200, 201], (2, 200, 201, 258)),
        ([2, 7], [200, 7], (2, 7, 200)),
        (7, 8, (2, 7, 8)),
        (None, 200, (2, 200)),
        (None, None, (2,)),
    ],
)
def test_end_tokens_are_the_union_of_what_all_files_name(config, generation, expected, model_directory):
    write_json(model_directory / "config.json", {"eos_token_id": config})
    write_json(model_directory / "generation_config.json", {"eos_token_id": generation})
    assert load(model_directory).eos_ids == expected


def test_end_tokens_of_the_files_suffice_without_one_of_the_tokenizer(model_directory):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model_directory)
    write_json(model_directory / "config.json", {"eos_token_id": 9})
    assert load(model_directory).eos_ids == (9,)
    write_json(model_directory / "config.json", {"eos_token_id": None})
    with pytest.raises(UserError, match="no end token is named"):
        load(model_directory)


def test_sampling_settings_of_the_files_leak_nowhere(model_directory):
    before = load(model_directory)
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    write_json(model_directory / "generation_config.json", settings)
    after = load(model_directory)
    fields = {field.name for field in dataclasses.fields(after)}
    assert vars(after).keys() == fields and not fields & settings.keys()
    assert (after.arch, after.eos_ids) == (before.arch, before.eos_ids)
    assert not settings.keys() & after.tokenizer.init_kwargs.keys()


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    directory = write_model(tmp_path / "model", TINY_CONFIG | {"vocab_size": 258})
    with pytest.raises(UserError, match="the tokenizer has 259 tokens, the model only 258"):
        load(directory)


def test_a_directory_without_a_tokenizer_is_refused(model_directory):
    for path in model_directory.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match="the tokenizer cannot be loaded"):
        load(model_directory)


def test_a_teacher_with_another_tokenizer_is_refused(tiny_model, tmp_path):
    student = load(tiny_model)
    student.check_same_tokenizer(load(write_model(tmp_path / "same", seed=1)))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|new|>"])
    teacher = load(write_model(tmp_path / "other", tokenizer=tokenizer))
    with pytest.raises(UserError, match="different vocabularies") as caught:
        student.check_same_tokenizer(teacher)
    assert str(tiny_model) in str(caught.value) and str(tmp_path / "other") in str(caught.value)


def test_a_directory_resolves_to_itself(tmp_path):
    assert resolve(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "nothing.gguf", "config.json"])
def test_what_is_no_model_is_refused_by_name(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"{name}.*packaged model"):
        resolve(str(tmp_path / name))


def test_a_packaged_model_is_found_in_the_cache_or_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "PACKAGED", {"tiny": None})
    monkeypatch.setattr(source, "model_directory", lambda name: tmp_path / name)
    with pytest.raises(UserError, match=r"'tiny' is not in the cache.*python -m nca_jax.models.packaged"):
        resolve("tiny")
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny") == str(tmp_path / "tiny")


def test_a_gguf_file_is_converted_once_beside_itself(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", make_tensors()[0], make_metadata())
    directory = resolve(str(path))
    assert directory == str(tmp_path / "model.gguf.hf")
    model = load(directory)
    np.testing.assert_array_equal(model.params["final_norm"], make_tensors()[0]["output_norm.weight"])
    path.write_bytes(b"no GGUF")
    os.utime(path, (0, 0))  # older than its conversion: not read again
    assert resolve(str(path)) == directory
    os.utime(path)  # a newer file is another model
    with pytest.raises(UserError):
        resolve(str(path))


def test_a_broken_generation_config_is_named(model_directory):
    (model_directory / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load(model_directory)
