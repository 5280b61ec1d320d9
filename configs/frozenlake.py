"""FrozenLake, 3 x 3 with 2 holes, with experience as the context: two reference settings, and two for a laptop.

    python -m nca_jax.domains.experience --config=configs/frozenlake.py:self
    python -m nca_jax.main --config=configs/frozenlake.py:self \\
        --config.context.file=experience/frozenlake_self/context.json

| setting | student | teacher | smallest TPU v5e | GiB of 15.75 | a step | 50 steps |
|---|---|---|---|---|---|---|
| `self` (default) | Qwen3-1.7B, thinking | the same | 2x4 | 12.0 | 104 s | 90 min |
| `cross` | Qwen3-1.7B, thinking | Qwen3-4B | 2x4 | 12.8 | 116 s | 95 min |
| `smollm2_135m` | SmolLM2-135M-Instruct | the same | a laptop: 2.4 GB | | | 6 steps: 10 minutes on 2 busy cores |
| `tiny` | random weights | the same | anything | | | a minute, 4 steps |

GiB: what a device needs at its fullest, as the TPU's compiler says for the longest prompts and responses that the
config lets pass. Times: estimates from shapes, with all responses the longest. Both by `python -m nca_jax.plan`;
nothing has run on a TPU. Compilation and evaluations come on top. Other chips: docs/scaling.md.

From OPCD's code: 64 games a step of at most five turns, every turn an example of at most 1024 tokens at temperature
0.7, 50 steps; evaluated on 128 games, once, at temperature 0.7, top-p 0.8, top-k 20; experience of at most 8192
tokens. From notes on NCA: the cross setting, beta 0.5, the student's top 256 renormalised. Inferred: which Qwen3-4B
teaches.

The reference's 3 x 3 boards with 2 holes are only 19 that can be won, so its training and test games share boards,
and it picked experience and checkpoint on the test games. Here no board is in two splits; held-out games repeat the
few held-out boards with other random numbers, and experience is picked on validation boards. For more boards:
`--config.domain.settings.size=4 --config.domain.settings.holes=3 --config.domain.settings.max_turns=8`.

Without `context.file` the context is four items written by people. Ablations are added with a plus: see ablations.py.
"""

from ml_collections import ConfigDict

from configs.ablations import check_setting, split_setting
from configs.games import game_config
from configs.models import set_teacher

_STUDENTS = {"self": "qwen3_1_7b", "cross": "qwen3_1_7b", "smollm2_135m": "smollm2_135m", "tiny": "tiny"}


def get_config(setting: str = "self") -> ConfigDict:
    """`setting` is one of the table's, and ablations."""
    name, ablations = split_setting(setting)
    check_setting(name, _STUDENTS)
    config = game_config("frozenlake", _STUDENTS[name], ablations=ablations)
    config.domain.settings.size = 3  # rows and columns [C]
    config.domain.settings.holes = 2  # [C]
    if name in ("self", "cross"):
        config.optimizer.learning_rate = 5e-6  # [C]
        config.chat.template_kwargs.enable_thinking = True  # [C]
    if name == "cross":
        set_teacher(config, "qwen3_4b")  # [N]; the hybrid one, whose template is the student's: inferred
    return config
