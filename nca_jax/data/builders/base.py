"""What the data sets of all domains have in common: checked rows in, array_record files out, nothing downloaded."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from nca_jax.data import builders
from nca_jax.data.rows import Row


class CheckedRowsBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Writes rows that `rows.read_rows` has checked.

    Args:
      rows: split -> rows.
      data_dir: below which the data set is written.
      metadata: JSON values to keep with it.
      progress: wraps the rows that are being written, as tqdm does.
    """

    VERSION = tfds.core.Version(builders.VERSION)
    # Checksums of downloads: there are none, and the library would look for them with a package it does not ask for
    # (importlib_resources; tensorflow-datasets 4.9.10).
    url_infos = None

    def __init__(
        self,
        *,
        rows: Mapping[str, Sequence[Row]],
        data_dir: str,
        metadata: Mapping[str, Any] | None = None,
        progress=lambda rows: rows,
    ):
        self._rows = rows
        self._metadata = tfds.core.MetadataDict(metadata or {})
        self._progress = progress
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _data_set_info(self, texts: Iterable[str], integers: Iterable[str] = (), **about: str) -> tfds.core.DatasetInfo:
        """Text and int32 features; `index` is the position in the user's files, which writing shuffles."""
        features = {name: tfds.features.Text() for name in texts}
        features |= {name: tfds.features.Scalar(np.int32) for name in integers}
        features["index"] = tfds.features.Scalar(np.int64)
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), metadata=self._metadata, **about
        )

    def _split_generators(self, dl_manager) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {split: self._generate_examples(rows) for split, rows in self._rows.items()}

    def _generate_examples(self, rows: Sequence[Row]) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, row in enumerate(self._progress(rows)):
            yield index, row | {"index": index}
