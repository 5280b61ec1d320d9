"""MedMCQA with a system prompt: four reference settings, and two for a laptop.

    python -m nca_jax.data.prepare --domain=medmcqa --source=YOUR_COPY --data_dir=data
    python -m nca_jax.main --config=configs/medmcqa.py:llama3_2_3b --config.domain.settings.data_dir=data

| setting | model | meant for | static bytes a chip | a step | 50 steps, 6 evaluations |
|---|---|---|---|---|---|
| `llama3_2_3b` (default) | Llama-3.2-3B-Instruct | TPU v5e-16 | 3.6 GB | 4 s | 10 min |
| `llama3_1_8b` | Llama-3.1-8B-Instruct | TPU v5e-16 | 9.0 GB | 11 s | 15 min |
| `qwen2_5_7b` | Qwen2.5-7B-Instruct | TPU v5e-16 | 8.6 GB | 11 s | 15 min |
| `qwen3_8b` | Qwen3-8B | TPU v5e-16 | 9.2 GB | 11 s | 15 min |
| `smollm2_135m` | SmolLM2-135M-Instruct | a laptop | 2.4 GB | | 10 steps; 2 took 4 minutes on 2 busy cores |
| `tiny` | random weights | anything | | | a minute, 4 steps |

Bytes: 16 for each of the student's parameters (float32 master, both Adam moments, gradient) and 2 for each of the
teacher's, over 16 chips of 16 GB; activations come on top. Times are estimates, nothing has run on a TPU: a step's
FLOPs at 40 % of the chips' peak; for rollouts and evaluations 4 to 5 ms a token, which is reading a chip's share of
the weights and two reductions a layer. Compilation, minutes, comes on top.

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
