"""Models with random weights: of any preset, for trying out size and speed, and tiny ones that train in seconds."""

import logging
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from nca_jax.models.export import Written, write_huggingface
from nca_jax.models.huggingface import stored_names
from nca_jax.models.packaged import cache_dir
from nca_jax.models.presets import preset, to_config
from nca_jax.models.tensor_files import NewTensor

_log = logging.getLogger(__name__)

# ChatML, which adds nothing by itself.
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_random(
    output: str, name: str, dtype: str, seed: int = 0, companions: str | None = None, overwrite: bool = False
) -> Written:
    """Writes a Hugging Face directory with the preset's architecture and normal weights of standard deviation 0.02.

    Args:
      output: the directory.
      name: of the preset.
      dtype: of the weights.
      seed: of the weights.
      companions: a directory whose tokenizer files are copied along.
      overwrite: replaces a model directory that is there.

    Raises:
      UserError: unknown preset, or the directory may not be written.
    """
    arch = preset(name)

    def values(index: int, shape: tuple[int, ...]) -> np.ndarray:
        # Noise also on scales and biases, which a new model starts with ones and zeros: no two tensors are alike.
        drawn = np.random.default_rng([seed, index]).standard_normal(shape, np.float32)
        drawn *= 0.02
        if tensors[index].name.endswith("norm.weight"):
            drawn += 1.0
        return drawn

    tensors = [
        NewTensor(stored.tensor, stored.shape, partial(values, index, stored.shape))
        for index, stored in enumerate(stored_names(arch))
    ]
    config = to_config(arch, dtype)
    return write_huggingface(output, arch, tensors, config, companions, dtype=dtype, overwrite=overwrite)


def tiny_model(name: str) -> Path:
    """The directory of a tiny preset with random weights and a tokenizer of bytes: it knows nothing, and runs through
    everything in seconds. Made in the cache when first asked for.

    Raises:
      UserError: unknown preset, or the cache may not be written.
    """
    directory = cache_dir() / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(f"{name}.lock")):  # of several processes on a host one makes it
        if not directory.exists():
            _log.info("%s: made with random weights in %s", name, directory)
            with tempfile.TemporaryDirectory() as companions:
                _byte_tokenizer().save_pretrained(companions)
                write_random(str(directory), name, "float32", companions=companions)
    return directory


def _byte_tokenizer():
    """One token per byte after three special ones: every text has ids, and they decode to it exactly."""
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = _CHAT_TEMPLATE
    return fast
