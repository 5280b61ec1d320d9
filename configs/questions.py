"""What the settings of MedMCQA and Safety share: one prompt, one response, a tag with the answer."""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import base
from configs.ablations import ablate, check_setting, split_setting
from configs.models import set_student

# Setting -> learning rate.
_REFERENCE = {
    "llama3_2_3b": 5e-6,  # [C]
    "llama3_1_8b": 1e-6,  # "for larger models" [C]; that 7B is large is inferred
    "qwen2_5_7b": 1e-6,
    "qwen3_8b": 1e-6,
}
_SMALL = ("smollm2_135m", "tiny")


def question_config(domain: str, setting: str) -> ConfigDict:
    """The config of a setting, ablations included.

    Raises:
      ValueError: there is no such setting or ablation.
    """
    name, ablations = split_setting(setting)
    check_setting(name, dict.fromkeys([*_REFERENCE, *_SMALL]))
    config = base.get_config()
    config.domain.name = domain
    config.domain.settings.data_dir = placeholder(str)  # as given to nca_jax.data.prepare, or "tiny"
    set_student(config, name)
    if name in _REFERENCE:
        config.optimizer.learning_rate = _REFERENCE[name]
        config.accumulation = 0  # of 128 prompts one a device at a time
        config.data.length_multiple = 64  # fewer widths of prompts, fewer compilations
        config.data.max_train_items = 20_000  # 50 steps use 6,400; encoding all 182,822 takes minutes
        config.data.too_long = "skip"  # questions beyond the limit are counted and said
        config.evaluation.batch_size = 128
        if name == "qwen3_8b":
            config.chat.template_kwargs.enable_thinking = False  # 512 tokens are too few to think in; inferred
    else:
        _make_small(config)
    if name == "tiny":
        _make_tiny(config)
    return ablate(config, ablations)


def _make_small(config: ConfigDict) -> None:
    """A laptop's CPU: a few short responses a step."""
    config.domain.settings.data_dir = "tiny"
    config.steps = 10
    config.batch_size = 4
    config.data.max_prompt_tokens = 2048
    config.data.max_train_items = 200
    config.data.too_long = "skip"
    config.rollout.max_new_tokens = 48
    config.optimizer.learning_rate = 5e-5  # small model, few steps
    config.optimizer.schedule = "linear"
    config.optimizer.b2 = 0.99
    config.evaluation.max_items = 24
    config.evaluation.batch_size = 24
    config.checkpoint.every = 10


def _make_tiny(config: ConfigDict) -> None:
    """Random weights: everything runs, nothing is learned."""
    config.steps = 4
    config.rollout.max_new_tokens = 16
    config.optimizer.learning_rate = 1e-3
    config.evaluation.max_items = 8
    config.evaluation.batch_size = 8
    config.log.samples_every = 2
    config.log.samples = 2
