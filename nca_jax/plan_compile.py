"""The real programs of a job, compiled for a TPU topology on a machine that has no TPU.

A process of its own, started by `nca_jax.plan`, for jax chooses its platform when it starts and libtpu says what it
pleases on stderr. Takes plan's arguments and prints one JSON object.
"""

import argparse
import hashlib
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.experimental import topologies
from jax.sharding import Mesh
from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.assembly import Job, abstract_inputs, assemble, weight_table_arrays
from nca_jax.axes import named
from nca_jax.chips import chip_of, chips_in
from nca_jax.collectives import collectives
from nca_jax.command import parse_with_config, set_up_logging
from nca_jax.errors import UserError
from nca_jax.files import write_json
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import Past, parameter_count
from nca_jax.models.packaged import cache_dir
from nca_jax.models.presets import preset
from nca_jax.rollout import Sampling, example_keys
from nca_jax.sharding import make_mesh

_EOS = (0,)  # which ids end a response does not change a program's size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what is compiled and for what."""
    parser.add_argument("--topology", default="v5e:4x4", help="chip and shape: v5e:4x4, v5p:2x2x2, v6e:4x8, ...")
    parser.add_argument("--num_slices", type=int, default=1, help="slices of that topology, one replica in each")
    parser.add_argument("--prompt", type=int, help="tokens of the longest prompt; default: 512 for each turn of a game")
    parser.add_argument("--template", type=int, default=64, help="tokens that lead every prompt without the context")
    parser.add_argument("--context", type=int, help="of the context; default: what data.max_prompt_tokens leaves")


def shapes(options: argparse.Namespace, config: ConfigDict) -> dict[str, int]:
    """Tokens of "prompt", "template" and "context": as asked for, or the longest that the config lets pass.

    Raises:
      UserError: they exceed data.max_prompt_tokens.
    """
    longest = config.data.max_prompt_tokens
    prompt = options.prompt or min(512 * settings.turns(config), longest // 2)
    context = longest - prompt if options.context is None else options.context
    if prompt < 1 or context < 0 or max(context, options.template) + prompt > longest:
        raise UserError(
            f"a prompt of {prompt} tokens behind a context of {context} does not fit data.max_prompt_tokens={longest}; "
            "give other --prompt, --template and --context."
        )
    return {"prompt": prompt, "template": options.template, "context": context}


def for_accelerator(config: ConfigDict) -> ConfigDict:
    """The config with what "auto" means on a TPU."""
    config = config.copy_and_resolve_references()
    for section, key, value in (
        (config.model, "compute_dtype", "bfloat16"),
        (config.teacher, "dtype", "bfloat16"),
        (config.model, "attention", "splash"),
    ):
        if section[key] == "auto":
            section[key] = value
    return config


def architectures(config: ConfigDict) -> tuple[Architecture, Architecture]:
    """Of the student and its teacher, by their presets.

    Raises:
      UserError: the config names no preset.
    """
    if not config.model.preset or (config.teacher.source and not config.teacher.preset):
        raise UserError("a plan needs the architectures' names; set config.model.preset (and config.teacher.preset).")
    student = preset(config.model.preset)
    return student, preset(config.teacher.preset) if config.teacher.source else student


def compiled_facts(config: ConfigDict, devices: Sequence[jax.Device], tokens: dict[str, int]) -> dict[str, Any]:
    """What the compiler says of the train step, the rollout, and the reshard between their two layouts.

    Args:
      config: of the job, from `for_accelerator`.
      devices: to compile for.
      tokens: from `shapes`.

    Returns:
      "device", "devices", "chips", "parameters", "meshes", "micro_batches"; "bytes_per_device": what arrays take;
      "programs": name -> "memory" (bytes of one device), "kernels" (calls of Pallas kernels), "collectives",
      "compile_seconds", or instead of all but the last "refused", with the compiler's reason, and then no further ones.

    Raises:
      UserError: as `assembly.assemble`.
    """
    student, teacher = architectures(config)
    mesh = make_mesh(config.mesh, devices)
    job = assemble(config, student, teacher, _EOS, min(student.vocab_size, teacher.vocab_size), mesh)
    inputs = abstract_inputs(config, job, teacher, mesh, **tokens)
    state, frozen, batch = inputs
    rollout = _rollout(config, student, job, tokens)
    sample, R = job.student.sampler(config.evaluation.top_k), config.rollout.max_new_tokens
    todo = {
        "train_step": (job.train_step, inputs, mesh),
        "reshard": (jax.jit(job.student.layout), (state.params,), mesh),
        "rollout": (sample, rollout, job.student.mesh, R),
    }
    programs = {}
    for name, arguments in todo.items():
        programs[name] = _compile(*arguments)
        if "refused" in programs[name]:  # the others change nothing about that
            break
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "chips": chips_in(devices, chip_of(devices[0].device_kind)),
        "parameters": {"student": parameter_count(student), "teacher": parameter_count(teacher)},
        "meshes": {"train": dict(mesh.shape), "decode": dict(job.student.mesh.shape)},
        "micro_batches": job.micro_batches,
        "bytes_per_device": {
            "weights": _bytes(state.params),
            "optimizer": _bytes((state.opt_state, state.ema)),
            "teacher": _bytes(frozen.params),
            "teacher_prefixes": _bytes((frozen.prefix, frozen.retained_prefix)),
            "batch": _bytes(batch),
            "decode_weights": _bytes(rollout[0]),
        },
        "programs": programs,
    }


def _rollout(config: ConfigDict, student: Architecture, job: Job, tokens: dict[str, int]) -> tuple:
    """Arguments of the largest rollout or evaluation: all rows at once, behind the longer prefix."""
    dtype = settings.dtype(config.model.compute_dtype)
    B, C = max(config.batch_size, config.evaluation.batch_size), max(tokens["context"], tokens["template"])
    L, K, Q = student.num_layers, student.num_kv_heads, student.head_dim
    abstract = jax.eval_shape(job.student.layout, weight_table_arrays(student, config.model.param_dtype))
    params = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=job.student.sharding[name])
        for name, x in abstract.items()
    }
    kv = jax.ShapeDtypeStruct(
        (L, C, K, Q), dtype, sharding=named(job.student.mesh, "layers", None, "kv_heads", "head_dim")
    )
    rows = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((B, tokens["prompt"]), jnp.int32), ((B,), jnp.int32), ((B,), jnp.bool_))
    ]
    keys = jax.eval_shape(lambda: example_keys(0, 0, jnp.arange(B)))
    return params, [Past(kv, kv)] if C else [], *rows, keys, Sampling(1.0, 0.95)


def _compile(program: Callable, arguments: tuple, mesh: Mesh, open_loops: int = 1) -> dict[str, Any]:
    """Of one program; what was compiled once is read from the cache, as long as jax makes the same program of it."""
    lowered = program.lower(*arguments)
    devices = list(mesh.devices.flat)
    kept = cache_dir() / "plans" / f"{_fingerprint(lowered.as_text(), devices)}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    facts = _compiled(lowered, devices, open_loops)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_json(epath.Path(kept), facts)
    return facts


def _fingerprint(program: str, devices: Sequence[jax.Device]) -> str:
    chips = [(d.id, d.device_kind, getattr(d, "slice_index", 0), getattr(d, "coords", None)) for d in devices]
    versions = [importlib.metadata.version(package) for package in ("jax", "jaxlib", "libtpu")]
    return hashlib.sha256(repr((program, chips, versions)).encode()).hexdigest()[:32]


def _compiled(lowered: jax.stages.Lowered, devices: Sequence[jax.Device], open_loops: int) -> dict[str, Any]:
    per_slice = len(devices) // len({getattr(device, "slice_index", 0) for device in devices})
    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": _refusal(str(error)), "compile_seconds": time.monotonic() - started}
    seconds = time.monotonic() - started
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    return {
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
        },
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": [found._asdict() for found in collectives(text, per_slice, open_loops)],
        "compile_seconds": seconds,
    }


def _refusal(message: str) -> str:
    """What the compiler says of how much there was and how much it would have needed."""
    return message.split("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")


def _bytes(tree: Any) -> int:
    """Bytes that one device holds of these arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape) for x in leaves)


def main(arguments: Sequence[str]) -> int:
    """Prints the facts as JSON; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nca_jax.plan_compile", allow_abbrev=False)
    add_arguments(parser)
    try:
        options, config, _ = parse_with_config(parser, arguments)
        settings.check(config)
        config = for_accelerator(config)
        slices = {"num_slices": options.num_slices} if options.num_slices > 1 else {}
        try:
            devices = topologies.get_topology_desc(options.topology, "tpu", **slices).devices
        except Exception as error:  # libtpu raises several kinds for a name that it does not know
            reason = str(error).split("\n")[0]
            raise UserError(f"there is no topology {options.topology!r} ({reason}); try v5e:4x4.") from error
        print(json.dumps(compiled_facts(config, devices, shapes(options, config))))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv[1:]))
