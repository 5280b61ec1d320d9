"""What the settings of FrozenLake and Sokoban share: games of at most five turns, each turn an example."""

from ml_collections import ConfigDict

from configs import base
from configs.ablations import ablate
from configs.models import set_student


def game_config(domain: str, student: str, *, ablations: list[str]) -> ConfigDict:
    """The config of a game with that student."""
    config = base.get_config()
    config.domain.name = domain
    config.domain.settings.max_turns = 5  # [C]
    config.domain.settings.train_boards = 1000
    config.domain.settings.validation_boards = 128  # held-out games [C]; the reference has one set for all purposes
    config.domain.settings.test_boards = 128
    config.domain.settings.board_seed = 0
    set_student(config, student)
    if student in ("smollm2_135m", "tiny"):
        _make_small(config)
        if student == "tiny":
            _make_tiny(config)
    else:
        _make_reference(config)
    return ablate(config, ablations)


def _make_reference(config: ConfigDict) -> None:
    config.batch_size = 64  # environments a step [C]
    config.accumulation = 0  # of 64 x 5 turns one a device at a time
    config.data.max_prompt_tokens = 10_240  # experience of at most 8192 [C], and five boards
    config.data.length_multiple = 256
    config.rollout.max_new_tokens = 1024  # a turn [C]
    config.rollout.temperature = 0.7  # [C]
    config.evaluation.max_items = 128  # games [C]
    config.evaluation.batch_size = 64
    config.evaluation.temperature = 0.7  # [C]
    config.evaluation.top_p = 0.8  # [C]
    config.evaluation.top_k = 20  # [C]


def _make_small(config: ConfigDict) -> None:
    """A laptop's CPU: a few games a step, answers of a line."""
    config.steps = 6
    config.batch_size = 4
    config.accumulation = 5  # so that games that end early save time
    config.data.max_prompt_tokens = 3072
    config.data.length_multiple = 256
    config.rollout.max_new_tokens = 24
    config.rollout.temperature = 0.7
    config.optimizer.learning_rate = 5e-5
    config.optimizer.schedule = "linear"
    config.optimizer.b2 = 0.99
    config.evaluation.max_items = 16
    config.evaluation.batch_size = 16
    config.evaluation.temperature = 0.7
    config.evaluation.top_p = 0.8
    config.checkpoint.every = 10
    config.log.samples_every = 3
    config.log.samples = 2


def _make_tiny(config: ConfigDict) -> None:
    """Random weights: everything runs, nothing is learned."""
    config.steps = 4
    config.batch_size = 2
    config.data.length_multiple = 512  # a byte is a token
    config.rollout.max_new_tokens = 8
    config.optimizer.learning_rate = 1e-3
    config.evaluation.max_items = 4
    config.evaluation.batch_size = 4
    config.log.samples_every = 2
