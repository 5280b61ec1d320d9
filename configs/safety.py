"""Safety classification (offensive or hate speech: yes or no), with a policy as system prompt.

    python -m nca_jax.data.prepare --domain=safety --source=YOUR_ITEMS --data_dir=data
    python -m nca_jax.main --config=configs/safety.py:llama3_2_3b --config.domain.settings.data_dir=data

The settings are those of medmcqa.py, `llama3_2_3b` (default), `llama3_1_8b`, `qwen2_5_7b`, `qwen3_8b`, `smollm2_135m`
and `tiny`, and so are hardware, memory, time, values and what of them is inferred: the reference treats both domains
alike. Its data sets are not named in what could be read; yours need the columns text and label.
"""

from ml_collections import ConfigDict

from configs.questions import question_config


def get_config(setting: str = "llama3_2_3b") -> ConfigDict:
    """`setting` is one of those of medmcqa.py, and ablations."""
    return question_config("safety", setting)
