"""The command that takes models in and out.

    python -m nca_jax.convert import    --source=MODEL --output=DIR     Hugging Face -> Orbax, sharded
    python -m nca_jax.convert export    --source=DIR   --output=DIR     workdir or imported model -> Hugging Face
    python -m nca_jax.convert roundtrip [--source=MODEL]                proves that both together change no bit
    python -m nca_jax.convert random    --preset=NAME  --output=DIR     random weights, for trying out size and speed

MODEL is what config.model.source takes: a local directory, a gs:// path, owner/name[@revision] on the Hugging Face Hub,
a GGUF file, or a packaged model. Training reads all of these directly; importing keeps them converted.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
from etils import epath

from nca_jax.command import set_up_logging
from nca_jax.errors import UserError
from nca_jax.files import read_json
from nca_jax.model_card import model_card
from nca_jax.models import huggingface, orbax_params
from nca_jax.models.architecture import load_architecture
from nca_jax.models.export import EXPORT_DTYPES, Written, export_dtype, write_huggingface, write_orbax
from nca_jax.models.huggingface import checked_tensors, equal_tensors, tensors_to_write
from nca_jax.models.layers import in_turn
from nca_jax.models.orbax_params import ORBAX_PARAMS
from nca_jax.models.presets import PRESETS, TINY_PRESETS
from nca_jax.models.random_model import write_random
from nca_jax.models.source import resolve
from nca_jax.models.tensor_files import DTYPES
from nca_jax.sharding import make_mesh, params_sharding
from nca_jax.stored_model import find_model


def import_model(arguments: argparse.Namespace) -> str:
    """Hugging Face -> Orbax; returns the line to print."""
    source = resolve(arguments.source)
    _refuse_same(source, arguments.output)
    if (epath.Path(source) / ORBAX_PARAMS).exists():
        raise UserError(f"{source} is an imported model already; it can be trained and exported as it is.")
    arch = load_architecture(source)
    mesh = make_mesh(_mesh_sizes(arguments.mesh))
    pieces = huggingface.read_pieces(source, arch, jnp.dtype(arguments.dtype), params_sharding(mesh, arch))
    config = read_json(epath.Path(source) / "config.json")
    written = write_orbax(arguments.output, pieces, config, source, arguments.overwrite)
    return f"imported {source} as {arguments.dtype}: {_amount(written)}"


def export_model(arguments: argparse.Namespace) -> str:
    """Workdir or imported model -> Hugging Face; returns the line to print."""
    model = find_model(arguments.source, arguments.step)
    piece, by_layer = model.reader()
    _refuse_same(arguments.source, arguments.output)
    config = read_json(epath.Path(model.directory) / "config.json")
    dtype = export_dtype(arguments.dtype, config)
    written = write_huggingface(
        arguments.output,
        model.arch,
        tensors_to_write(model.arch, piece, dtype, by_layer),
        config,
        model.directory,
        dtype=dtype,
        shard_bytes=int(arguments.shard_gb * 1e9),
        overwrite=arguments.overwrite,
        card=None if model.step is None else model_card(epath.Path(model.path), model.step),
    )
    return f"exported {arguments.source}: {_amount(written)}"


def random_model(arguments: argparse.Namespace) -> str:
    """Random weights of a preset as a Hugging Face directory; returns the line to print."""
    written = write_random(
        arguments.output,
        arguments.preset,
        arguments.dtype,
        arguments.seed,
        arguments.tokenizer,
        arguments.overwrite,
    )
    return f"random {arguments.preset}: {_amount(written)}"


def round_trip(arguments: argparse.Namespace) -> str:
    """Import and export, then a comparison of every tensor; returns the lines to print."""
    lines = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="nca_jax_roundtrip_") as scratch:
        if arguments.source:
            return _round_trip(arguments.source, resolve(arguments.source), Path(scratch), arguments)
        for name in TINY_PRESETS:
            source = Path(scratch) / name
            write_random(str(source), name, "bfloat16")
            lines.append(_round_trip(name, str(source), Path(scratch), arguments))
    return "\n".join(lines)


def _round_trip(name: str, source: str, scratch: Path, arguments: argparse.Namespace) -> str:
    arch = load_architecture(source)
    before = checked_tensors(source, arch)
    if len({tensor.dtype for tensor in before.values()}) > 1:
        raise UserError(f"{source} mixes dtypes, and an export has one; it cannot come back bit-equal.")
    config = read_json(epath.Path(source) / "config.json")
    dtype = str(DTYPES[next(iter(before.values())).dtype])
    imported, exported = scratch / "imported", scratch / "exported"
    mesh = make_mesh(_mesh_sizes(arguments.mesh))
    sharding = params_sharding(mesh, arch)
    pieces = huggingface.read_pieces(source, arch, jnp.float32, sharding)
    write_orbax(str(imported), pieces, config, source, overwrite=True)
    pieces = orbax_params.read_pieces(epath.Path(imported) / ORBAX_PARAMS, arch, jnp.float32, sharding)
    # Small shards, so that the index takes part.
    total = sum(tensor.nbytes for tensor in before.values())
    tensors = tensors_to_write(arch, in_turn(pieces), dtype, by_layer=True)
    write_huggingface(str(exported), arch, tensors, config, source, dtype=dtype, shard_bytes=total // 3, overwrite=True)
    after = checked_tensors(str(exported), load_architecture(str(exported)))
    different = [key for key in before if not equal_tensors(before[key], after[key])]
    if different or before.keys() != after.keys():
        raise UserError(f"{name}: {len(different)} tensors came back changed, such as {different[:3]}; report this.")
    return f"{name}: {len(after)} tensors, {total:,} bytes of {dtype}, bit-equal after import and export"


def _refuse_same(source: str, output: str) -> None:
    if os.path.realpath(source) == os.path.realpath(output):
        raise UserError(f"--output is the source {source} itself; choose another directory.")


def _mesh_sizes(text: str) -> dict[str, int]:
    """ "fsdp=4,tensor=2" -> sizes; axes that are not named have 1 device, or, without fsdp, fsdp has the rest."""
    sizes = {"data": 1, "fsdp": -1, "tensor": 1}
    try:
        given = {axis.strip(): int(size) for axis, size in (part.split("=") for part in text.split(",") if part)}
        if unknown := given.keys() - sizes.keys():
            raise ValueError(f"no axis {', '.join(sorted(unknown))}")
    except ValueError as error:
        raise UserError(f"--mesh={text} is wrong ({error}); write such as --mesh=fsdp=4,tensor=2.") from error
    return sizes | given


def _amount(written: Written) -> str:
    return f"{written.tensors} tensors, {written.nbytes:,} bytes"


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count what the parent held when it started this process
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nca_jax.convert", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable, explanation: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=explanation, description=explanation)
        sub.set_defaults(run=run)
        return sub

    def mesh(sub: argparse.ArgumentParser) -> None:
        help_text = "devices that hold the weights; default: fsdp over all"
        sub.add_argument("--mesh", default="", metavar="fsdp=N,tensor=N", help=help_text)

    def output(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--output", required=True, metavar="DIR", help="appears complete or not at all")
        sub.add_argument("--overwrite", action="store_true", help="replace a model directory that is there")

    sub = command("import", import_model, "Hugging Face -> Orbax")
    sub.add_argument("--source", required=True, metavar="MODEL", help="as config.model.source")
    sub.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights")
    mesh(sub)
    output(sub)

    sub = command("export", export_model, "workdir or model -> Hugging Face")
    sub.add_argument("--source", required=True, metavar="DIR", help="workdir of a run, imported model, or any model")
    sub.add_argument("--step", type=int, help="checkpoint of a workdir; default: the newest")
    sub.add_argument("--dtype", default="source", choices=EXPORT_DTYPES, help="source: what its config.json names")
    sub.add_argument("--shard_gb", type=float, default=5.0, help="largest file, in GB")
    output(sub)

    sub = command("roundtrip", round_trip, "import and export, and compare bit by bit")
    sub.add_argument("--source", metavar="MODEL", help="default: a tiny random model of each architecture")
    mesh(sub)
    sub.add_argument("--scratch", metavar="DIR", help="has room for three copies; default: the system's")

    sub = command("random", random_model, "random weights of a preset as a Hugging Face directory")
    sub.add_argument("--preset", required=True, help=", ".join(PRESETS | TINY_PRESETS))
    sub.add_argument("--dtype", default="bfloat16", choices=EXPORT_DTYPES[1:], help="of the weights")
    sub.add_argument("--tokenizer", metavar="DIR", help="directory whose tokenizer files are copied along")
    sub.add_argument("--seed", type=int, default=0)
    output(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 2 for input that cannot work."""
    arguments = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        print(arguments.run(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a directory of somebody else
        print(f"error: {arguments.command} stopped ({error}); nothing half-written is left.", file=sys.stderr)
        return 2
    print(f"{time.monotonic() - started:.1f} s, peak memory {peak_memory_bytes() / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    set_up_logging()
    sys.exit(main())
