"""A model as the job needs it: architecture, weights, tokenizer and end tokens, from wherever the config says."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from nca_jax.data.chat import ChatFormat
from nca_jax.errors import UserError
from nca_jax.models.architecture import Architecture, load_architecture
from nca_jax.models.decoder import Params
from nca_jax.models.gguf import convert_to_hf_directory
from nca_jax.models.huggingface import load_params
from nca_jax.models.packaged import PACKAGED, model_directory


@dataclasses.dataclass
class Model:
    """A loaded checkpoint. `params` may be deleted once they have been handed on."""

    directory: str
    arch: Architecture
    params: Params
    tokenizer: object  # a fast Hugging Face tokenizer
    eos_ids: tuple[int, ...]

    def chat_format(self, config: ConfigDict) -> ChatFormat:
        """The tokenizer's chat template with `config.chat` applied."""
        return ChatFormat(
            self.tokenizer,
            default_system=config.default_system,
            date=config.date,
            template_kwargs=config.template_kwargs.to_dict(),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response, special tokens removed."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def check_same_tokenizer(self, teacher: "Model") -> None:
        """Raises a UserError unless both models read the same ids as the same text."""
        if self.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
            raise UserError(
                f"student {self.directory} and teacher {teacher.directory} have different vocabularies; "
                "distillation compares token by token and needs one tokenizer."
            )


def resolve(source: str) -> str:
    """The Hugging Face directory a config's `source` means: a packaged model's name, a GGUF file, or a directory.

    A GGUF file is converted once, into a directory beside it, and again if the file is newer.

    Raises:
      UserError: there is no such thing.
    """
    if source in PACKAGED:
        directory = model_directory(source)
        if not directory.exists():
            raise UserError(f"model {source!r} is not in the cache yet; run: python -m nca_jax.models.packaged")
        return str(directory)
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        # A name that nobody else would give, so that what lies there is this file's conversion.
        directory = path.with_name(path.name + ".hf")
        if not directory.exists() or directory.stat().st_mtime < path.stat().st_mtime:
            shutil.rmtree(directory, ignore_errors=True)
            convert_to_hf_directory(path, directory)
        return str(directory)
    if not path.is_dir():
        raise UserError(f"model {source!r} is no directory, GGUF file or packaged model ({', '.join(PACKAGED)}).")
    return source


def load_model(
    directory: str, dtype: jnp.dtype, sharding: Callable[[Architecture], Mapping[str, jax.sharding.Sharding]]
) -> Model:
    """Everything of a Hugging Face directory.

    Args:
      directory: from `resolve`.
      dtype: of the weights.
      sharding: from the architecture to where each weight goes.

    Raises:
      UserError: as the readers of each file.
    """
    from transformers import AutoTokenizer  # takes a second to import; errors above come first

    arch = load_architecture(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds for a missing or broken file
        reason = str(error).split("\n")[0]
        raise UserError(f"{directory}: the tokenizer cannot be loaded ({reason}); copy its files there.") from error
    if len(tokenizer) > arch.vocab_size:
        raise UserError(f"{directory}: the tokenizer has {len(tokenizer)} tokens, the model only {arch.vocab_size}.")
    return Model(
        directory, arch, load_params(directory, arch, dtype, sharding(arch)), tokenizer, _eos_ids(directory, tokenizer)
    )


def _eos_ids(directory: str, tokenizer) -> tuple[int, ...]:
    """The union of what config.json, generation_config.json and the tokenizer call an end. No sampling setting of
    generation_config.json is ever read."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = Path(directory) / name
        if path.exists():
            try:
                ids = json.loads(path.read_text()).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise UserError(f"{path} is not a JSON dictionary; download it again.") from error
            found |= set(ids) if isinstance(ids, list) else {ids}
    found.discard(None)
    if not found:
        raise UserError(f"{directory}: no end token is named; add eos_token_id to generation_config.json.")
    return tuple(sorted(found))
