"""The small files of a checkpoint: config, end tokens, tokenizer, licence. They go wherever its weights go."""

import fnmatch
import functools
import re
import tempfile
from typing import Any

from etils import epath

from nca_jax.errors import UserError
from nca_jax.files import is_bucket, read_json, write_json
from nca_jax.models.architecture import Architecture
from nca_jax.models.presets import computed_keys

# Beside config.json. Weights come by a list of their own, and nothing that could hold code comes at all.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)


def looks_like_hub_id(source: str) -> bool:
    """Whether a source that is no local path may be `owner/name` or `owner/name@revision` on the Hugging Face Hub."""
    return _HUB_ID.fullmatch(source) is not None and not source.startswith((".", "/", "~"))


def fetch_from_hub(source: str) -> str:
    """The local directory of a Hub model: safetensors, config and tokenizer files only, kept in the Hub's own cache.

    Args:
      source: `owner/name` or `owner/name@revision` (a branch, tag or commit; default: main).

    Raises:
      UserError: no network, no access, no such model or revision.
    """
    import huggingface_hub
    from huggingface_hub import errors

    name, _, revision = source.partition("@")
    patterns = ["config.json", "README.md", *COMPANIONS, "model*.safetensors", "model.safetensors.index.json"]
    local = "or give the path of a local directory"
    try:
        return huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns)
    except errors.GatedRepoError as error:
        raise UserError(
            f"model {name} on the Hub wants its licence accepted; do so on its page and run `hf auth login`, {local}."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"model {name} on the Hub has no revision {revision!r}; check it, {local}.") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"the Hub shows you no model {name}; check it or run `hf auth login`, {local}.") from error
    except Exception as error:  # many kinds for no network, from several libraries
        reason = type(error.__cause__ or error).__name__
        raise UserError(f"the Hub cannot be reached for {source} ({reason}); check the network, {local}.") from error


def copy_companions(source: str, target: epath.Path) -> None:
    """Copies what lies beside the weights, config.json excepted. End tokens that only config.json names become a
    generation_config.json, which is where servers look."""
    source_dir = epath.Path(source)
    for file in sorted(source_dir.iterdir()):
        if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in COMPANIONS) and not file.is_dir():
            (target / file.name).write_bytes(file.read_bytes())
    config_file = source_dir / "config.json"
    if config_file.exists() and not (target / "generation_config.json").exists():
        config = read_json(config_file)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        if ids := {key: config[key] for key in keys if config.get(key) is not None}:
            write_json(target / "generation_config.json", ids)


def export_config(config: dict[str, Any], arch: Architecture, dtype: str) -> dict[str, Any]:
    """`config.json` for weights that came from a checkpoint with `config` and are now in `dtype`.

    Everything else stays as its authors wrote it, save `auto_map`, which names code that is not here.
    """
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "transformers_version")}
    return kept | computed_keys(arch, dtype)


def stored_dtype(config: dict[str, Any]) -> str:
    """The dtype that a `config.json` of transformers 4 or 5 names; float32 where it names none."""
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def local_companions(directory: str) -> str:
    """A local directory with config and tokenizer files: the tokenizer library cannot read buckets."""
    return _copy_of_bucket(directory).name if is_bucket(directory) else directory


@functools.cache  # so that it is copied once, and lives as long as the process
def _copy_of_bucket(directory: str) -> tempfile.TemporaryDirectory:
    copy = tempfile.TemporaryDirectory(prefix="nca_jax_")
    copy_companions(directory, epath.Path(copy.name))
    (epath.Path(copy.name) / "config.json").write_bytes((epath.Path(directory) / "config.json").read_bytes())
    return copy
