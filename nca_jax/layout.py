"""What lies where: a table of how a job's arrays are split over its meshes, and how many bytes each device holds."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.assembly import Job, weight_table_arrays
from nca_jax.axes import RULES, parts
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import weight_table


def layout_table(config: ConfigDict, job: Job, student: Architecture, teacher: Architecture, mesh: Mesh) -> str:
    """For the log of a run's start. Sizes are of one device, in MB (10**6 bytes); on one device a line is enough."""
    totals = _totals(config, job, student, teacher, mesh)
    if mesh.size == 1:
        held = ", ".join(f"{what} {size / 1e6:.1f}" for what, size in totals.items())
        return f"layout: one {mesh.devices.flat[0].device_kind} device; MB of {held}"
    devices = f"{mesh.size} {mesh.devices.flat[0].device_kind} devices, {jax.process_count()} processes"
    lines = [
        f"layout: {devices}; training {_sizes(mesh)}; decode {_sizes(job.student.mesh)}",
        f"  {'weight':<16} {'shape':<24} {'logical axes, split over mesh axes':<64} {'MB':>8}",
    ]
    weights = job.abstract_state.params
    for name, spec in weight_table(student).items():
        axes = " ".join(_split(mesh, axis) for axis in spec.axes)
        shape = "x".join(map(str, spec.shape))
        lines.append(f"  {name:<16} {shape:<24} {axes:<64} {_bytes([weights[name]]) / 1e6:>8.1f}")
    lines += [f"  {what:<106} {size / 1e6:>8.1f}" for what, size in totals.items()]
    lines.append(
        f"  rows: {settings.rows(config)} a step in {job.micro_batches} micro-batches, each split over "
        f"{parts(mesh, 'batch')} devices ({', '.join(RULES['batch'])})"
    )
    return "\n".join(lines)


def _totals(config: ConfigDict, job: Job, student: Architecture, teacher: Architecture, mesh: Mesh) -> dict[str, int]:
    """Bytes of one device, by what they are."""
    state, frozen = job.abstract_state, job.objective.teacher == "frozen"
    sampling = weight_table_arrays(student, config.model.compute_dtype)
    totals = {
        "all weights": _bytes(state.params),
        "optimizer state and averages": _bytes((state.opt_state, state.ema)),
        "frozen teacher": _placed(weight_table_arrays(teacher, config.teacher.dtype), job.teacher_sharding) * frozen,
        "all weights while sampling": _placed(sampling, job.student.sharding),
        "keys and values of one row and token while sampling": _kv_bytes(config, student, job.student.mesh),
        "logits of one chunk of the loss": 4 * config.loss.chunk_size * student.vocab_size // parts(mesh, "head_vocab"),
    }
    return {what: size for what, size in totals.items() if size}


def _sizes(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def _split(mesh: Mesh, axis: str) -> str:
    over = [name for name in RULES[axis] or () if mesh.shape[name] > 1]
    return f"{axis}/{'.'.join(over)}" if over else axis


def _bytes(tree: Any) -> int:
    return sum(_held(x, x.sharding) for x in jax.tree.leaves(tree))


def _placed(arrays: Mapping[str, jax.ShapeDtypeStruct], sharding: Mapping[str, NamedSharding]) -> int:
    return sum(_held(x, sharding[name]) for name, x in arrays.items())


def _held(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
    return x.dtype.itemsize * math.prod(sharding.shard_shape(x.shape))


def _kv_bytes(config: ConfigDict, arch: Architecture, mesh: Mesh) -> int:
    heads = arch.num_kv_heads // parts(mesh, "kv_heads")
    return 2 * arch.num_layers * heads * arch.head_dim * settings.dtype(config.model.compute_dtype).itemsize
