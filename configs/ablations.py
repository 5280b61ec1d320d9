"""The method's ablations and its relatives, added to any setting with a plus: `configs/medmcqa.py:qwen3_8b+dual`.

[N] and [C] as in base.py; the last group is ours, see docs/objective.md.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    # the anchor [N]
    "opd": {"anchor.beta": 0.0},  # plain on-policy distillation, the method's own baseline
    "dual": {"anchor.target": "teacher"},  # q_c is tied to the teacher instead of q_x
    "symmetric": {"anchor.divergence": "symmetric_kl", "anchor.stop_gradient": False},
    "reverse": {"anchor.divergence": "reverse_kl"},
    "beta_0.1": {"anchor.beta": 0.1},
    "beta_1.0": {"anchor.beta": 1.0},
    # baselines on the teacher's samples [C]
    "off_policy": {"rollout.policy": "teacher", "loss.divergence": "forward_kl", "anchor.beta": 0.0},
    "sft": {"rollout.policy": "teacher", "loss.divergence": "nll", "anchor.beta": 0.0},
    # support and reduction
    "tail_none": {"loss.tail": "none"},  # OPCD's default [C]
    "tail_bucket": {"loss.tail": "bucket"},  # SDPO
    "full_vocabulary": {"loss.support": "full"},
    "sequence_mean": {"loss.reduction": "sequence"},  # OPCD's equation, where its code takes the token mean [C]
    "entry_clip": {"loss.entry_clip": 1.0},  # OPSD; the bound of 1 nat is ours
    # teachers that follow the student
    "ema_teacher": {"teacher.kind": "ema"},  # SDPO, SDFT; at teacher.ema_rate
    "live_teacher": {"teacher.kind": "live"},
    # ours
    "gated": {"anchor.schedule": "gated"},
    "warmup": {"anchor.schedule": "warmup", "anchor.start_step": 10},
    "retention": {"retention.gamma": 0.5, "retention.contexts": ("brief",)},
}


def split_setting(setting: str) -> tuple[str, list[str]]:
    """ "qwen3_8b+dual+gated" -> ("qwen3_8b", ["dual", "gated"]).

    Raises:
      ValueError: an ablation that there is not.
    """
    name, *ablations = setting.split("+")
    for ablation in ablations:
        if ablation not in ABLATIONS:
            raise ValueError(f"no ablation {ablation!r}; choose among {', '.join(ABLATIONS)}.")
    return name, ablations


def ablate(config: ConfigDict, ablations: list[str]) -> ConfigDict:
    """The config with the ablations' values, the last one last."""
    for ablation in ablations:
        config.update_from_flattened_dict(ABLATIONS[ablation])
    return config


def check_setting(name: str, known: Mapping[str, Any]) -> None:
    """Raises a ValueError for a setting that there is not, with those there are."""
    if name not in known:
        raise ValueError(
            f"no setting {name!r}; choose among {', '.join(known)}, and add ablations as +{next(iter(ABLATIONS))}."
        )
