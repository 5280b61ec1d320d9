"""A model as the job needs it: architecture, weights, tokenizer and end tokens, from wherever the config says."""

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from etils import epath
from filelock import FileLock
from ml_collections import ConfigDict

from nca_jax.data.chat import ChatFormat
from nca_jax.errors import UserError
from nca_jax.files import is_bucket, read_json
from nca_jax.models import huggingface, orbax_params
from nca_jax.models.architecture import Architecture, load_architecture
from nca_jax.models.decoder import Params
from nca_jax.models.gguf import convert_to_hf_directory
from nca_jax.models.layers import stack
from nca_jax.models.model_files import fetch_from_hub, local_companions, looks_like_hub_id
from nca_jax.models.orbax_params import ORBAX_PARAMS
from nca_jax.models.packaged import PACKAGED, cache_dir, model_directory
from nca_jax.models.presets import TINY_PRESETS, preset
from nca_jax.models.random_model import tiny_model

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Model:
    """All of a checkpoint but its weights, which `load_weights` brings."""

    directory: str
    arch: Architecture
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

    def check_same_tokenizer(self, teacher: "Model", other_template: bool = False) -> None:
        """Whether both models read the same ids as the same text, prompt for prompt.

        The padding token may differ: positions come from lengths, and no padding token is ever looked at.

        Args:
          teacher: the other model.
          other_template: a teacher trained with another chat template is accepted with a warning; it then reads the
            student's prompts all the same.

        Raises:
          UserError: the first difference of vocabulary, special tokens or chat template.
        """
        where = f"student {self.directory} and teacher {teacher.directory}"
        ours, theirs = self.tokenizer, teacher.tokenizer
        if ours.get_vocab() != theirs.get_vocab():
            moved = [token for token, i in ours.get_vocab().items() if theirs.get_vocab().get(token) != i]
            moved += sorted(theirs.get_vocab().keys() - ours.get_vocab().keys())
            raise UserError(
                f"{where} have different vocabularies ({len(ours)} and {len(theirs)} tokens, {len(moved)} differ, such "
                f"as {moved[0]!r}); distillation compares token by token and needs one tokenizer."
            )
        for name in ("bos_token_id", "eos_token_id", "unk_token_id"):
            if (a := getattr(ours, name)) != (b := getattr(theirs, name)):
                raise UserError(f"{where} have different special tokens ({name} {a} and {b}); use one tokenizer.")
        if ours.chat_template != theirs.chat_template:
            said = f"{where} have different chat templates"
            if not other_template:
                raise UserError(f"{said}; set config.teacher.other_template=True to show it the student's prompts.")
            _log.warning("%s; both are shown the student's prompts", said)


def resolve(source: str) -> str:
    """The directory a config's `source` means, local or in a bucket, ready for `open_model`.

    A source is a packaged model's name, a tiny preset's (random weights, made in the cache), a GGUF file, a directory
    (Hugging Face's or one of `convert import`), a gs:// path of such a directory, or `owner/name[@revision]` on the
    Hugging Face Hub. A GGUF file is converted once, into a directory beside it, and again if the file is newer.

    Raises:
      UserError: there is no such thing.
    """
    if source in PACKAGED:
        directory = model_directory(source)
        if not directory.exists():
            raise UserError(f"model {source!r} is not in the cache yet; run: python -m nca_jax.models.packaged")
        return str(directory)
    if source in TINY_PRESETS:
        return str(tiny_model(source))
    if is_bucket(source):
        try:
            found = (epath.Path(source) / "config.json").exists()
        except Exception as error:  # whatever the bucket's library raises, or that it is not installed
            reason = str(error).split("\n")[0]
            raise UserError(f"{source} cannot be reached ({reason}); install gcsfs and log in.") from error
        if not found:
            raise UserError(f"{source} has no config.json; check the path.")
        return source.rstrip("/")
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        # A name that nobody else would give, so that what lies there is this file's conversion.
        directory = path.with_name(path.name + ".hf")
        cache_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir() / f"{directory.name}.lock"):  # of several processes on a host one converts it
            if not directory.exists() or directory.stat().st_mtime < path.stat().st_mtime:
                shutil.rmtree(directory, ignore_errors=True)
                convert_to_hf_directory(path, directory)
        return str(directory)
    if path.is_dir():
        return source
    if looks_like_hub_id(source) and not path.parent.exists():
        return fetch_from_hub(source)
    raise UserError(
        f"model {source!r} is no directory, GGUF file, gs:// path, Hub id owner/name, packaged model "
        f"({', '.join(PACKAGED)}) or tiny random one ({', '.join(TINY_PRESETS)})."
    )


def open_model(directory: str, expected: str | None = None, weights: bool = True) -> Model:
    """Architecture, tokenizer and end tokens of a model directory.

    Args:
      directory: from `resolve`.
      expected: name of a preset that the architecture must be equal to.
      weights: False: they lie elsewhere, and are not looked for.

    Raises:
      UserError: as the readers of each file; or another architecture than the preset's.
    """
    from transformers import AutoTokenizer  # takes a second to import; errors above come first

    arch = load_architecture(directory)
    if expected and arch != preset(expected):
        different = [
            f.name for f in dataclasses.fields(arch) if getattr(arch, f.name) != getattr(preset(expected), f.name)
        ]
        raise UserError(
            f"{directory} is not the {expected} that the config names ({', '.join(different)} differ); name its own "
            "with config.model.preset or config.teacher.preset, or leave that empty."
        )
    files = local_companions(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(files, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises many kinds for a missing or broken file
        reason = str(error).split("\n")[0]
        raise UserError(f"{directory}: the tokenizer cannot be loaded ({reason}); copy its files there.") from error
    if len(tokenizer) > arch.vocab_size:
        raise UserError(f"{directory}: the tokenizer has {len(tokenizer)} tokens, the model only {arch.vocab_size}.")
    # What is wrong with the weights is said before anything is computed or written.
    orbax = epath.Path(directory) / ORBAX_PARAMS
    if weights and orbax.exists():
        orbax_params.check_pieces(orbax, arch)
    elif weights:
        huggingface.checked_tensors(directory, arch)
    return Model(directory, arch, tokenizer, _eos_ids(files, tokenizer))


def load_weights(
    directory: str, arch: Architecture, dtype: jnp.dtype, sharding: Mapping[str, jax.sharding.Sharding] | None = None
) -> Params:
    """The weights of a directory from `resolve`, a Hugging Face one or one that `convert import` wrote.

    Args and errors as `huggingface.load_params` and `orbax_params.read_pieces`.
    """
    orbax = epath.Path(directory) / ORBAX_PARAMS
    if orbax.exists():
        return stack(orbax_params.read_pieces(orbax, arch, dtype, sharding), arch, dtype, sharding)
    return huggingface.load_params(directory, arch, dtype, sharding)


def _eos_ids(directory: str, tokenizer) -> tuple[int, ...]:
    """The union of what config.json, generation_config.json and the tokenizer call an end. No sampling setting of
    generation_config.json is ever read."""
    found = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = epath.Path(directory) / name
        if path.exists():
            ids = read_json(path).get("eos_token_id")
            found |= set(ids) if isinstance(ids, list) else {ids}
    found.discard(None)
    if not found:
        raise UserError(f"{directory}: no end token is named; add eos_token_id to generation_config.json.")
    return tuple(sorted(found))
