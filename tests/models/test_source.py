"""A model from wherever the config says, and its end tokens."""

import dataclasses
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CHATML, EOS, TINY_CONFIG, byte_tokenizer, write_model
from test_gguf import make_metadata, make_tensors, write_gguf

from nca_jax.errors import UserError
from nca_jax.models import source
from nca_jax.models.source import load_weights, open_model, resolve


def load(directory):
    return open_model(str(directory))


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
    assert model.decode([*model.tokenizer("dü't").input_ids, EOS]) == "dü't"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_weights_in_the_dtype_that_is_asked_for(dtype, tiny_model):
    params = load_weights(str(tiny_model), load(tiny_model).arch, dtype)
    assert {p.dtype for p in params.values()} == {jnp.dtype(dtype)}
    assert params["embedding"].shape == (272, 32)


def test_weights_that_do_not_fit_are_refused_at_once(model_directory):
    write_json(model_directory / "config.json", {"tie_word_embeddings": False})
    with pytest.raises(UserError, match=r"missing lm_head\.weight"):
        load(model_directory)


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


def with_tokenizer(tmp_path, change):
    tokenizer = byte_tokenizer()
    change(tokenizer)
    return load(write_model(tmp_path / "other", tokenizer=tokenizer))


def test_a_teacher_with_the_same_tokenizer_may_differ_in_size_and_padding(tiny_model, tmp_path):
    wider = TINY_CONFIG | {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3}
    load(tiny_model).check_same_tokenizer(load(write_model(tmp_path / "wide", wider)))

    def other_padding(tokenizer):
        tokenizer.pad_token = "<|endoftext|>"

    load(tiny_model).check_same_tokenizer(with_tokenizer(tmp_path, other_padding))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.add_tokens(["<|new|>"]), r"different vocabularies \(259 and 260 tokens, 1 differ, .*'<\|new\|>'"),
        (lambda t: setattr(t, "eos_token", "<|endoftext|>"), r"different special tokens \(eos_token_id 2 and 0\)"),
        (lambda t: setattr(t, "bos_token", "<|im_start|>"), r"different special tokens \(bos_token_id None and 1\)"),
        (lambda t: setattr(t, "chat_template", CHATML + "!"), "different chat templates; .*other_template=True"),
    ],
    ids=["vocabulary", "eos", "bos", "template"],
)
def test_a_teacher_with_another_tokenizer_is_refused_with_the_reason(change, reason, tiny_model, tmp_path):
    teacher = with_tokenizer(tmp_path, change)
    with pytest.raises(UserError, match=reason) as caught:
        load(tiny_model).check_same_tokenizer(teacher)
    assert str(tiny_model) in str(caught.value) and str(tmp_path / "other") in str(caught.value)


def test_another_template_may_be_allowed_and_is_then_said(tiny_model, tmp_path, caplog):
    teacher = with_tokenizer(tmp_path, lambda t: setattr(t, "chat_template", CHATML + "!"))
    load(tiny_model).check_same_tokenizer(teacher, other_template=True)
    assert "both are shown the student's prompts" in caplog.text


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
    params = load_weights(directory, model.arch, jnp.float32)
    np.testing.assert_array_equal(params["final_norm"], make_tensors()[0]["output_norm.weight"])
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
