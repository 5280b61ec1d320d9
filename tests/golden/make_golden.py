"""Independent reference numbers for nca_jax, computed with torch and transformers.

The tests read the files beside this script and never run it. To make them again, use a virtual environment of its own
(the library itself does not depend on torch):

    python3 -m venv golden_env
    golden_env/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    golden_env/bin/python tests/golden/make_golden.py

Models run in float32 on one CPU thread with eager attention; divergences are computed in float64 from their logits.
Every example is run alone and unpadded, so there is no mask that could be wrong. All random numbers come from numpy's
PCG64 in a fixed order. README.md in this folder describes every array.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Tensors = dict[str, torch.Tensor]

VOCABULARY = 160
BETA = 0.5
GATE_TAU = 0.25
TEMPERATURE = 0.7
TOP_K = 8
EMBED = "model.embed_tokens.weight"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"
DOWN_PROJ = "model.layers.0.mlp.down_proj.weight"
FINAL_NORM = "model.norm.weight"

SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


# --- models ---------------------------------------------------------------------------------------------------------


def build(kind: str, seed: int) -> PreTrainedModel:
    """A random float32 model; weights are drawn in the sorted order of their names."""
    if kind == "llama3":
        config = LlamaConfig(**SHAPE, head_dim=16, rope_parameters=dict(LLAMA3_ROPE), tie_word_embeddings=True)
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
        # config.json names one end token, generation_config.json two and sampling settings, as published Llamas do.
        model.generation_config = GenerationConfig(
            bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0, do_sample=True, temperature=0.6, top_p=0.9
        )
    elif kind == "smollm2":
        shape = SHAPE | dict(hidden_size=48, num_attention_heads=6)
        rope = DEFAULT_ROPE | dict(rope_theta=1e5)
        config = LlamaConfig(**shape, rope_parameters=rope, tie_word_embeddings=True)
        model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    elif kind == "qwen2":
        config = Qwen2Config(**SHAPE, rope_parameters=dict(DEFAULT_ROPE), tie_word_embeddings=False)
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
    else:
        config = Qwen3Config(**SHAPE, head_dim=16, rope_parameters=dict(DEFAULT_ROPE), tie_word_embeddings=True)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager")
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)))
            parameter.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model.float().eval()


def save_and_reload(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Later numbers come from the model as read back from its files."""
    model.save_pretrained(directory)
    stored = load_file(directory / "model.safetensors")
    assert ("lm_head.weight" in stored) != model.config.tie_word_embeddings, "a tied head is not in the file"
    loaded = type(model).from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    for (name, old), (other, new) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and torch.equal(old, new), name
    return loaded


def perturbed(student: PreTrainedModel, seed: int) -> PreTrainedModel:
    teacher = build("llama3", seed=0)
    teacher.load_state_dict(student.state_dict())
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for _, parameter in sorted(teacher.named_parameters()):
            parameter += 0.05 * torch.from_numpy(rng.standard_normal(tuple(parameter.shape))).float()
    return teacher


def make_forward_fixture(model: PreTrainedModel, directory: Path, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (2, 96)).astype(np.int32)
    with torch.no_grad():
        batch = model(torch.from_numpy(tokens).long()).logits
        rows = torch.cat([model(torch.from_numpy(row[None]).long()).logits for row in tokens])
    torch.testing.assert_close(batch, rows, rtol=1e-5, atol=2e-5)
    np.savez_compressed(directory / "fixture.npz", tokens=tokens, logits=rows.numpy())


def check_sensitive(model: PreTrainedModel, directory: Path) -> None:
    """Each trait that a loader could lose changes the logits visibly."""
    data = np.load(directory / "fixture.npz")
    tokens, logits = torch.from_numpy(data["tokens"]).long(), torch.from_numpy(data["logits"])
    traits = [
        name for name, _ in model.named_parameters() if name.endswith((".bias", "q_norm.weight", "k_norm.weight"))
    ]
    with torch.no_grad():
        for name in traits:
            parameter = model.get_parameter(name)
            kept = parameter.clone()
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            change = (model(tokens).logits - logits).abs().max().item()
            parameter.copy_(kept)
            # A key bias is nearly invisible (softmax ignores what all keys share), save through the rotation.
            assert change > 1e-2, (name, change)
        if model.config.rope_parameters["rope_type"] == "llama3":
            other = type(model.config)(**{**model.config.to_dict(), "rope_parameters": {**LLAMA3_ROPE, "factor": 1.0}})
            unscaled = LlamaForCausalLM._from_config(other, attn_implementation="eager").eval()
            unscaled.load_state_dict(model.state_dict())
            assert (unscaled(tokens).logits - logits).abs().max() > 0.1
        assert torch.equal(model(tokens[:1]).logits, logits[:1])


# --- divergences, over the last axis, float64 ------------------------------------------------------------------------


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """KL(a || b) of two arrays of log-probabilities."""
    return (a.exp() * (a - b)).sum(-1)


def full(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def renormalised(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.double().gather(-1, ids).log_softmax(-1)


def with_tail(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the ids, then of one bucket that holds all the others."""
    log_probs = full(logits)
    others = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, ids), others], -1)


def jsd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    middle = torch.logaddexp(a, b) - math.log(2)
    return 0.5 * kl(a, middle) + 0.5 * kl(b, middle)


def check_divergences() -> None:
    """Four-way distributions whose values are known from the closed forms."""
    s = torch.tensor([2.0, 1, 0, -1], dtype=torch.float64)
    t = torch.tensor([0.0, 2, 1, 0], dtype=torch.float64)
    ids = s.topk(2).indices
    for value, right in [
        (kl(full(s), full(t)), 0.9853647902),
        (kl(full(t), full(s)), 0.6985943712),
        (jsd(full(s), full(t)), 0.1871708968),
        (kl(full(s / 2), full(t / 2)), 0.2463715670),
        (kl(renormalised(s, ids), renormalised(t, ids)), 1.006842),
        (kl(with_tail(s, ids), with_tail(t, ids)), 0.985365),
    ]:
        assert abs(value.item() - right) < 1e-6, (value.item(), right)


# --- one step --------------------------------------------------------------------------------------------------------


def step_inputs(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    own_lengths, response_lengths = np.array([4, 9, 6], np.int32), np.array([5, 1, 3], np.int32)
    header, context = rng.integers(4, VOCABULARY, 5), rng.integers(4, VOCABULARY, 20)
    own, response = np.zeros((3, 9), np.int32), np.zeros((3, 5), np.int32)
    for row in range(3):
        own[row, : own_lengths[row]] = rng.integers(4, VOCABULARY, own_lengths[row])
        response[row, : response_lengths[row]] = rng.integers(4, VOCABULARY, response_lengths[row])
    response[0, 4] = response[2, 2] = SHAPE["eos_token_id"]
    return dict(
        header=header.astype(np.int32),
        context=context.astype(np.int32),
        own_BxP=own,
        own_length_B=own_lengths,
        response_BxR=response,
        response_length_B=response_lengths,
    )


def views(inputs: dict[str, np.ndarray], row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """No-context prompt, with-context prompt and response of one example, unpadded."""
    own = inputs["own_BxP"][row, : inputs["own_length_B"][row]]
    response = inputs["response_BxR"][row, : inputs["response_length_B"][row]]
    return np.concatenate([inputs["header"], own]), np.concatenate([inputs["context"], own]), response


def response_logits(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """[R, V]: the logits at position len(prompt) - 1 + r predict response token r."""
    tokens = torch.from_numpy(np.concatenate([prompt, response])).long()
    logits = model(tokens[None]).logits[0]
    return torch.stack([logits[len(prompt) - 1 + r] for r in range(len(response))])


def terms_of_example(
    student: PreTrainedModel, teacher: PreTrainedModel, inputs: dict[str, np.ndarray], row: int
) -> tuple[Tensors, torch.Tensor]:
    """Every per-token term [R] of one example, and the top ids [R, K] of the student's no-context view."""
    plain_prompt, context_prompt, response = views(inputs, row)
    s = response_logits(student, plain_prompt, response)
    c = response_logits(student, context_prompt, response)
    with torch.no_grad():
        t = response_logits(teacher, context_prompt, response)
        ranked = s.double().sort(-1, descending=True)
        ids = ranked.indices[:, :TOP_K]
        gap = (ranked.values[:, TOP_K - 1] - ranked.values[:, TOP_K]).min()
        assert gap > 1e-3, f"the top-k edge of example {row} is a near tie ({gap}): choose another seed"
    fixed = s.detach()
    q_x, q_c, f = full(s), full(c), full(t)
    opd = kl(q_x, f)
    anchor = kl(full(fixed), q_c)
    gate = torch.exp(-opd.detach() / GATE_TAU)
    opd_top8 = kl(renormalised(s, ids), renormalised(t, ids))
    anchor_top8 = kl(renormalised(fixed, ids), renormalised(c, ids))
    terms = dict(
        opd=opd,
        anchor=anchor,
        anchor_to_teacher=kl(f, q_x),
        jsd=jsd(q_x, f),
        gate=gate,
        nca_const=opd + BETA * anchor,
        nca_gated=opd + BETA * gate * anchor,
        opd_temp07=kl(full(s / TEMPERATURE), full(t / TEMPERATURE)),
        opd_top8=opd_top8,
        opd_top8_tail=kl(with_tail(s, ids), with_tail(t, ids)),
        anchor_top8=anchor_top8,
        nca_top8=opd_top8 + BETA * anchor_top8,
    )
    return terms, ids


GRADIENT_CASES = ["opd", "nca_const", "nca_gated", "opd_temp07", "opd_top8", "opd_top8_tail", "nca_top8"]
NORM_ONLY_CASES = ["anchor", "anchor_to_teacher", "jsd", "anchor_top8"]


def token_mean(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows).mean()


def sequence_mean(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([row.mean() for row in rows]).mean()


def gradient(
    student: PreTrainedModel, teacher: PreTrainedModel, inputs: dict[str, np.ndarray], case: str, reduce: Callable
) -> Tensors:
    student.zero_grad(set_to_none=True)
    reduce([terms_of_example(student, teacher, inputs, row)[0][case] for row in range(3)]).backward()
    return {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


def global_norm(gradients: Tensors) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))


def adamw_step(student: PreTrainedModel, gradients: Tensors) -> Tensors:
    """Parameters after one clipped AdamW step; the student itself is left as it was."""
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    for name, parameter in student.named_parameters():
        parameter.grad = gradients[name].clone()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    after = {name: p.detach().clone() for name, p in student.named_parameters()}
    norm = global_norm(gradients)
    assert norm > 1, "the clip would be untested"
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            parameter.copy_(before[name])
            g = gradients[name].double() / norm
            by_hand = before[name].double() * (1 - 1e-3 * 0.01) - 1e-3 * g / (g.abs() + 1e-8)
            # The first step is lr * sign(g) but where |g| nears eps, so only there may the two differ at all.
            torch.testing.assert_close(after[name].double(), by_hand, rtol=1e-6, atol=1e-6)
    student.zero_grad(set_to_none=True)
    return after


def check_step(
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    inputs: dict[str, np.ndarray],
    terms: list[Tensors],
    gradients: dict[str, Tensors],
) -> None:
    # An example in a right-padded batch is the example alone: causal attention never looks at what follows.
    for model, view in [(student, 0), (student, 1), (teacher, 1)]:
        rows = [np.concatenate([views(inputs, row)[view], views(inputs, row)[2]]) for row in range(3)]
        padded = np.zeros((3, max(map(len, rows))), np.int64)
        for row, tokens in enumerate(rows):
            padded[row, : len(tokens)] = tokens
        with torch.no_grad():
            batch = model(torch.from_numpy(padded)).logits
            for row in range(3):
                prompt, response = views(inputs, row)[view], views(inputs, row)[2]
                alone = response_logits(model, prompt, response)
                start = len(prompt) - 1
                torch.testing.assert_close(batch[row, start : start + len(response)], alone, rtol=1e-5, atol=2e-5)
    for row in terms:
        assert all((row[name] > 0).all() for name in row), "every term is strictly positive"
        assert (row["jsd"] < math.log(2)).all()
        assert (row["opd_top8_tail"] < row["opd"]).all(), "merging outcomes cannot raise a KL"
    # Tolerances of 1e-3 relative tell every case from every other.
    for one, other in itertools.combinations(GRADIENT_CASES, 2):
        assert abs(global_norm(gradients[one]) / global_norm(gradients[other]) - 1) > 2e-3, (one, other)
        difference = gradients[one][EMBED] - gradients[other][EMBED]
        assert difference.norm() > 0.02 * gradients[other][EMBED].norm(), (one, other)
    # The loss is a sum, so its gradient is one too.
    for name in gradients["opd"]:
        for nca, opd, anchor in [("nca_const", "opd", "anchor"), ("nca_top8", "opd_top8", "anchor_top8")]:
            total = gradients[opd][name] + BETA * gradients[anchor][name]
            torch.testing.assert_close(gradients[nca][name], total, rtol=1e-4, atol=1e-5)
    # d KL(q||f) / ds = q * (log q - log f - KL), and d KL(sg q||c) / dc = c - q; checked on the logits of example 0.
    plain_prompt, context_prompt, response = views(inputs, 0)
    with torch.no_grad():
        s, c = (response_logits(student, prompt, response).double() for prompt in (plain_prompt, context_prompt))
        t = response_logits(teacher, context_prompt, response).double()
    s.requires_grad_()
    c.requires_grad_()
    q, f = full(s).detach(), full(t)
    by_autograd = torch.autograd.grad(kl(full(s), full(t)).sum(), s)[0]
    torch.testing.assert_close(by_autograd, q.exp() * (q - f - kl(q, f)[:, None]))
    by_autograd = torch.autograd.grad(kl(full(s.detach()), full(c)).sum(), c)[0]
    torch.testing.assert_close(by_autograd, full(c).detach().exp() - q.exp())
    # The slope of the OPD loss along its own gradient is the gradient's norm.
    norm, epsilon, losses = global_norm(gradients["opd"]), 2e-3, []
    with torch.no_grad():
        before = {name: p.clone() for name, p in student.named_parameters()}
        for sign in (1, -1):
            for name, parameter in student.named_parameters():
                parameter.copy_(before[name] + sign * epsilon * gradients["opd"][name] / norm)
            rows = [terms_of_example(student, teacher, inputs, row)[0]["opd"] for row in range(3)]
            losses.append(token_mean(rows).item())
        for name, parameter in student.named_parameters():
            parameter.copy_(before[name])
    slope = (losses[0] - losses[1]) / (2 * epsilon)
    assert abs(slope / norm - 1) < 2e-3, (slope, norm)


def make_step(student: PreTrainedModel, teacher: PreTrainedModel, path: Path) -> None:
    inputs = step_inputs(seed=154)  # chosen: gates spread over .009 to .275 and no top-k edge is a near tie
    out: dict[str, np.ndarray] = dict(inputs)

    with torch.no_grad():
        examples = [terms_of_example(student, teacher, inputs, row) for row in range(3)]
    terms = [example[0] for example in examples]
    out["top8_ids"] = np.zeros((3, 5, TOP_K), np.int32)
    for row, (_, ids) in enumerate(examples):
        out["top8_ids"][row, : len(ids)] = ids.numpy()
    for name in terms[0]:
        out[name] = np.zeros((3, 5), np.float64)
        for row in range(3):
            out[name][row, : len(terms[row][name])] = terms[row][name].numpy()
        if name != "gate":
            rows = [terms[row][name] for row in range(3)]
            out[f"{name}_token_mean"] = np.float64(token_mean(rows).item())
            out[f"{name}_sequence_mean"] = np.float64(sequence_mean(rows).item())

    gradients = {}
    for case in GRADIENT_CASES + NORM_ONLY_CASES:
        gradients[case] = gradient(student, teacher, inputs, case, token_mean)
        out[f"grad_norm_{case}"] = np.float64(global_norm(gradients[case]))
    for case in ("opd", "nca_const"):
        by_sequence = gradient(student, teacher, inputs, case, sequence_mean)
        out[f"grad_norm_{case}_sequence_mean"] = np.float64(global_norm(by_sequence))
    for case in GRADIENT_CASES:
        out[f"grad_embed_{case}"] = gradients[case][EMBED].numpy()
        out[f"grad_k_proj_{case}"] = gradients[case][K_PROJ].numpy()

    after = adamw_step(student, gradients["nca_const"])
    out["adamw_down_proj"] = after[DOWN_PROJ].numpy()
    out["adamw_norm"] = after[FINAL_NORM].numpy()

    check_step(student, teacher, inputs, terms, gradients)
    np.savez_compressed(path, **out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden files.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write (default: this one)")
    root = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    check_divergences()
    models = {}
    for seed, kind in enumerate(["llama3", "qwen2", "qwen3", "smollm2"], start=1):
        models[kind] = save_and_reload(build(kind, seed), root / kind)
        make_forward_fixture(models[kind], root / kind, seed=10 + seed)
        check_sensitive(models[kind], root / kind)
    teacher = save_and_reload(perturbed(models["llama3"], seed=20), root / "llama3_teacher")
    make_step(models["llama3"], teacher, root / "step.npz")

    for path in sorted(p for p in root.rglob("*") if p.suffix in (".safetensors", ".npz")):
        size = path.stat().st_size
        assert size < (200_000 if path.name == "step.npz" else 150_000), (path, size)
        print(f"{size:7d}  {path.relative_to(root)}")
    for name, value in np.load(root / "step.npz").items():
        print(f"{name:32s} {value.dtype!s:8s} {value.shape!s:12s} {f'{value:.9f}' if value.ndim == 0 else ''}")


if __name__ == "__main__":
    main()
