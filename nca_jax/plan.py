"""The command that says, without a TPU, whether a job fits a TPU topology, and what its step costs.

    python -m nca_jax.plan --config=configs/medmcqa.py:qwen3_8b --topology=v5e:4x4
    python -m nca_jax.plan --config=configs/medmcqa.py:llama3_1_8b --topology=v5p:2x2x2 --num_slices=2 --json

The job's own train step, rollout and reshard are compiled by the TPU's compiler, on this machine's CPU; a model of 8B
takes a few minutes and 4 GB. What was compiled once is kept in the cache. Needs libtpu: pip install "jax[tpu]".
`--config.KEY=VALUE` as in training. Exit code 1: it does not fit; what would is then looked for, unless
`--search=0`.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from nca_jax import settings
from nca_jax.chips import chip_named
from nca_jax.command import parse_with_config, set_up_logging
from nca_jax.errors import UserError
from nca_jax.flops import Tokens, model_flops, train_step_flops
from nca_jax.plan_compile import add_arguments, architectures, for_accelerator, shapes
from nca_jax.roofline import ASSUMPTIONS, Seconds, estimate

GIB = 2**30
# The compiler itself lets a program have 15.75 of the 16 GiB of a v5e.
_USABLE = 15.75 / 16
# Shapes of slices that Google offers, from small to large.
SHAPES = {
    "v5e": ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    "v4": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}


def compile_for(arguments: Sequence[str]) -> dict[str, Any]:
    """The facts of `plan_compile` in a process of its own, which may load libtpu.

    Raises:
      UserError: libtpu is missing, or what the process says.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('planning needs the TPU compiler; run: pip install "jax[tpu]".')
    # Flags and platforms of this process are the CPU's; nothing is to be asked of a metadata server. libtpu lets one
    # process in at a time, for the sake of the chips, which are not touched here.
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    env |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, "-m", "nca_jax.plan_compile", *arguments]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = child.stderr.strip().split("\n")
    if child.returncode == 2:
        raise UserError(lines[-1].removeprefix("error: "))
    if child.returncode:
        raise RuntimeError(f"compiling failed with exit code {child.returncode}:\n{child.stderr}")
    return json.loads(child.stdout.strip().split("\n")[-1])


def needs(facts: Mapping[str, Any]) -> dict[str, float | str]:
    """Bytes of a device at the peak of each program, with what lives beside it; or the compiler's reason."""
    own = facts["bytes_per_device"]
    frozen = own["teacher"] + own["teacher_prefixes"]
    beside = {
        "train_step": 0,  # all are its arguments
        "reshard": own["optimizer"] + frozen,
        "rollout": own["weights"] + own["optimizer"] + frozen,
    }
    programs = facts["programs"]
    return {name: p.get("refused") or beside[name] + p["memory"]["peak"] for name, p in programs.items()}


def larger(topology: str) -> Iterator[str]:
    """Topologies of the same chip with more devices, the next one first."""
    kind, _, shape = topology.partition(":")
    shapes = SHAPES.get(kind, ())
    yield from (f"{kind}:{s}" for s in shapes if _count(s) > _count(shape))


def changes(topology: str, config: ConfigDict) -> Iterator[str]:
    """Arguments to try where a job does not fit, the smallest change first: smaller chunks of logits, more chips."""
    if config.loss.chunk_size > 256:
        yield f"--config.loss.chunk_size={config.loss.chunk_size // 4}"
    yield from (f"--topology={bigger}" for bigger in larger(topology))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job on a topology, as compiled.

    Attributes:
      topology, num_slices: what it is for.
      tokens: lengths of prompts and prefixes.
      facts: from `plan_compile.compiled_facts`.
      needs: program -> bytes of a device at its peak, or the compiler's reason for refusing it.
      limit: bytes that a program may have.
      flops: of one training step over all devices, by part.
      seconds: from `roofline.estimate`; None where a program was refused.
    """

    topology: str
    num_slices: int
    tokens: Tokens
    facts: dict[str, Any]
    needs: dict[str, float | str]
    limit: float
    flops: dict[str, float]
    seconds: dict[str, Seconds] | None

    @property
    def fits(self) -> bool:
        """Whether every program has the memory it needs."""
        return all(not isinstance(need, str) and need <= self.limit for need in self.needs.values())


def make_plan(options: argparse.Namespace, config: ConfigDict, arguments: Sequence[str]) -> Plan:
    """Compiles and judges.

    Args:
      options: of `plan_compile.add_arguments`.
      config: of the job.
      arguments: both as they were given.

    Raises:
      UserError: as `compile_for`, or a chip without known figures.
    """
    chip = chip_named(options.topology.partition(":")[0])
    config = for_accelerator(config)
    student, teacher = architectures(config)
    tokens = Tokens(**shapes(options, config))
    facts = compile_for(arguments)
    seconds = None
    if not any("refused" in program for program in facts["programs"].values()):
        seconds = estimate(config, student, teacher, tokens, facts, chip, facts["chips"])
    return Plan(
        topology=options.topology,
        num_slices=options.num_slices,
        tokens=tokens,
        facts=facts,
        needs=needs(facts),
        limit=chip.hbm_bytes * _USABLE * facts["chips"] / facts["devices"],
        flops=train_step_flops(config, student, teacher, tokens),
        seconds=seconds,
    )


def _count(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))


def as_text(plan: Plan, config: ConfigDict, name: str) -> str:
    """The plan for people."""
    facts, own, tokens = plan.facts, plan.facts["bytes_per_device"], plan.tokens
    slices = f"{plan.num_slices} slices of {plan.topology}" if plan.num_slices > 1 else plan.topology
    rows = settings.rows(config)
    lines = [
        f"{name} on {slices}: {facts['chips']:.0f} chips, {plan.limit / GIB:.2f} GiB for a program on each device",
        f"{facts['parameters']['student'] / 1e9:.2f} billion parameters, the teacher "
        f"{facts['parameters']['teacher'] / 1e9:.2f}",
        f"a step: {rows} rows in {facts['micro_batches']} micro-batches, prompts of {tokens.prompt} tokens behind "
        f"{tokens.template} without and {tokens.context} with the context, responses of "
        f"{config.rollout.max_new_tokens}",
        "",
        "layout    " + " ".join(f"{axis:>8}" for axis in facts["meshes"]["train"]) + "   GiB a device",
        f"training  {_sizes(facts, 'train')}   weights {own['weights'] / GIB:.2f}, optimizer "
        f"{own['optimizer'] / GIB:.2f}, teacher {own['teacher'] / GIB:.2f} and its prefixes "
        f"{own['teacher_prefixes'] / GIB:.2f}",
        f"decode    {_sizes(facts, 'decode')}   weights {own['decode_weights'] / GIB:.2f}",
        "",
        "program     arguments  temporaries  at peak  with others   collectives of a device: kind, count, GiB received",
    ]
    for program, what in facts["programs"].items():
        if "refused" in what:
            lines.append(f"{program:<11} refused by the compiler: {what['refused']}")
            continue
        memory, need = what["memory"], plan.needs[program]
        verdict = "" if need <= plan.limit else " (too much)"
        lines.append(
            f"{program:<11} {memory['arguments'] / GIB:>9.2f} {memory['temporaries'] / GIB:>12.2f} "
            f"{memory['peak'] / GIB:>8.2f} {need / GIB:>12.2f}{verdict}   {_collectives(what)}"
        )
    flops = ", ".join(f"{part} {value / 1e12:.0f}" for part, value in plan.flops.items() if value)
    lines += ["", f"TFLOP of a step: {flops}; without what is recomputed {model_flops(plan.flops) / 1e12:.0f}"]
    if plan.seconds:
        lines += _times(plan, config, rows)
    compiled = sum(program["compile_seconds"] for program in facts["programs"].values())
    lines += ["", f"compiled in {compiled:.0f} s", "it fits" if plan.fits else "IT DOES NOT FIT"]
    return "\n".join(lines)


def _sizes(facts: Mapping[str, Any], mesh: str) -> str:
    return " ".join(f"{size:>8}" for size in facts["meshes"][mesh].values())


def _collectives(program: Mapping[str, Any]) -> str:
    return (
        ", ".join(
            f"{found['kind']}{' between slices' if found['between_slices'] else ''} {found['count']} "
            f"{found['nbytes'] / GIB:.2f}"
            for found in program["collectives"]
        )
        or "none"
    )


def _times(plan: Plan, config: ConfigDict, rows: int) -> list[str]:
    lines = ["", "seconds     estimate   compute  memory  network"]
    for name, seconds in plan.seconds.items():
        compute, memory, network, total = seconds
        lines.append(f"{name:<11} {total:>8.1f} {compute:>9.1f} {memory:>7.1f} {network:>8.1f}")
    total = sum(seconds.total for seconds in plan.seconds.values())
    tokens = rows * config.rollout.max_new_tokens
    return [
        *lines,
        f"{tokens / total:.0f} response tokens/s; all of this is an estimate that assumes {ASSUMPTIONS}",
    ]


def as_json(plan: Plan, name: str, would_fit: str | None) -> dict[str, Any]:
    """The plan for programs; bytes and seconds, of one device where nothing else is said."""
    return {
        "config": name,
        "topology": plan.topology,
        "num_slices": plan.num_slices,
        "tokens": plan.tokens._asdict(),
        "fits": plan.fits,
        "would_fit": would_fit,
        "limit": plan.limit,
        "needs": plan.needs,
        **plan.facts,
        "step_flops": plan.flops,
        "seconds": {program: seconds._asdict() for program, seconds in (plan.seconds or {}).items()},
        "assumptions": ASSUMPTIONS,
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 where the job does not fit, or 2 for input that cannot work."""
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--json", action="store_true", help="print JSON")
    ours.add_argument("--search", type=int, default=3, help="how many changes to try where it does not fit")
    parser = argparse.ArgumentParser(
        prog="python -m nca_jax.plan", description=__doc__.split("\n")[0], allow_abbrev=False, parents=[ours]
    )
    add_arguments(parser)
    try:
        options, config, name = parse_with_config(parser, arguments)
        settings.check(config)
        _, passed_on = ours.parse_known_args(arguments)
        plan, would_fit = make_plan(options, config, passed_on), None
        if not options.json:
            print(as_text(plan, config, name), flush=True)
        if not plan.fits:
            would_fit = _search(options, passed_on, config)
        if options.json:
            print(json.dumps(as_json(plan, name, would_fit), indent=2))
        elif not plan.fits:
            print(f"it would with {would_fit}" if would_fit else "nothing that was tried makes it fit")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if plan.fits else 1


def _search(options: argparse.Namespace, arguments: Sequence[str], config: ConfigDict) -> str | None:
    """The first change that makes it fit, each compiled to know."""
    for change in itertools.islice(changes(options.topology, config), options.search):
        print(f"trying {change}", file=sys.stderr, flush=True)
        # Of an argument given twice the last one counts.
        changed = [*arguments, change]
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_arguments(parser)
        changed_options, changed_config, _ = parse_with_config(parser, changed)
        if make_plan(changed_options, changed_config, changed).fits:
            return change
    return None


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main(sys.argv[1:]))
