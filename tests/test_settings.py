"""Values that cannot work are named; what continues a run; schedules."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from configs import base, conventions
from nca_jax import settings
from nca_jax.errors import UserError
from nca_jax.objectives import Divergence, Support
from nca_jax.train_step import AnchorSchedule, Objective
from nca_jax.vocab_loss import AnchorTerm, Terms

BAD_VALUES = {
    "at least 1": (
        "steps batch_size data.max_prompt_tokens rollout.max_new_tokens loss.top_k loss.chunk_size "
        "data.length_multiple data.max_train_items lengths "
        "anchor.every anchor.warmup_steps evaluation.every evaluation.batch_size evaluation.max_items checkpoint.every "
        "checkpoint.keep log.samples_every log.samples",
        [0, -1],
    ),
    "at least 0": (
        "seed accumulation mesh.replica checkpoint.minutes checkpoint.keep_best profile.steps watchdog.minutes "
        "retention.gamma anchor.beta anchor.start_step rollout.top_k evaluation.top_k evaluation.temperature "
        "optimizer.warmup_steps optimizer.weight_decay",
        [-1],
    ),
    "above 0": (
        "rollout.temperature rollout.top_p evaluation.top_p anchor.tau "
        "optimizer.learning_rate optimizer.clip_norm loss.jsd_weight teacher.ema_rate export.shard_gb",
        [0.0, -0.5, float("nan")],
    ),
    "at most 1": ("rollout.top_p evaluation.top_p teacher.ema_rate", [1.5]),
    "below 1": ("loss.jsd_weight", [1.0]),
    "one of": (
        "model.param_dtype model.compute_dtype model.remat model.attention teacher.kind teacher.dtype rollout.policy "
        "chat.default_system data.too_long evaluation.split loss.divergence loss.support loss.tail loss.reduction "
        "anchor.schedule anchor.target anchor.divergence retention.samples export.dtype optimizer.schedule",
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
    ("changes", "devices", "count"),
    [
        ({"accumulation": 2}, 4, 2),
        ({"accumulation": 0}, 4, 2),
        ({"accumulation": 0}, 8, 1),
        ({"accumulation": 0}, 1, 8),
        ({"accumulation": 0, "domain.settings.max_turns": 5}, 4, 10),
    ],
)
def test_micro_batches_are_as_asked_for_or_leave_each_device_one_row(changes, devices, count):
    assert settings.micro_batches(config_with({"batch_size": 8} | changes), devices) == count


@pytest.mark.parametrize(
    ("changes", "devices", "fix"),
    [
        ({"accumulation": 4}, 4, "config.accumulation to one of 1, 2, or"),
        ({"accumulation": 0}, 16, "config.batch_size to a multiple of 16, or"),
        ({"accumulation": 0}, 3, "config.batch_size to a multiple of 3, or"),
        ({"accumulation": 0, "domain.settings.max_turns": 5}, 15, "config.batch_size to a multiple of 3, or"),
    ],
)
def test_rows_that_the_devices_do_not_divide_are_refused_with_the_fix(changes, devices, fix):
    with pytest.raises(UserError, match=f"over the {devices} devices.*set {fix}"):
        settings.micro_batches(config_with({"batch_size": 8} | changes), devices)


@pytest.mark.parametrize(
    "key", ["seed", "batch_size", "anchor.beta", "optimizer.schedule", "domain.settings.other_task"]
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
        "anchor.target": "teacher",
        "anchor.divergence": "symmetric_kl",
        "anchor.stop_gradient": False,
        "anchor.every": 2,
        "anchor.schedule": "warmup",
        "anchor.start_step": 2,
        "anchor.warmup_steps": 7,
        "loss.divergence": "jsd",
        "loss.jsd_weight": 0.125,
        "loss.entry_clip": 3.0,
        "loss.support": "teacher_top_k",
        "loss.top_k": 5,
        "loss.tail": "bucket",
        "loss.reduction": "sequence",
        "loss.chunk_size": 3,
        "retention.gamma": 0.75,
        "rollout.temperature": 0.7,
        "teacher.kind": "ema",
        "teacher.ema_rate": 0.125,
    }
    terms = Terms(
        vocab_size=11,
        first=Divergence("jsd", 0.125, 3.0),
        anchor=AnchorTerm("teacher", Divergence("symmetric_kl", entry_clip=3.0), stop_gradient=False),
        support=Support("teacher_top_k", 5, "bucket"),
        temperature=0.7,
        chunk_size=3,
    )
    expected = Objective(terms, 0.25, AnchorSchedule(2, 7), 2, 0.75, "sequence", "ema", 0.125)
    assert settings.make_objective(config_with(changes), vocab_size=11) == expected


def test_the_reference_is_the_default():
    """KL(q_x || f) + 0.5 KL(sg[q_x] || q_c) on the student's top 256, renormalised; nothing of ours is on."""
    objective = settings.make_objective(base.get_config(), vocab_size=11)
    support = Support("student_top_k", 256, "renormalize")
    assert objective == Objective(Terms(11, Divergence("reverse_kl"), AnchorTerm(), support, 1.0, 1024), beta=0.5)


def test_a_gate_and_plain_distillation():
    gated = settings.make_objective(config_with({"anchor.schedule": "gated", "anchor.tau": 0.5}), 11)
    assert gated.terms.anchor == AnchorTerm(gate_tau=0.5) and gated.schedule == AnchorSchedule()
    plain = settings.make_objective(config_with({"anchor.beta": 0.0, "loss.divergence": "nll"}), 11)
    assert plain.terms.anchor is None and plain.terms.first == "nll"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"anchor.schedule": "constant"}, "nca_constant"),
        ({"anchor.beta": 0.0}, "opd"),
        ({"anchor.schedule": "gated", "retention.gamma": 0.5}, "nca_gated_retention"),
        ({"anchor.target": "teacher"}, "dual_gated"),
        ({"rollout.policy": "teacher", "anchor.beta": 0.0, "loss.divergence": "forward_kl"}, "off_policy"),
        ({"rollout.policy": "teacher", "anchor.beta": 0.0, "loss.divergence": "nll"}, "sft"),
        ({"rollout.policy": "teacher", "loss.divergence": "nll"}, "sft_nca_gated"),
    ],
)
def test_a_run_is_called_by_its_method(changes, name):
    assert settings.method_name(config_with(changes)) == name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"anchor.every": 3}, "does not divide the 8 rows"),
        ({"anchor.every": 2, "lengths": 2}, "config.lengths puts rows in order"),
        ({"anchor.every": 4, "accumulation": 4}, "does not divide the 2 rows"),
        ({"teacher.kind": "ema", "teacher.source": "other"}, "ema follows the student"),
        ({"loss.divergence": "nll", "loss.support": "teacher_top_k"}, "no teacher whose top-k"),
        ({"loss.entry_clip": 0.0}, "entry_clip is 0.0"),
        ({"retention.gamma": 0.5}, "set together"),
        ({"retention.contexts": ("a.txt",)}, "set together"),
        (
            {
                "retention.gamma": 0.5,
                "retention.contexts": ("a.txt",),
                "retention.samples": "cached",
                "teacher.kind": "live",
            },
            "cannot be cached",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, reason):
    with pytest.raises(UserError, match=reason):
        settings.check(config_with(changes))
