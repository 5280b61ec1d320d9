"""The small files of a checkpoint, and models of the Hugging Face Hub."""

import json

import huggingface_hub
import pytest
from conftest import TINY_CONFIG, write_model
from etils import epath
from huggingface_hub import errors

from nca_jax.errors import UserError
from nca_jax.models.architecture import architecture_from_config, load_architecture
from nca_jax.models.model_files import copy_companions, export_config, local_companions, looks_like_hub_id, stored_dtype
from nca_jax.models.presets import preset, to_config
from nca_jax.models.source import open_model, resolve


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("Qwen/Qwen3-1.7B", True),
        ("meta-llama/Llama-3.2-3B-Instruct@0cb88a4f", True),
        ("owner/name@refs/pr/3", True),
        ("name", False),
        ("./owner/name", False),
        ("/models/name", False),
        ("~/models", False),
        ("a/b/c", False),
        ("owner/na me", False),
        ("gs://bucket/name", False),
    ],
)
def test_what_may_be_a_hub_id(source, is_id):
    assert looks_like_hub_id(source) == is_id


def test_a_hub_model_is_fetched_with_weights_and_tokenizer_only(monkeypatch, tmp_path):
    called = {}

    def download(name, revision, allow_patterns):
        called.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name@abc123") == str(tmp_path)
    assert (called["name"], called["revision"]) == ("owner/name", "abc123")
    offered = (
        "config.json generation_config.json tokenizer.json tokenizer_config.json model.safetensors LICENSE.txt "
        "model-00001-of-00002.safetensors model.safetensors.index.json chat_template.jinja pytorch_model.bin "
        "consolidated.safetensors original/consolidated.00.pth modeling_own.py model.gguf"
    )
    filtered = huggingface_hub.utils.filter_repo_objects(offered.split(), allow_patterns=called["patterns"])
    assert set(filtered) == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"),
        *("model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja", "LICENSE.txt"),
    }
    resolve("owner/name")
    assert called["revision"] is None


class _Response:
    status_code, headers, request = 401, {}, None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.GatedRepoError, "wants its licence accepted"),
        (errors.RepositoryNotFoundError, "shows you no model owner/name"),
        (errors.RevisionNotFoundError, "no revision 'abc'"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (ConnectionError, "cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(kind, reason, monkeypatch):
    def fail(*_, **__):
        response = {"response": _Response()} if issubclass(kind, errors.HfHubHTTPError) else {}
        raise kind("a long\nmessage", **response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=reason) as caught:
        resolve("owner/name@abc")
    assert "local directory" in str(caught.value) and "\n" not in str(caught.value)


def test_without_network_the_hub_is_one_sentence(monkeypatch, tmp_path):
    """The library itself, told that it is offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="the Hub cannot be reached for owner/name"):
        resolve("owner/name")


def test_a_local_directory_comes_before_the_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    with pytest.raises(UserError, match="no directory"):  # a mistyped path is not looked up
        resolve("owner/name")
    (tmp_path / "owner" / "name").mkdir()
    assert resolve("owner/name") == "owner/name"


def test_a_bucket_is_read_in_place_and_its_tokenizer_through_a_copy(bucket, tmp_path):
    source = write_model(tmp_path / "model")
    for file in source.iterdir():
        (epath.Path(bucket) / "model" / file.name).write_bytes(file.read_bytes())
    directory = resolve(f"{bucket}/model/")
    assert directory == f"{bucket}/model"
    local = open_model(str(source))
    model = open_model(directory)
    assert (model.arch, model.eos_ids) == (local.arch, local.eos_ids)
    assert model.tokenizer.get_vocab() == local.tokenizer.get_vocab()
    names = {p.name for p in epath.Path(local_companions(directory)).iterdir()}
    assert "tokenizer.json" in names and "model.safetensors" not in names


def test_a_bucket_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def missing(name):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(epath.backend.fsspec_backend, "_get_filesystem", missing)
    with pytest.raises(UserError, match=r"gs://no-such-bucket/model cannot be reached \(.*gcsfs"):
        resolve("gs://no-such-bucket/model")


def test_companions_without_a_config(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    copy_companions(str(tmp_path / "tokenizer"), epath.Path(tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "{}" and not (tmp_path / "generation_config.json").exists()


def test_the_exported_config_keeps_what_its_authors_wrote():
    old = {"rope_theta": 5e5, "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "own.Code"}, "custom": 1}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 8192
    source = {k: v for k, v in TINY_CONFIG.items() if k != "rope_theta"} | old | {"rope_scaling": scaling}
    arch = architecture_from_config(source)
    config = export_config(source, arch, "float32")
    assert config["custom"] == 1 and "auto_map" not in config
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == scaling
    assert config["rope_parameters"] == scaling | {"rope_theta": 5e5}
    assert architecture_from_config(config) == arch


def test_both_keys_name_the_dtype():
    assert stored_dtype({"dtype": "bfloat16"}) == stored_dtype({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert stored_dtype({"dtype": None}) == stored_dtype({}) == "float32"


def test_a_preset_written_to_disk_is_read_back(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_config(preset("qwen3_8b"), "bfloat16")))
    assert load_architecture(tmp_path) == preset("qwen3_8b")
