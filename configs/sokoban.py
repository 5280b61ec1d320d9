"""Sokoban, 6 x 6 with 1 box, with experience as the context: two reference settings, and two for a laptop.

    python -m nca_jax.domains.experience --config=configs/sokoban.py:self
    python -m nca_jax.main --config=configs/sokoban.py:self \\
        --config.context.file=experience/sokoban_self/context.json

| setting | student | teacher | smallest TPU v5e | GiB of 15.75 | a step | 50 steps |
|---|---|---|---|---|---|---|
| `self` (default) | Qwen3-4B-Instruct-2507 | the same | 4x4 | 14.6 | 106 s | 90 min |
| `cross` | Qwen3-4B, not thinking | Qwen3-8B | 4x4 | 14.9 | 111 s | 90 min |
| `smollm2_135m` | SmolLM2-135M-Instruct | the same | a laptop: 2.4 GB | | | 6 steps, not timed |
| `tiny` | random weights | the same | anything | | | a minute, 4 steps |

GiB: what a device needs at its fullest, as the TPU's compiler says for the longest prompts and responses that the
config lets pass. Times: estimates from shapes, with all responses the longest. Both by `python -m nca_jax.plan`;
nothing has run on a TPU. Compilation and evaluations come on top. Other chips: docs/scaling.md.

Values as in frozenlake.py. Inferred: the cross setting, both of its models, and that neither thinks. Boards are
random, and each is proved to be winnable within five turns; those of the reference are not (about one in eight needs
more).

Other boards: `--config.domain.settings.height=8`, `width`, `boxes`, `max_turns`, or
`--config.domain.settings.levels=FILE`, in the standard level format, of which those that cannot be won in time are
left out and listed.

Without `context.file` the context is four items written by people. Ablations are added with a plus: see ablations.py.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs.ablations import check_setting, split_setting
from configs.games import game_config
from configs.models import set_teacher

_STUDENTS = {"self": "qwen3_4b_2507", "cross": "qwen3_4b", "smollm2_135m": "smollm2_135m", "tiny": "tiny"}


def get_config(setting: str = "self") -> ConfigDict:
    """`setting` is one of the table's, and ablations."""
    name, ablations = split_setting(setting)
    check_setting(name, _STUDENTS)
    config = game_config("sokoban", _STUDENTS[name], ablations=ablations)
    config.domain.settings.height = 6  # walls included [C]
    config.domain.settings.width = 6
    config.domain.settings.boxes = 1  # [C]
    config.domain.settings.levels = placeholder(str)  # a level file instead of random boards
    if name in ("self", "cross"):
        config.optimizer.learning_rate = 5e-6  # [C]; 1e-6 for larger models
    if name == "cross":
        config.chat.template_kwargs.enable_thinking = False  # [I]
        set_teacher(config, "qwen3_8b")  # [I]
    return config
