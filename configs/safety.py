"""Safety classification (offensive or hate speech, yes or no) with a policy as system prompt: four reference settings, and
two for a laptop.

    python -m nca_jax.data.prepare --domain=safety --source=YOUR_ITEMS --data_dir=data
    python -m nca_jax.main --config=configs/safety.py:llama3_2_3b --config.domain.settings.data_dir=data

Settings, hardware, memory, time, and what is inferred are those of medmcqa.py, and so is everything else: the reference
treats both alike. Its data sets are not named in what could be read; yours need the columns text and label.
"""

from ml_collections import ConfigDict

from configs.questions import question_config


def get_config(setting: str = "llama3_2_3b") -> ConfigDict:
    """`setting` is one of those of medmcqa.py, and ablations."""
    return question_config("safety", setting)
