"""JSON files, and outputs that appear complete or not at all."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from etils import epath

from nca_jax.errors import UserError


def is_bucket(path: str | epath.Path) -> bool:
    """Whether a path is in an object store, where files appear whole but directories cannot be renamed."""
    return str(path).startswith("gs://")


def absolute(path: epath.PathLike) -> epath.Path:
    """A path as Orbax takes it. The method of that name makes a local directory `gs:` of a bucket."""
    path = epath.Path(path)
    return path if is_bucket(path) else path.absolute()


@contextlib.contextmanager
def new_model_directory(target: epath.Path, overwrite: bool = False) -> Iterator[epath.Path]:
    """A directory to fill, which becomes `target` when the block ends well and vanishes when it raises.

    On a local disk it is filled under another name and renamed, and what it replaces stays until then. In a bucket it
    is filled in place, after what it replaces was deleted: write `config.json` last, without which nothing reads a
    model directory.

    Args:
      target: what is to appear.
      overwrite: replaces a model directory that is there.

    Raises:
      UserError: `target` exists and may not be replaced.
    """
    target = epath.Path(target)
    if target.exists():
        if not target.is_dir() or (any(target.iterdir()) and not (target / "config.json").exists()):
            raise UserError(f"{target} exists and is not a model directory; choose another --output.")
        if any(target.iterdir()) and not overwrite:
            raise UserError(f"{target} exists already; choose another --output, or pass --overwrite to replace it.")
    building = target if is_bucket(target) else target.with_name(f".{target.name}.partial")
    if building.exists():  # what a killed process left, or what is to be replaced
        building.rmtree()
    try:
        building.mkdir(parents=True)
        yield building
    except BaseException:
        if building.exists():
            building.rmtree()
        raise
    if building != target:
        if target.exists():
            old = target.with_name(f".{target.name}.old")
            if old.exists():
                old.rmtree()
            target.rename(old)
            building.rename(target)
            old.rmtree()
        else:
            building.rename(target)


def write_text(path: epath.Path, text: str) -> None:
    """Replaces a file's content in one step."""
    if is_bucket(path):  # an object appears whole, and is never renamed but copied
        path.write_text(text)
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def write_json(path: epath.Path, content: Any) -> None:
    """Replaces a file's content in one step, by indented JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: epath.Path) -> dict[str, Any]:
    """A JSON dictionary.

    Raises:
      UserError: the file is no such thing.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); download the file again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON dictionary but a {type(content).__name__}; download it again.")
    return content
