"""From the config to the values that the rooms take, checked before anything is loaded or written."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from nca_jax.errors import UserError
from nca_jax.models.decoder import REMAT_POLICIES
from nca_jax.models.export import EXPORT_DTYPES
from nca_jax.models.fused_attention import KINDS as ATTENTION_KINDS
from nca_jax.objectives import Divergence, Support
from nca_jax.train_step import AnchorSchedule, Objective
from nca_jax.vocab_loss import AnchorTerm, Terms

_CHOICES = {
    "model.param_dtype": ("float32", "bfloat16"),
    "model.compute_dtype": ("auto", "float32", "bfloat16"),
    "model.remat": tuple(REMAT_POLICIES),
    "teacher.dtype": ("auto", "float32", "bfloat16"),
    "chat.default_system": ("template", "none"),
    "data.too_long": ("error", "skip"),
    "model.attention": ("auto", *ATTENTION_KINDS),
    "teacher.kind": ("frozen", "live", "ema"),
    "rollout.policy": ("student", "teacher"),
    "evaluation.split": ("validation", "test"),
    "evaluation.divergence": ("none", "with_context", "all"),
    "loss.divergence": ("reverse_kl", "forward_kl", "symmetric_kl", "jsd", "nll"),
    "loss.support": ("full", "student_top_k", "teacher_top_k"),
    "loss.tail": ("none", "renormalize", "bucket"),
    "loss.reduction": ("token", "sequence"),
    "anchor.target": ("student", "teacher"),
    "anchor.divergence": ("forward_kl", "reverse_kl", "symmetric_kl"),
    "retention.samples": ("step", "cached"),
    "log.wandb.mode": ("online", "offline"),
    "anchor.schedule": ("constant", "warmup", "gated"),
    "export.dtype": EXPORT_DTYPES,
    "optimizer.schedule": ("constant", "linear", "cosine"),
}
_AT_LEAST = {
    1: "steps batch_size lengths data.max_prompt_tokens data.length_multiple rollout.max_new_tokens loss.top_k "
    "loss.chunk_size anchor.every anchor.warmup_steps evaluation.every evaluation.samples evaluation.batch_size "
    "evaluation.max_items checkpoint.every checkpoint.keep log.samples_every log.samples profile.first_step",
    0: "seed accumulation checkpoint.minutes checkpoint.keep_best profile.steps watchdog.minutes mesh.replica "
    "mesh.decode_tensor retention.gamma anchor.beta anchor.start_step rollout.slots rollout.top_k "
    "evaluation.top_k evaluation.temperature optimizer.warmup_steps optimizer.weight_decay optimizer.b1 optimizer.b2",
}
_ABOVE_ZERO = (
    "rollout.temperature rollout.top_p evaluation.top_p anchor.tau loss.jsd_weight teacher.ema_rate "
    "optimizer.learning_rate optimizer.clip_norm optimizer.eps export.shard_gb mesh.decode_gb"
)
# What may differ when a run is continued: it changes what is written, or where and in how many parts things are
# computed, and not the run. The context itself is compared, wherever its file is.
_FREE = (
    "accumulation",
    "lengths",
    "rollout.slots",
    "log.",
    "profile.",
    "watchdog.",
    "checkpoint.",
    "mesh.",
    "export.",
    "context.",
)


def check(config: ConfigDict) -> None:
    """Raises a UserError that names the first key whose value cannot work."""
    flat = flatten(config)
    for key, allowed in _CHOICES.items():
        if flat[key] not in allowed:
            raise UserError(f"config.{key} is {flat[key]!r}; it must be one of {', '.join(allowed)}.")
    for least, keys in _AT_LEAST.items():
        for key in keys.split():
            if not flat[key] >= least:
                raise UserError(f"config.{key} is {flat[key]}; it must be at least {least}.")
    for key in _ABOVE_ZERO.split():
        if not flat[key] > 0:
            raise UserError(f"config.{key} is {flat[key]}; it must be above 0.")
    for key in ("rollout.top_p", "evaluation.top_p", "teacher.ema_rate"):
        if flat[key] > 1:
            raise UserError(f"config.{key} is {flat[key]}; it must be at most 1.")
    for key in ("optimizer.b1", "optimizer.b2", "loss.jsd_weight"):
        if not flat[key] < 1:
            raise UserError(f"config.{key} is {flat[key]}; it must be below 1.")
    if flat["data.max_train_items"] is not None and not flat["data.max_train_items"] >= 1:
        raise UserError(
            f"config.data.max_train_items is {flat['data.max_train_items']}; it must be at least 1, or unset."
        )
    for key in ("model.source", "domain.name"):
        if flat[key] is None:
            raise UserError(f"config.{key} is not set; give it in the config file or as --config.{key}=…")
    if config.accumulation and rows(config) % config.accumulation:
        turns = "" if rows(config) == config.batch_size else f" x {rows(config) // config.batch_size} turns"
        raise UserError(
            f"config.batch_size {config.batch_size}{turns} does not divide into {config.accumulation} micro-batches; "
            "choose an accumulation that divides it."
        )
    _check_objective(config)


def _check_objective(config: ConfigDict) -> None:
    """What goes together."""
    if config.accumulation:
        micro_batches(config, devices=1)
    if config.lengths > 1 and config.anchor.every > 1:
        raise UserError("config.lengths puts rows in order, of which anchor.every takes some; set one of them to 1.")
    if config.teacher.kind != "frozen" and config.teacher.source:
        raise UserError(f"config.teacher.kind={config.teacher.kind} follows the student; unset config.teacher.source.")
    if config.loss.divergence == "nll" and config.loss.support == "teacher_top_k":
        raise UserError("config.loss.divergence=nll has no teacher whose top-k it could take; set loss.support.")
    if config.loss.entry_clip is not None and not config.loss.entry_clip > 0:
        raise UserError(f"config.loss.entry_clip is {config.loss.entry_clip}; it must be above 0, or unset.")
    if bool(config.retention.gamma) != bool(config.retention.contexts):
        raise UserError("config.retention.gamma and config.retention.contexts are set together or not at all.")
    if config.retention.gamma and config.retention.samples == "cached" and config.teacher.kind != "frozen":
        raise UserError("responses of a teacher that changes cannot be cached; set config.retention.samples=step.")
    if config.retention.gamma and config.retention.samples == "cached" and rows(config) != config.batch_size:
        raise UserError("a game's prompts are new at every step; set config.retention.samples=step.")
    if config.data.too_long == "skip" and rows(config) != config.batch_size:
        raise UserError("a game that has begun cannot be skipped; set config.data.too_long=error.")


def rows(config: ConfigDict) -> int:
    """Rows of a step's batch: its prompts, and in a game one for each turn that every game may take."""
    return config.batch_size * turns(config)


def turns(config: ConfigDict) -> int:
    """How many turns a game may take; 1 where there is no game."""
    return config.domain.settings.get("max_turns", 1)


def micro_batches(config: ConfigDict, devices: int) -> int:
    """How many parts a step's batch is cut into on so many devices that share out its rows.

    Raises:
      UserError: the parts or the devices do not divide the batch.
    """
    of_step = rows(config)
    count = config.accumulation or max(1, of_step // devices)
    size = of_step // count
    if of_step % count or size % devices:
        possible = [n for n in range(1, of_step + 1) if of_step % n == 0 and of_step // n % devices == 0]
        fix = f"config.accumulation to one of {', '.join(map(str, possible))}"
        if not possible:
            fix = f"config.batch_size to a multiple of {devices // math.gcd(devices, turns(config))}"
        raise UserError(
            f"the {size} rows of a micro-batch do not divide over the {devices} devices of replica x data x fsdp; set "
            f"{fix}, or other sizes of config.mesh."
        )
    if size % config.anchor.every:
        raise UserError(
            f"config.anchor.every {config.anchor.every} does not divide the {size} rows of a micro-batch; set another, "
            "or another config.accumulation."
        )
    return count


def flatten(config: ConfigDict) -> dict[str, Any]:
    """Dotted key -> value, for every leaf."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            flat |= {f"{key}.{below}": leaf for below, leaf in flatten(value).items()}
        else:
            flat[key] = value
    return flat


def fingerprint(config: ConfigDict) -> dict[str, Any]:
    """The keys that make a run what it is. More steps continue a run if the learning rate does not depend on them."""
    flat = {key: value for key, value in flatten(config).items() if not key.startswith(_FREE)}
    if config.optimizer.schedule == "constant":
        del flat["steps"]
    return flat


def method_name(config: ConfigDict) -> str:
    """What the summary line calls the run: "opd", "nca_constant", "dual_gated", "sft", "nca_gated_retention", ..."""
    off_policy = "sft" if config.loss.divergence == "nll" else "off_policy"
    name = off_policy if config.rollout.policy == "teacher" else "opd"
    if config.anchor.beta:
        tie = "nca" if config.anchor.target == "student" else "dual"
        name = f"{tie}_{config.anchor.schedule}" if name == "opd" else f"{name}_{tie}_{config.anchor.schedule}"
    return f"{name}_retention" if config.retention.gamma else name


def dtype(name: str) -> jnp.dtype:
    """A dtype by name; "auto" is bfloat16 on accelerators and float32 on CPU, where bfloat16 is not faster."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def make_objective(config: ConfigDict, vocab_size: int) -> Objective:
    """The loss the config describes, over a tokenizer of that size."""
    loss, anchor = config.loss, config.anchor
    clip = loss.entry_clip
    tie = AnchorTerm(
        target=anchor.target,
        divergence=Divergence(anchor.divergence, entry_clip=clip),
        stop_gradient=anchor.stop_gradient,
        gate_tau=anchor.tau if anchor.schedule == "gated" else None,
    )
    terms = Terms(
        vocab_size=vocab_size,
        first="nll" if loss.divergence == "nll" else Divergence(loss.divergence, loss.jsd_weight, clip),
        anchor=tie if anchor.beta else None,
        support=Support(loss.support, loss.top_k, loss.tail),
        temperature=float(config.rollout.temperature),
        chunk_size=loss.chunk_size,
    )
    warmup = anchor.schedule == "warmup"
    return Objective(
        terms=terms,
        beta=float(anchor.beta),
        schedule=AnchorSchedule(anchor.start_step, anchor.warmup_steps) if warmup else AnchorSchedule(),
        anchor_stride=anchor.every,
        gamma=float(config.retention.gamma),
        reduction=loss.reduction,
        teacher=config.teacher.kind,
        ema_rate=float(config.teacher.ema_rate),
    )


def make_optimizer(config: ConfigDict) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW after clipping by global norm, and the learning rate by step."""
    settings = config.optimizer
    peak, warmup = settings.learning_rate, settings.warmup_steps
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, max(config.steps - warmup, 1)),
        "cosine": optax.cosine_decay_schedule(peak, max(config.steps - warmup, 1)),
    }[settings.schedule]
    # Warm-up reaches the peak at its last step: the first step already moves.
    schedule = after
    if warmup:
        schedule = optax.join_schedules(
            [optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup]
        )
    adamw = optax.adamw(schedule, b1=settings.b1, b2=settings.b2, eps=settings.eps, weight_decay=settings.weight_decay)
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), adamw), schedule
