"""MedMCQA with a system prompt: four reference settings, and two for a laptop.

    python -m nca_jax.data.prepare --domain=medmcqa --source=YOUR_COPY --data_dir=data
    python -m nca_jax.main --config=configs/medmcqa.py:llama3_2_3b --config.domain.settings.data_dir=data

| setting | model | smallest TPU v5e | GiB of 15.75 | a step | 50 steps |
|---|---|---|---|---|---|
| `llama3_2_3b` (default) | Llama-3.2-3B-Instruct | 2x4 | 12.2 | 14 s | 12 min |
| `llama3_1_8b` | Llama-3.1-8B-Instruct | 4x4 | 15.0 | 15 s | 12 min |
| `qwen2_5_7b` | Qwen2.5-7B-Instruct | 4x4 | 13.3 | 15 s | 12 min |
| `qwen3_8b` | Qwen3-8B | 4x4 | 15.6 | 15 s | 12 min |
| `smollm2_135m` | SmolLM2-135M-Instruct | a laptop: 2.4 GB | | | 10 steps; 2 took 4 minutes on 2 busy cores |
| `tiny` | random weights | anything | | | a minute, 4 steps |

GiB: what a device needs at its fullest, as the TPU's compiler says for the longest prompts and responses that the
config lets pass. Times: estimates from shapes, with all responses the longest. Both by `python -m nca_jax.plan`;
nothing has run on a TPU. Compilation and evaluations come on top. Other chips: docs/scaling.md.

From OPCD's code: 128 prompts a step, one response of at most 512 tokens each at temperature 1, 50 steps, AdamW,
evaluated on 500 held-out questions once at temperature 1, top-p 0.95, top-k 20. From notes on NCA: beta 0.5, the
student's top 256 renormalised. Inferred: that Llama-3.1-8B is the fourth model; which models take 1e-6; no thinking
for Qwen3; the context, which is ours (`--config.context.file=` takes yours, `nca_jax.domains.select_context` compares
several).

Ablations are added with a plus, `:qwen3_8b+dual`: see ablations.py. `smollm2_135m` and `tiny` use the made-up
questions that ship, unless a data_dir is given.
"""

from ml_collections import ConfigDict

from configs.questions import question_config


def get_config(setting: str = "llama3_2_3b") -> ConfigDict:
    """`setting` is one of the table's, and ablations."""
    return question_config("medmcqa", setting)
