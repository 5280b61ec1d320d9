"""The FLOPs from shapes are those of the matrix products that the real step holds."""

import dataclasses
import math

import jax
import pytest

from configs import conventions
from nca_jax.assembly import abstract_inputs, assemble
from nca_jax.flops import Tokens, head_flops, layers_flops, model_flops, rollout_flops, train_step_flops
from nca_jax.models.presets import preset
from nca_jax.sharding import make_mesh

# Wide, so that what plain attention computes of the hidden half of its scores is little beside the rest.
ARCH = dataclasses.replace(preset("tiny_llama3"), hidden_size=512, mlp_size=1024, vocab_size=600)
TOKENS = Tokens(prompt=8, template=4, context=16)


def products(jaxpr) -> float:
    """FLOPs of all matrix products of a traced function, loops and branches included."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
        rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
        inner = []
        for value in equation.params.values():
            values = value if isinstance(value, (list, tuple)) else [value]
            inner += [getattr(v, "jaxpr", v) for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]
        found = [products(j) for j in inner]
        total += rounds * (max(found, default=0.0) if equation.primitive.name == "cond" else sum(found))
    return total


def config_with(**changes):
    config = conventions.get_config()
    config.model.preset = "tiny_llama3"
    config.model.remat = "full"
    config.batch_size, config.rollout.max_new_tokens = 4, 8
    config.retention.gamma, config.retention.contexts = 0.0, ()
    config.mesh.fsdp = 1
    for key, value in changes.items():
        config.update_from_flattened_dict({key.replace("__", "."): value})
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"anchor__beta": 0.0},
        {"anchor__every": 2},
        {"retention__gamma": 0.5, "retention__contexts": ("category",)},
        {"model__remat": "none"},
        {"accumulation": 2},
        {"teacher__kind": "ema"},
    ],
    ids=str,
)
def test_of_a_step_are_those_of_its_program(changes):
    config = config_with(**changes)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    job = assemble(config, ARCH, ARCH, (0,), ARCH.vocab_size, mesh)
    inputs = abstract_inputs(config, job, ARCH, mesh, **TOKENS._asdict())
    counted = products(jax.make_jaxpr(job.train_step)(*inputs).jaxpr)
    assert sum(train_step_flops(config, ARCH, ARCH, TOKENS).values()) == pytest.approx(counted, rel=0.03)


def test_of_an_8b_model_are_twice_its_weights_for_every_token():
    arch = preset("llama3_1_8b")
    # 8,030,261,248 parameters, without both embeddings (128256 x 4096) and the norms (65 x 4096).
    assert layers_flops(arch, 1) == pytest.approx(2 * (8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096), rel=1e-4)
    assert head_flops(arch, 10) == 10 * 2 * 4096 * 128256
    # 4 x 4096 for every key that a query sees, in each of 32 layers.
    assert layers_flops(arch, 1, 1000) - layers_flops(arch, 1) == 1000 * 4 * 4096 * 32


def test_a_rollout_is_one_pass_over_its_tokens():
    arch = preset("qwen3_1_7b")
    parts = rollout_flops(arch, 8, 100, 50, 200)
    assert sum(parts.values()) == pytest.approx(8 * layers_flops(arch, 150, 200) + head_flops(arch, 800))
    assert parts["prefill"] == 8 * layers_flops(arch, 50, 200)


def test_what_is_computed_twice_is_no_work_of_the_model():
    parts = train_step_flops(config_with(), ARCH, ARCH, TOKENS)
    without = train_step_flops(config_with(model__remat="none"), ARCH, ARCH, TOKENS)
    assert model_flops(parts) == sum(without.values()) and parts["recomputed"] > 0
