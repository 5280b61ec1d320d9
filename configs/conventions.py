"""The embedded default: SmolLM2-135M-Instruct learns an answer convention that only its context tells.

    python -m nca_jax.models.packaged
    python -m nca_jax.main --config=configs/conventions.py            # plural: shows the harm and the anchor
    python -m nca_jax.main --config=configs/conventions.py:category   # clean internalisation

Hardware, time and scores: see README.md. Everything that departs from the reference settings has its reason here.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(convention: str = "plural") -> ConfigDict:
    """`convention` is "plural", "category", "first_letter", "twice" or "capitals"."""
    config = base.get_config()
    config.steps = 25  # enough for a 135M model at this learning rate
    config.batch_size = 8  # a laptop's CPU
    config.model.source = "smollm2_135m_instruct"
    config.model.remat = "dots"  # faster than "full" here, and the memory is there: docs/performance.md

    config.domain.name = "conventions"
    config.domain.settings.convention = convention
    config.domain.settings.other_task = "plural" if convention == "first_letter" else "first_letter"

    config.rollout.max_new_tokens = 8  # the answers are 1 to 6 tokens
    config.loss.support = "full"  # 64 response positions a step: no need to save on the vocabulary
    config.anchor.schedule = "gated"  # constant from step 0 pulls q_c to a q_x that has not learned yet

    config.optimizer.learning_rate = 5e-5  # small model, few steps
    config.optimizer.schedule = "linear"  # to 0: the end is not a matter of the last batch
    config.optimizer.b2 = 0.99  # 25 steps are too few for 0.999
    config.optimizer.weight_decay = 0.0

    config.evaluation.temperature = 0.0  # greedy: so few items leave no room for sampling noise
    config.evaluation.top_p = 1.0
    config.evaluation.top_k = 0
    config.evaluation.contexts = ("paraphrased", "other_task")
    config.evaluation.every = 15  # before, in the middle, after
    config.checkpoint.every = 10  # 1.6 GB each
    return config
