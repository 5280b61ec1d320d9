"""What devices tell each other in a compiled program, read from its HLO text: kinds, how often, how many bytes."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# What one device receives in the usual ring algorithm, in units of the result's bytes, for groups of n.
_RECEIVED = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COLLECTIVE = re.compile(rf"^(.*?) ({'|'.join(_RECEIVED)})(-start)?\(")
# The TPU compiler hands what goes between slices to the host, piece by piece.
_BETWEEN_SLICES = re.compile(r'^(\(.*?\)) recv\(.*_xla_megascale_transfer_type="([A-Z_]+)"')
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")

# Groups as axes of a mesh: "mesh['x'=2,'y'=8], device_ids=([8,2]T(1,0)) {'y'}".
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}")


class Collective(NamedTuple):
    """One kind over one network. `count` is per run of the program, loops included; `nbytes` what a device receives."""

    kind: str
    between_slices: bool
    count: int
    nbytes: float


def collectives(hlo: str, devices_per_slice: int, open_loops: int = 1) -> list[Collective]:
    """All collectives of a program, added up by kind and network.

    The TPU compiler cuts one collective into pieces that run beside other work; they share a channel and count once.

    Args:
      hlo: text of the compiled module.
      devices_per_slice: devices are numbered slice by slice.
      open_loops: rounds of the loops whose condition is not "counter < constant", such as decoding until all rows end,
        together: several that follow each other, such as a decode in stages, share them out.
    """
    computations = _computations(hlo)
    rounds_of_open = open_loops / max(1, _open_loops(computations, next(iter(computations))))
    totals: dict[tuple[str, bool], list[float]] = {}
    seen: set[tuple[str, str, str]] = set()

    def add(kind: str, between_slices: bool, times: float, nbytes: float) -> None:
        total = totals.setdefault((kind, between_slices), [0, 0.0])
        total[0] += times
        total[1] += times * nbytes

    def visit(name: str, times: float) -> None:
        for line in computations.get(name, ()):
            if loop := _WHILE.search(line):
                visit(loop[2], times * (_rounds(line, computations) or rounds_of_open))
                continue
            for called in _called(line):
                visit(called, times)
            if found := _BETWEEN_SLICES.match(line):
                shape, kind = found.groups()
                add(kind.lower().replace("_", "-"), True, times, _bytes_of(shape)[0])
            elif found := _COLLECTIVE.match(line):
                shape, kind, start = found.groups()
                channel = re.search(r"channel_id=(\d+)", line)
                key = (channel[1], kind, shape.split("{")[0]) if channel else None
                if key in seen:
                    continue
                if key:
                    seen.add(key)
                groups = _groups(line)
                size = groups.shape[1] if groups is not None else 2
                crossing = groups is not None and bool((np.ptp(groups // devices_per_slice, axis=1) > 0).any())
                add(kind, crossing, times, _received(shape, kind, bool(start), size))

    visit(next(iter(computations)), 1)
    return [Collective(*key, round(count), nbytes) for key, (count, nbytes) in sorted(totals.items())]


def _computations(hlo: str) -> dict[str, list[str]]:
    """Name -> instructions without their own names, the entry first."""
    found: dict[str, list[str]] = {}
    entry = name = None
    for line in hlo.split("\n"):
        if header := _COMPUTATION.match(line):
            name = header[2]
            found[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            found[name].append(instruction[2])
    return {entry: found.pop(entry), **found}


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        yield from re.findall(r"%?([\w.\-]+)", branches)


def _open_loops(computations: dict[str, list[str]], name: str) -> int:
    """How many loops of unknown length a computation runs, one after the other."""
    found = 0
    for line in computations.get(name, ()):
        if loop := _WHILE.search(line):
            found += _open_loops(computations, loop[2]) if _rounds(line, computations) else 1
        else:
            found += sum(_open_loops(computations, called) for called in _called(line))
    return found


def _rounds(loop: str, computations: dict[str, list[str]]) -> int | None:
    """How often a loop runs, where the compiler says so or its condition is "counter < constant", from 0."""
    if known := _TRIP_COUNT.search(loop):
        return int(known[1])
    condition = computations.get(_WHILE.search(loop)[1], ())
    constants = [int(n) for line in condition for n in re.findall(r"^[su]\d+\[\]\S* constant\((\d+)\)", line)]
    compared = [line for line in condition if " compare(" in line]
    counted = len(compared) == 1 and "direction=LT" in compared[0] and len(constants) == 1
    return constants[0] if counted else None


def _received(shape: str, kind: str, start: bool, group: int) -> float:
    sizes = _bytes_of(shape)
    # The start of an asynchronous one gives (operand, result, flags...); an all-reduce of several arrays their tuple.
    result = sizes[1] if start and kind != "all-reduce" and len(sizes) > 1 else sum(sizes)
    return result * _RECEIVED[kind](group)


def _bytes_of(shape: str) -> list[float]:
    """Of every array of a shape, which may be a tuple."""
    return [_BYTES.get(t, 0) * math.prod(map(int, filter(None, dims.split(",")))) for t, dims in _SHAPE.findall(shape)]


def _groups(line: str) -> np.ndarray | None:
    """Device numbers of every group, [groups, size], from any of the forms that they are written in."""
    if pairs := re.search(r"source_target_pairs=\{\{(.*?)\}\}", line):
        return np.array([[int(n) for n in pair.split(",")] for pair in pairs[1].split("},{")])
    if listed := re.search(r"replica_groups=\{\{(.*?)\}\}", line):
        return np.array([[int(n) for n in group.split(",")] for group in listed[1].split("},{")])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices.transpose(order) if order else devices).reshape(shape)
    if named := _MESH_GROUPS.search(line):
        axes, dims, order, over = named.groups()
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", axes)}
        devices = np.arange(math.prod(sizes.values()))
        if dims:
            devices = devices.reshape([int(n) for n in dims.split(",")])
            devices = devices.transpose([int(n) for n in order.split(",")]) if order else devices
        devices = devices.reshape(list(sizes.values()))
        within = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", over)]
        across = [i for i in range(len(sizes)) if i not in within]
        return devices.transpose(across + within).reshape(-1, math.prod(devices.shape[i] for i in within))
    return None
