"""Multiple-choice questions of medical entrance exams, as a tensorflow-datasets data set."""

import tensorflow_datasets as tfds

from nca_jax.data.builders.base import CheckedRowsBuilder
from nca_jax.data.rows import NULLABLE, OPTIONS


class Medmcqa(CheckedRowsBuilder):
    """A question, four options, and which of them is right."""

    def _info(self) -> tfds.core.DatasetInfo:
        return self._data_set_info(
            texts=("id", "question", *OPTIONS, "choice_type", *NULLABLE),
            integers=("cop",),
            description=(
                "Questions with four options. cop is the right one, 0 to 3, or -1 where it is not told. "
                "exp, subject_name and topic_name are empty where the source has null."
            ),
            homepage="https://medmcqa.github.io",
            citation=(
                "Pal, Umapathi and Sankarasubbu: MedMCQA: A Large-scale Multi-Subject Multi-Choice Dataset for "
                "Medical domain Question Answering. CHIL 2022, PMLR 174."
            ),
        )
