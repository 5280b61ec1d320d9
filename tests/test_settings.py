"""Values that cannot work are named; what continues a run; schedules."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from configs import base, conventions
from nca_jax import settings
from nca_jax.errors import UserError

BAD_VALUES = {
    "at least 1": (
        "steps batch_size accumulation data.max_prompt_tokens rollout.max_new_tokens loss.top_k loss.chunk_size "
        "anchor.warmup_steps evaluation.every evaluation.batch_size evaluation.max_items checkpoint.every "
        "checkpoint.keep log.samples_every log.samples",
        [0, -1],
    ),
    "at least 0": (
        "anchor.beta anchor.start_step rollout.top_k evaluation.top_k evaluation.temperature optimizer.warmup_steps "
        "optimizer.weight_decay",
        [-1],
    ),
    "above 0": (
        "rollout.temperature rollout.top_p evaluation.top_p anchor.tau optimizer.learning_rate optimizer.clip_norm",
        [0.0, -0.5, float("nan")],
    ),
    "at most 1": ("rollout.top_p evaluation.top_p", [1.5]),
    "one of": (
        "model.param_dtype model.compute_dtype model.remat teacher.dtype chat.default_system data.too_long "
        "loss.divergence loss.support loss.tail loss.reduction anchor.schedule optimizer.schedule",
        ["nonsense"],
    ),
    "is not set": ("model.source domain.name", [None]),
}
CASES = [(key, bad, rule) for rule, (keys, values) in BAD_VALUES.items() for key in keys.split() for bad in values]


def config_with(changes=None, **optimizer) -> ConfigDict:
    config = conventions.get_config()
    config.update_from_flattened_dict(changes or {})
    config.optimizer.update(optimizer)
    return config


def rates(steps: int, **optimizer) -> list[float]:
    """The learning rate of step 1, 2, … and, last, of the one after the end."""
    _, schedule = settings.make_optimizer(config_with({"steps": steps}, learning_rate=1.0, **optimizer))
    return [float(schedule(step)) for step in range(steps + 1)]


@pytest.mark.parametrize("convention", ["plural", "category", "first_letter"])
def test_shipped_config_is_fine(convention):
    settings.check(conventions.get_config(convention))


@pytest.mark.parametrize(("key", "value", "rule"), CASES, ids=[f"{key}={bad}" for key, bad, _ in CASES])
def test_a_value_that_cannot_work_is_named(key, value, rule):
    config = config_with()
    with config.ignore_type():
        config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=rf"^config\.{key} .*{rule}"):
        settings.check(config)


def test_base_config_has_no_model_and_no_domain():
    with pytest.raises(UserError, match=r"config\.model\.source is not set"):
        settings.check(base.get_config())


def test_accumulation_must_divide_the_batch():
    settings.check(config_with({"batch_size": 8, "accumulation": 4}))
    with pytest.raises(UserError, match="batch_size 8 does not divide into 3"):
        settings.check(config_with({"batch_size": 8, "accumulation": 3}))


@pytest.mark.parametrize(
    "key", ["seed", "batch_size", "anchor.beta", "optimizer.schedule", "domain.settings.irrelevant"]
)
def test_fingerprint_holds_what_makes_a_run(key):
    assert settings.fingerprint(config_with())[key] == settings.flatten(config_with())[key]


def test_fingerprint_ignores_logs_checkpoints_and_the_mesh():
    changed = config_with({"log.samples": 9, "checkpoint.every": 9, "checkpoint.keep": 9, "mesh.data": 9})
    assert settings.fingerprint(changed) == settings.fingerprint(config_with())


@pytest.mark.parametrize(("schedule", "may"), [("constant", True), ("linear", False), ("cosine", False)])
def test_more_steps_continue_a_run_only_if_the_learning_rate_does_not_depend_on_them(schedule, may):
    short, long = (settings.fingerprint(config_with({"steps": n}, schedule=schedule)) for n in (25, 50))
    assert (short == long) is may


def test_flatten_names_every_leaf():
    config = ConfigDict({"a": 1, "b": {"c": None, "d": {"e": "x"}}})
    assert settings.flatten(config) == {"a": 1, "b.c": None, "b.d.e": "x"}


@pytest.mark.parametrize(
    ("beta", "schedule", "name"),
    [
        (0.0, "gated", "opd"),
        (0.5, "constant", "nca_constant"),
        (0.5, "warmup", "nca_warmup"),
        (1, "gated", "nca_gated"),
    ],
)
def test_method_name(beta, schedule, name):
    assert settings.method_name(config_with({"anchor.beta": float(beta), "anchor.schedule": schedule})) == name


def test_dtype_auto_is_float32_on_cpu():
    assert settings.dtype("auto") == settings.dtype("float32") == jnp.float32
    assert settings.dtype("bfloat16") == jnp.bfloat16


def test_constant_schedule_without_warmup():
    assert rates(4, schedule="constant", warmup_steps=0) == [1.0] * 5


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [1, 2, 4])
def test_warmup_moves_at_the_first_step_and_reaches_the_peak_at_its_last(warmup, schedule):
    rate = rates(12, schedule=schedule, warmup_steps=warmup)
    np.testing.assert_allclose(rate[:warmup], np.arange(1, warmup + 1) / warmup, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 3])
def test_linear_and_cosine_fall_from_the_peak_to_zero_at_the_end(warmup):
    progress = np.arange(11) / 10
    linear = rates(10 + warmup, schedule="linear", warmup_steps=warmup)
    np.testing.assert_allclose(linear[warmup:], 1 - progress, atol=1e-6)
    cosine = rates(10 + warmup, schedule="cosine", warmup_steps=warmup)
    np.testing.assert_allclose(cosine[warmup:], (1 + np.cos(np.pi * progress)) / 2, atol=1e-6)


def test_optimizer_clips_the_global_norm_and_decays_weights():
    optimizer, _ = settings.make_optimizer(config_with(learning_rate=0.1, weight_decay=0.5, clip_norm=1e-12, eps=1.0))
    params = {"w": jnp.array([2.0, -4.0])}
    updates, _ = optimizer.update({"w": jnp.array([1e3, 1e3])}, optimizer.init(params), params)
    # A gradient that is clipped away leaves the decay alone: -lr * decay * w.
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], params["w"] * 0.95, rtol=1e-6)


def test_objective_is_what_the_config_says():
    changes = {
        "anchor.beta": 0.25,
        "anchor.schedule": "warmup",
        "anchor.start_step": 2,
        "anchor.warmup_steps": 7,
        "anchor.tau": 0.5,
        "loss.divergence": "jsd",
        "loss.support": "top_k",
        "loss.top_k": 5,
        "loss.tail": "bucket",
        "loss.reduction": "sequence",
        "loss.chunk_size": 3,
        "rollout.temperature": 0.7,
    }
    objective = settings.make_objective(config_with(changes), vocab_size=11)
    assert (objective.vocab_size, objective.divergence, objective.beta) == (11, "jsd", 0.25)
    assert (objective.temperature, objective.reduction, objective.chunk_size) == (0.7, "sequence", 3)
    anchor, support = objective.anchor, objective.support
    assert (anchor.kind, anchor.start_step, anchor.warmup_steps, anchor.tau) == ("warmup", 2, 7, 0.5)
    assert tuple(getattr(support, field) for field in support.__dataclass_fields__) == ("top_k", 5, "bucket")
