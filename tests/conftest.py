"""Fixtures: a tiny instruct model on disk, and one compilation cache for all tests."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight small devices out of one CPU, for the tests of sharding; the others use the first one. Without optimisation XLA
# compiles about twice as fast, and compiling is most of what tests of tiny models do.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import json
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nca_jax.models.architecture import Architecture, architecture_from_config
from nca_jax.models.huggingface import stored_names

GOLDEN = Path(__file__).parent / "golden"
# Read where it lies beside the project, never needed.
SHARED = Path(__file__).parents[2] / "shared"

# ChatML that adds a system message of its own where none is given, as SmolLM2's and Qwen2.5's do.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are tiny.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 2


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Compiled programs are kept between runs where the launcher names a place, else for this run."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def take_devices(patch: pytest.MonkeyPatch, count: int) -> None:
    """A job takes all devices there are; this makes them `count`."""
    devices = jax.local_devices()[:count]
    patch.setattr("jax.devices", lambda: devices)


def records(workdir: Path, name: str = "metrics") -> list[dict]:
    """Records of a run's .jsonl file without what the clock and the machine put in."""
    lines = (workdir / f"{name}.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "memory/"))} for line in lines]


def byte_tokenizer(chat_template: str = CHATML, **special) -> PreTrainedTokenizerFast:
    """One token per byte after three special ones: every text has ids, and they decode to it exactly."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>", **special
    )
    fast.chat_template = chat_template
    return fast


TINY_CONFIG = {
    "model_type": "llama",
    "vocab_size": 272,  # 259 tokens and some padding
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
}


# The shortest run in which everything happens: two evaluations, samples, three checkpoints.
SHORT_RUN = {
    "steps": 6,
    "batch_size": 4,
    "data.max_prompt_tokens": 900,
    "optimizer.learning_rate": 3e-3,
    "optimizer.schedule": "constant",
    "rollout.max_new_tokens": 4,
    "evaluation.every": 4,
    "evaluation.max_items": 6,
    "evaluation.batch_size": 4,
    "checkpoint.every": 2,
    "log.samples_every": 3,
    "log.samples": 2,
    "log.figures": False,
}


def random_tensors(arch: Architecture, seed: int = 0, std: float = 0.2) -> dict[str, np.ndarray]:
    """Hugging Face name -> random float32 tensor in the file's shape, for every weight of the architecture."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape, _, _ in stored_names(arch):
        tensors[name] = rng.normal(0, std, shape).astype(np.float32) + ("norm" in name)
    return tensors


def write_model(directory: Path, config: dict = TINY_CONFIG, seed: int = 0, tokenizer=None) -> Path:
    """A Hugging Face directory with random weights and a byte tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(architecture_from_config(config), seed), directory / "model.safetensors")
    (tokenizer or byte_tokenizer()).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory with a tiny random Llama."""
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def bucket(monkeypatch) -> str:
    """A gs:// path whose objects are in memory: the library for real buckets is behind the same interface."""

    class Bucket(MemoryFileSystem):
        protocol = ("gcs", "gs")
        store: ClassVar[dict] = {}
        pseudo_dirs: ClassVar[list] = [""]

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + str(path).removeprefix("gs://").removeprefix("gcs://").strip("/")

    monkeypatch.setattr(epath.backend.fsspec_backend, "_get_filesystem", lambda name: Bucket(skip_instance_cache=True))
    return "gs://bucket"
