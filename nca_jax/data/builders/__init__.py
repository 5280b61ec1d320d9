"""Prepared data sets of a domain: rows as they were checked, in the order of the user's files.

They are tensorflow-datasets data sets, written by `python -m nca_jax.data.prepare` and read without TensorFlow, or the
made-up rows that come with the package (`data_dir="tiny"`). The library's C++ reads local disks only: of a data set in
a bucket each host keeps a copy in its cache.
"""

import hashlib
import logging
import shutil
import tempfile
from importlib import resources
from typing import Any

from etils import epath
from filelock import FileLock

from nca_jax.data.rows import CheckedRows, read_rows
from nca_jax.errors import UserError
from nca_jax.files import is_bucket, read_json

_log = logging.getLogger(__name__)

VERSION = "1.0.0"  # of the schemas; a data set of another version is not read
TINY = "tiny"
INFO = "dataset_info.json"  # the library's; a data set without it is none


def load(domain: str, data_dir: str, split: str) -> list[dict[str, Any]]:
    """All rows of a split.

    Args:
      domain: "medmcqa" or "safety".
      data_dir: where the data set was prepared, or "tiny": the made-up rows of the package.
      split: "train", "validation" or "test".

    Returns:
      The rows in the order of their files. medmcqa: id, question, opa, opb, opc, opd, cop (0 to 3, -1: not told),
      choice_type, exp, subject_name and topic_name ("" where not told). safety: id, text, label ("yes" or "no") and
      source. All are str but cop, an int.

    Raises:
      UserError: there is no such data set, it is not complete, or it has no such split.
    """
    sizes = splits(domain, data_dir)
    if split not in sizes:
        raise UserError(f"the {domain} data of {data_dir} has no split {split!r}; there are {', '.join(sizes)}.")
    if data_dir == TINY:
        return _tiny(domain).splits[split]
    try:
        source = _builder(domain, data_dir).as_data_source(split=split)
        stored = source.__getitems__(range(len(source)))
    except RuntimeError as error:  # what the C++ reader raises where a file is missing, cut or changed
        raise _damaged(domain, data_dir) from error
    if len(stored) != sizes[split]:
        raise _damaged(domain, data_dir)
    stored.sort(key=lambda row: row["index"])  # the library stores rows in the order of hashes
    return [
        {
            name: value.decode() if isinstance(value, bytes) else int(value)
            for name, value in row.items()
            if name != "index"
        }
        for row in stored
    ]


def splits(domain: str, data_dir: str) -> dict[str, int]:
    """Number of rows of each split that is there; arguments as for `load`.

    Raises:
      UserError: there is no such data set, or it is not complete.
    """
    if data_dir == TINY:
        return {split: len(rows) for split, rows in _tiny(domain).splits.items()}
    return {split: info.num_examples for split, info in _builder(domain, data_dir).info.splits.items()}


def metadata(domain: str, data_dir: str) -> dict[str, Any]:
    """What was noted when the data set was prepared: fingerprint, source and notes.

    Raises:
      UserError: there is no such data set.
    """
    return dict(_builder(domain, data_dir).info.metadata or {})


def data_set_directory(domain: str, data_dir: str) -> epath.Path:
    """Where below data_dir the files of a data set are."""
    return epath.Path(data_dir) / domain / VERSION


def is_prepared(domain: str, data_dir: str) -> bool:
    """Whether there is a data set.

    Raises:
      UserError: data_dir is in a bucket that cannot be reached.
    """
    path = data_set_directory(domain, data_dir) / INFO
    if not is_bucket(path):
        return path.exists()
    try:
        return path.exists()
    except Exception as error:  # whatever the bucket's library raises, or that it is not installed
        reason = str(error).split("\n")[0]
        raise UserError(f"data_dir={data_dir} cannot be reached ({reason}); install gcsfs and log in.") from error


def _builder(domain: str, data_dir: str):
    """The library's read-only view of a prepared data set."""
    if not is_prepared(domain, data_dir):
        raise UserError(
            f"{data_dir} has no {domain} data set; "
            f"make it with python -m nca_jax.data.prepare --domain={domain} --source=DIR --data_dir={data_dir}"
        )
    directory = data_set_directory(domain, data_dir)
    read_json(directory / INFO)  # names the file if it is broken
    if is_bucket(directory):
        directory = _copy_of_bucket(directory)
    import tensorflow_datasets as tfds  # takes a while, and the made-up rows do without

    try:
        return tfds.builder_from_directory(directory)
    except ValueError as error:  # another of its JSON files is missing or cut
        raise _damaged(domain, data_dir) from error


def _copy_of_bucket(directory: epath.Path) -> epath.Path:
    """A data set's local copy in the cache, made by the first process of a host that asks for it.

    Raises:
      UserError: the cache cannot be written, or the data set was replaced meanwhile.
    """
    from nca_jax.models.packaged import cache_dir  # brings along much that the made-up rows do without

    key = _content_key(directory)
    root = cache_dir() / "datasets"
    target = root / key
    if target.exists():
        return epath.Path(target)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{key}.lock"), tempfile.TemporaryDirectory(dir=root, prefix=f".{key}.") as scratch:
            if not target.exists():
                copy = epath.Path(scratch) / key
                size = copy_files(directory, copy)
                if _content_key(copy) != key:
                    raise UserError(f"{directory} has changed while it was copied; start the same command again.")
                copy.rename(target)
                _log.info("copied %s to %s: %s bytes", directory, target, f"{size:,}")
    except OSError as error:
        raise UserError(
            f"{directory} cannot be copied to {root} ({error}); set NCA_JAX_CACHE to a directory of yours with room."
        ) from error
    return epath.Path(target)


def copy_files(source: epath.Path, target: epath.Path) -> int:
    """Copies a data set from or to a bucket, so that it is none before it is complete; returns its bytes."""
    target.mkdir(parents=True, exist_ok=True)
    size = 0
    for path in sorted(source.iterdir(), key=lambda path: (path.name == INFO, path.name)):
        with path.open("rb") as reads, (target / path.name).open("wb") as writes:
            shutil.copyfileobj(reads, writes)
            size += writes.tell()
    return size


def _content_key(directory: epath.Path) -> str:
    """The same for equal data sets, whose JSON files have a digest of the rows; another where bytes are missing."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        content = path.read_bytes() if path.suffix == ".json" else f"{path.stat().length} bytes".encode()
        digest.update(path.name.encode() + b"\n" + content + b"\n")
    return digest.hexdigest()[:16]


def _tiny(domain: str) -> CheckedRows:
    return read_rows(domain, str(resources.files("nca_jax.data").joinpath(TINY, domain)))


def _damaged(domain: str, data_dir: str) -> UserError:
    return UserError(f"the {domain} data set of {data_dir} is damaged; prepare it again with --overwrite.")
