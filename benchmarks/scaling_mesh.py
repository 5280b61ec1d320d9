"""Bytes that a device receives in one training step as the mesh grows: part of benchmarks.scaling.

Each case is compiled in a process of its own, either for simulated devices of this machine or, by the TPU's compiler,
for a TPU topology; its program's collectives are then added up by `nca_jax.collectives`. One row of the batch goes to
each device that shares out rows, so the work of a device stays the same while the mesh grows. Beside what was compiled
stands a closed form: what the layout cannot do without.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from configs import medmcqa
from nca_jax.assembly import abstract_inputs, assemble
from nca_jax.collectives import collectives
from nca_jax.models.architecture import Architecture
from nca_jax.models.decoder import parameter_count, weight_table
from nca_jax.models.presets import preset
from nca_jax.plan_compile import for_accelerator
from nca_jax.sharding import make_mesh

ROOT = Path(__file__).parents[1]
MODELS = {
    # Of Qwen3's family: compiled in less than a minute, and wide enough for 256 shards.
    "small": dataclasses.replace(
        preset("qwen3_1_7b"), hidden_size=2048, mlp_size=4096, num_layers=4, num_heads=16, vocab_size=32_768
    ),
    "qwen3_8b": preset("qwen3_8b"),
}


class Lengths(NamedTuple):
    """Tokens of the prompts, of what leads them without and with the context, and of the responses."""

    prompt: int
    template: int
    context: int
    response: int


# Of the 8B model those of the reference at their longest; of the small one enough for activations to be larger than
# weights, as they are there, or else it is activations that the compiler moves.
LENGTHS = {"small": Lengths(512, 64, 512, 256), "qwen3_8b": Lengths(512, 64, 3584, 512)}


class Case(NamedTuple):
    """A model on a mesh. `topology` is "cpu:4" for simulated devices or, as `nca_jax.plan` takes it, "v5p:2x2x2"; fsdp
    takes the devices that are left."""

    model: str
    topology: str
    slices: int = 1
    data: int = 1
    tensor: int = 1

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.model} {self.slices} x {self.topology} data={self.data} tensor={self.tensor}"

    @property
    def devices(self) -> int:
        """Of all slices together. A device of a topology is a chip, on v5e and v5p."""
        return self.slices * math.prod(map(int, self.topology.partition(":")[2].split("x")))


V5P = {8: "2x2x2", 16: "2x2x4", 64: "4x4x4", 256: "4x8x8", 1024: "8x8x16", 4096: "16x16x16"}
SIMULATED = [
    Case("small", f"cpu:{n}", data=n if kind == "data" else 1, tensor=n if kind == "tensor" else 1)
    for kind in ("data", "fsdp", "tensor")
    for n in (1, 2, 4, 8)
]
PLANNED = [
    *(Case("small", f"v5p:{V5P[n]}", data=max(1, n // 256)) for n in V5P),
    Case("small", f"v5p:{V5P[4096]}", data=64),
    *(Case("small", f"v5p:{V5P[n]}", data=n // 64, tensor=8) for n in (64, 4096)),
    *(Case("small", "v5e:16x16", slices) for slices in (4, 16)),
    Case("qwen3_8b", "v5p:4x8x8"),
]


def closed_form(
    arch: Architecture, mesh: Mapping[str, int], rows: int, lengths: Lengths, itemsize: int
) -> dict[str, float]:
    """Bytes that a device must receive in a step of this layout, by what they are for.

    Over a group of n an all-gather or a reduce-scatter of x bytes in all brings (n - 1) / n * x to each, an all-reduce
    twice that. The anchor is on, the teacher frozen, and a micro-batch the whole batch.

    Args:
      arch: of student and teacher.
      mesh: axis -> devices.
      rows: of the step.
      lengths: of its views.
      itemsize: bytes of the compute dtype.

    Returns:
      "weights": each layer's, gathered once for a forward and once for a backward pass, of the views and of their
        prefixes, and once for the teacher;
      "gradients": summed over fsdp for views and prefixes, and once over the copies of the weights;
      "activations": two sums in every layer over "tensor", one of which is made again in the backward pass;
      "prefixes": keys and values, of which each device makes a part, and their gradients;
      "loss": hidden states to the devices that hold the vocabulary, and their float32 gradients back;
      "embedding": the looked-up rows of a table that is split along its width, and their gradients.
    """
    copies, fsdp, tensor = mesh["replica"] * mesh["data"], mesh["fsdp"], mesh["tensor"]
    own = rows / (copies * fsdp)
    D, L, R, T = arch.hidden_size, arch.num_layers, lengths.response, lengths.prompt + lengths.response
    layers = sum(math.prod(spec.shape) for spec in weight_table(arch).values() if spec.axes[0] == "layers")
    prefix = lengths.template + lengths.context
    sharing = mesh["data"] * fsdp  # devices that share out the tokens of a prefix
    gathered = _others(fsdp) * itemsize * layers / tensor
    kv = 2 * L * arch.num_kv_heads * arch.head_dim / tensor
    summed = own * T * (2 * 5 + 2) + prefix / sharing * 5  # q_x and q_c: 2 forward, 2 backward, 1 again; f: 2
    return {
        "weights": 5 * gathered,
        "gradients": 2 * gathered + 2 * _others(copies) * itemsize * parameter_count(arch) / (fsdp * tensor),
        "activations": 2 * _others(tensor) * itemsize * L * D * summed,
        "prefixes": 3 * _others(sharing) * itemsize * kv * prefix,
        "loss": (3 * itemsize + 2 * 4) * (fsdp - 1) * own * R * D,
        "embedding": 5 * _others(fsdp) * itemsize * own * T * D,
    }


def _others(n: int) -> float:
    return (n - 1) / n


def job_config(case: Case, lengths: Lengths) -> ConfigDict:
    """The reference's objective, on the case's mesh."""
    config = medmcqa.get_config("qwen3_8b")
    config.accumulation = 1
    config.rollout.max_new_tokens = lengths.response
    config.mesh.data, config.mesh.tensor = case.data, case.tensor
    config.batch_size = case.devices // case.tensor
    return config


def compiled(case: Case) -> dict[str, Any]:
    """What the case's train step tells between devices; for the child process, see `measure`."""
    kind = case.topology.partition(":")[0]
    lengths, arch = LENGTHS[case.model], MODELS[case.model]
    config = job_config(case, lengths)
    if kind == "cpu":
        devices = jax.devices()
        config.model.compute_dtype = config.teacher.dtype = "float32"
        config.model.attention = "xla"
    else:
        slices = {"num_slices": case.slices} if case.slices > 1 else {}
        devices = topologies.get_topology_desc(case.topology, "tpu", **slices).devices
        config = for_accelerator(config)
    mesh = make_mesh(config.mesh, devices)
    job = assemble(config, arch, arch, (0,), arch.vocab_size, mesh)
    inputs = abstract_inputs(config, job, arch, mesh, **{k: v for k, v in lengths._asdict().items() if k != "response"})
    began = time.perf_counter()
    program = job.train_step.lower(*inputs).compile()
    seconds = time.perf_counter() - began
    found = collectives(program.as_text(), len(devices) // case.slices)
    return {
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "rows": config.batch_size,
        "collectives": [c._asdict() for c in found],
        "peak bytes": program.memory_analysis().peak_memory_in_bytes,
        "closed form": closed_form(arch, mesh.shape, config.batch_size, lengths, 4 if kind == "cpu" else 2),
        "compile seconds": round(seconds, 1),
    }


def in_child(case: Case) -> dict[str, Any]:
    """`compiled` in a process of its own, which may have other devices and load libtpu.

    Raises:
      RuntimeError: what the process says.
    """
    kind, _, shape = case.topology.partition(":")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    if kind == "cpu":
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={shape}"
    else:  # as in nca_jax.plan: no metadata server, and no chips that two processes could quarrel about
        env |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "-m", "benchmarks.scaling_mesh", json.dumps(case)]
    child = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"{case.key}: exit code {child.returncode}\n{child.stderr[-3000:]}")
    return json.loads(child.stdout.strip().split("\n")[-1])


def measure(known: Mapping[str, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Compiles all cases that are not known yet, and hands over all results after each."""
    found = dict(known)
    cases = [*SIMULATED, *(PLANNED if importlib.util.find_spec("libtpu") else [])]
    for case in cases:
        if case.key not in found:
            found[case.key] = case._asdict() | in_child(case)
            keep(found)
            print(f"{case.key}: compiled in {found[case.key]['compile seconds']} s", file=sys.stderr, flush=True)


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown, a row for each case: MB (10**6 bytes) that a device receives in a step, compiled and in closed form."""
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    lines = [
        "| model | devices | replica x data x fsdp x tensor | "
        + " | ".join(kinds)
        + " | between slices | all | closed form | its largest parts |",
        "|---" * (len(kinds) + 7) + "|",
    ]
    for row in found.values():
        of_kind = {kind: sum(c["nbytes"] for c in row["collectives"] if c["kind"] == kind) for kind in kinds}
        crossing = sum(c["nbytes"] for c in row["collectives"] if c["between_slices"])
        parts = sorted(row["closed form"].items(), key=lambda item: -item[1])
        slices = f"{row['slices']} x " if row["slices"] > 1 else ""
        cells = [
            row["model"],
            f"{row['devices']}: {slices}{row['topology']}",
            " x ".join(map(str, row["mesh"].values())),
            *(_mb(of_kind[kind]) for kind in kinds),
            _mb(crossing),
            _mb(sum(c["nbytes"] for c in row["collectives"])),
            _mb(sum(row["closed form"].values())),
            ", ".join(f"{name} {_mb(value)}" for name, value in parts[:2] if value),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g}" if nbytes < 1e9 else f"{nbytes / 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", help="JSON list of the fields of Case")
    print(json.dumps(compiled(Case(*json.loads(parser.parse_args().case)))))


if __name__ == "__main__":
    main()
