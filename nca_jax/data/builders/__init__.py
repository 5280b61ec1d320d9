"""Prepared data sets of a domain: rows as they were checked, in the order of the user's files.

They are tensorflow-datasets data sets, written by `python -m nca_jax.data.prepare` and read without TensorFlow, or the
made-up rows that come with the package (`data_dir="tiny"`).
"""

from importlib import resources
from typing import Any

from etils import epath

from nca_jax.data.rows import CheckedRows, read_rows
from nca_jax.errors import UserError
from nca_jax.files import is_bucket, read_json

VERSION = "1.0.0"  # of the schemas; a data set of another version is not read
TINY = "tiny"


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
    return (data_set_directory(domain, data_dir) / "dataset_info.json").exists()


def refuse_bucket(data_dir: str) -> None:
    """Raises UserError for a gs:// path: the files are read and written in place by C++ that knows local disks only."""
    if is_bucket(data_dir):
        raise UserError(f"data_dir={data_dir} is a bucket; prepare the data on a local disk, and copy it to each host.")


def _builder(domain: str, data_dir: str):
    """The library's read-only view of a prepared data set."""
    refuse_bucket(data_dir)
    if not is_prepared(domain, data_dir):
        raise UserError(
            f"{data_dir} has no {domain} data set; "
            f"make it with python -m nca_jax.data.prepare --domain={domain} --source=DIR --data_dir={data_dir}"
        )
    import tensorflow_datasets as tfds  # takes a while, and the made-up rows do without

    read_json(data_set_directory(domain, data_dir) / "dataset_info.json")  # names the file if it is broken
    try:
        return tfds.builder_from_directory(data_set_directory(domain, data_dir))
    except ValueError as error:  # another of its JSON files is missing or cut
        raise _damaged(domain, data_dir) from error


def _tiny(domain: str) -> CheckedRows:
    return read_rows(domain, str(resources.files("nca_jax.data").joinpath(TINY, domain)))


def _damaged(domain: str, data_dir: str) -> UserError:
    return UserError(f"the {domain} data set of {data_dir} is damaged; prepare it again with --overwrite.")
