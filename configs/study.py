"""The laptop study: which anchor does what, over methods, tasks and seeds, on SmolLM2-135M-Instruct in float32.

    bash launch/study.sh --quick        # one task, one seed, four methods
    bash launch/study.sh                # all; docs/study.md tells what is measured and how long it takes

A setting is a task, and with a plus one of the METHODS: `configs/study.py:plural+gated`. Values are those of
conventions.py, but for what is said here.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import conventions
from configs.ablations import ABLATIONS, check_setting

# Task (a convention) -> other contexts for retention, of which a method takes the first one or all three. None is
# `first_letter`, which is tested on all tasks: whether a context is still followed that no training has seen.
TASKS: Mapping[str, tuple[str, ...]] = {
    "plural": ("category", "twice", "capitals"),
    "category": ("plural", "twice", "capitals"),
    "twice": ("plural", "category", "capitals"),
}
_WARMUP = {"anchor.schedule": "warmup", "anchor.start_step": 10, "anchor.warmup_steps": 10}
_GATED = {"anchor.schedule": "gated", "anchor.tau": 0.25}  # the default's temperature, in nats
# Without more said the anchor is constant and beta 0.5. "others" is how many contexts retention takes.
METHODS: Mapping[str, Mapping[str, Any]] = {
    # The model before training is the same for all: one evaluation of each task and seed says what it does.
    "opd": {"anchor.beta": 0.0, "evaluation.at_start": True},
    "nca_0.5": {},  # the paper's
    "gated": _GATED,
    "gated_retention_0.5": {**_GATED, "retention.gamma": 0.5, "others": 1},
    "warmup": _WARMUP,
    "opd_retention": {"anchor.beta": 0.0, "retention.gamma": 0.5, "others": 1},
    "nca_0.1": {"anchor.beta": 0.1},
    "nca_1.0": {"anchor.beta": 1.0},
    "gated_1.0": {**_GATED, "anchor.tau": 1.0},  # four times as lenient
    "gated_retention_0.1": {**_GATED, "retention.gamma": 0.1, "others": 1},
    "gated_retention_0.5_three": {**_GATED, "retention.gamma": 0.5, "others": 3},
    "dual": ABLATIONS["dual"],
    "symmetric": ABLATIONS["symmetric"],
}
_KEPT = ("opd", "nca_0.5", "gated")  # those that are looked into afterwards, by nca_jax.analysis
# The same three at twice the learning rate of the others.
AT_TWICE_THE_RATE: Mapping[str, Mapping[str, Any]] = {
    f"{method}_at_1e-4": {**METHODS[method], "optimizer.learning_rate": 1e-4} for method in _KEPT
}


_ALL = ["--settings=" + ",".join(TASKS), "--ablations=" + ",".join(METHODS), "--vary=seed=0,1,2"]
# What `python -m nca_jax.study --grid=NAME` stands for. Weights are 1.6 GB a run.
GRIDS: Mapping[str, list[str]] = {
    "full": [*_ALL, *(f"--keep-checkpoints=setting=plural,ablation={method},seed=0" for method in _KEPT)],
    "quick": [
        "--settings=plural",
        "--ablations=opd,nca_0.5,gated,gated_retention_0.5",
        "--vary=seed=0",
        "--keep-checkpoints=none",
    ],
    "rate": [
        "--settings=plural,twice",
        "--ablations=" + ",".join(AT_TWICE_THE_RATE),
        "--vary=seed=1",
        "--keep-checkpoints=none",
    ],
}


def seconds(config: ConfigDict) -> float:
    """About what a run takes, on the two CPU cores on which it was measured; for the estimate before any has run.

    Start and compilation; a step with its rollout, and what anchor and retention add; an evaluation of an item in a
    view.
    """
    step = 2.0 + 1.2 * bool(config.anchor.beta) + 1.7 * bool(config.retention.gamma)
    views = 2 + len(config.evaluation.contexts)
    items = config.evaluation.max_items
    evaluations = -(-config.steps // config.evaluation.every) + bool(config.evaluation.at_start)
    return 25 + config.steps * step + evaluations * views * items * 0.04


def get_config(setting: str = "plural") -> ConfigDict:
    """`setting` is a task, and perhaps a method: "plural+gated".

    Raises:
      ValueError: there is no such task or method.
    """
    task, _, method = setting.partition("+")
    check_setting(task, TASKS)
    config = conventions.get_config(task)
    config.anchor.schedule = "constant"  # as in the paper

    config.evaluation.every = 5  # what happens on the way is the question
    config.evaluation.at_start = False  # see opd
    config.evaluation.max_items = 64  # held-out words; `category` has no more
    config.evaluation.batch_size = 64
    config.evaluation.contexts = ("paraphrased", "shortened", "other_task")

    config.data.length_multiple = 10  # what follows the common tokens is 7 to 10
    config.checkpoint.every = config.steps  # 1.6 GB each; a run that is stopped begins again
    config.checkpoint.keep = 1
    config.log.samples_every = 10 * config.steps  # none: every answer is in the item lines
    config.log.figures = False  # time
    if method:
        known = {**METHODS, **AT_TWICE_THE_RATE}
        if method not in known:
            raise ValueError(f"no method {method!r}; choose among {', '.join(known)}.")
        values = dict(known[method])
        if others := values.pop("others", 0):
            config.retention.contexts = TASKS[task][:others]
        config.update_from_flattened_dict(values)
    return config
