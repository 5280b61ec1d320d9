"""Texts with a yes or no, as a tensorflow-datasets data set."""

import tensorflow_datasets as tfds

from nca_jax.data.builders.base import CheckedRowsBuilder
from nca_jax.data.rows import SAFETY_FIELDS


class Safety(CheckedRowsBuilder):
    """A text, whether it is what the context asks about, and where it comes from."""

    def _info(self) -> tfds.core.DatasetInfo:
        return self._data_set_info(
            texts=SAFETY_FIELDS,
            description="Texts with a label, yes or no. source is empty where the files do not tell it.",
        )
