"""The models of the settings, by the names that settings have."""

from ml_collections import ConfigDict

# Setting -> (model.source, model.preset). The first two are here for trying things out.
MODELS = {
    "tiny": ("tiny_llama3", "tiny_llama3"),  # random weights, a tokenizer of bytes
    "smollm2_135m": ("smollm2_135m_instruct", "smollm2_135m"),  # python -m nca_jax.models.packaged
    "llama3_2_3b": ("meta-llama/Llama-3.2-3B-Instruct", "llama3_2_3b"),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B-Instruct", "llama3_1_8b"),
    "qwen2_5_7b": ("Qwen/Qwen2.5-7B-Instruct", "qwen2_5_7b"),
    "qwen3_1_7b": ("Qwen/Qwen3-1.7B", "qwen3_1_7b"),
    "qwen3_4b": ("Qwen/Qwen3-4B", "qwen3_4b"),
    "qwen3_4b_2507": ("Qwen/Qwen3-4B-Instruct-2507", "qwen3_4b_2507"),
    "qwen3_8b": ("Qwen/Qwen3-8B", "qwen3_8b"),
}


def set_student(config: ConfigDict, name: str) -> None:
    """Makes `name` the model that is trained."""
    config.model.source, config.model.preset = MODELS[name]


def set_teacher(config: ConfigDict, name: str) -> None:
    """Makes `name` the teacher; without this the student at its start is."""
    config.teacher.source, config.teacher.preset = MODELS[name]
