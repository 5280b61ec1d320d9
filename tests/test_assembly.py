"""Every shipped setting is a job that can be built: the twelve of the reference, the small ones, every ablation."""

import importlib

import jax
import pytest

from configs.ablations import ABLATIONS
from nca_jax import settings
from nca_jax.assembly import abstract_inputs, assemble
from nca_jax.errors import UserError
from nca_jax.models.presets import preset
from nca_jax.sharding import make_mesh

# FACTS of the method: models, teachers, examples a step, longest response, rollout temperature.
REFERENCE = {
    ("medmcqa", "llama3_2_3b"): ("Llama-3.2-3B-Instruct", None, 128, 512, 1.0),
    ("medmcqa", "llama3_1_8b"): ("Llama-3.1-8B-Instruct", None, 128, 512, 1.0),
    ("medmcqa", "qwen2_5_7b"): ("Qwen2.5-7B-Instruct", None, 128, 512, 1.0),
    ("medmcqa", "qwen3_8b"): ("Qwen3-8B", None, 128, 512, 1.0),
    ("safety", "llama3_2_3b"): ("Llama-3.2-3B-Instruct", None, 128, 512, 1.0),
    ("safety", "llama3_1_8b"): ("Llama-3.1-8B-Instruct", None, 128, 512, 1.0),
    ("safety", "qwen2_5_7b"): ("Qwen2.5-7B-Instruct", None, 128, 512, 1.0),
    ("safety", "qwen3_8b"): ("Qwen3-8B", None, 128, 512, 1.0),
    ("sokoban", "self"): ("Qwen3-4B-Instruct-2507", None, 320, 1024, 0.7),
    ("sokoban", "cross"): ("Qwen3-4B", "Qwen3-8B", 320, 1024, 0.7),
    ("frozenlake", "self"): ("Qwen3-1.7B", None, 320, 1024, 0.7),
    ("frozenlake", "cross"): ("Qwen3-1.7B", "Qwen3-4B", 320, 1024, 0.7),
}
SMALL = [
    (domain, name) for domain in ("medmcqa", "safety", "frozenlake", "sokoban") for name in ("smollm2_135m", "tiny")
]


def config_of(domain: str, setting: str):
    return importlib.import_module(f"configs.{domain}").get_config(setting)


def step_shapes(config, **mesh_sizes):
    """The train step of a config, as shapes: (state, metrics)."""
    mesh = make_mesh(config.mesh.to_dict() | mesh_sizes)
    student = preset(config.model.preset)
    teacher = preset(config.teacher.preset) if config.teacher.preset else student
    vocab_size = min(student.vocab_size, teacher.vocab_size)
    job = assemble(config, student, teacher, (0,), vocab_size, mesh)
    inputs = abstract_inputs(config, job, teacher, mesh, prompt=256, template=32, context=512)
    return inputs, jax.eval_shape(job.train_step, *inputs)


@pytest.mark.parametrize(("domain", "setting"), REFERENCE, ids=lambda x: x)
def test_the_twelve_settings_build_their_train_step(domain, setting):
    student, teacher, rows, response, temperature = REFERENCE[domain, setting]
    config = config_of(domain, setting)
    settings.check(config)
    assert config.model.source.split("/")[1] == student
    assert (config.teacher.source or "/").split("/")[1] == (teacher or "")
    assert (settings.rows(config), config.rollout.max_new_tokens, config.rollout.temperature) == (
        rows,
        response,
        temperature,
    )
    assert (config.steps, config.anchor.beta, config.loss.top_k, config.loss.tail) == (50, 0.5, 256, "renormalize")
    assert settings.method_name(config) == "nca_constant"
    (state, _, batch), (after, metrics) = step_shapes(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert batch.response_BxR.shape == (rows, response)
    assert {metrics[name].shape for name in ("loss", "opd", "nca", "grad_norm")} == {()}


def test_the_first_reference_setting_is_the_default():
    for domain, first in {
        "medmcqa": "llama3_2_3b",
        "safety": "llama3_2_3b",
        "frozenlake": "self",
        "sokoban": "self",
    }.items():
        module = importlib.import_module(f"configs.{domain}")
        assert module.get_config().to_dict() == module.get_config(first).to_dict()


@pytest.mark.parametrize(("domain", "setting"), SMALL, ids=lambda x: x)
def test_the_small_settings_are_fine(domain, setting):
    settings.check(config_of(domain, setting))


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_ablation_builds_and_differs(name):
    config = config_of("medmcqa", f"tiny+{name}")
    settings.check(config)
    plain, ablated = settings.flatten(config_of("medmcqa", "tiny")), settings.flatten(config)
    assert {key for key in plain if plain[key] != ablated[key]} == set(ABLATIONS[name])
    _, (_, metrics) = step_shapes(config, fsdp=1, data=4, tensor=2)
    assert ("retention" in metrics) == (name == "retention")


def test_ablations_add_up_and_unknown_ones_are_named():
    config = config_of("safety", "qwen3_8b+dual+gated")
    assert (config.anchor.target, config.anchor.schedule, config.model.preset) == ("teacher", "gated", "qwen3_8b")
    with pytest.raises(ValueError, match=r"no ablation 'duel'; choose among opd, dual"):
        config_of("safety", "qwen3_8b+duel")
    for domain in ("safety", "sokoban"):
        with pytest.raises(ValueError, match=r"no setting 'gpt'; choose among"):
            config_of(domain, "gpt")


def test_rows_that_the_mesh_does_not_divide_are_refused():
    config = config_of("medmcqa", "tiny")
    with pytest.raises(
        UserError, match=r"the 4 rows of a micro-batch do not divide over the 8 devices.*batch_size to a multiple of 8"
    ):
        step_shapes(config, data=8, fsdp=1)
