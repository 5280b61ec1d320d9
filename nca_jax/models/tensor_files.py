"""Safetensors files read and written piece by piece, on local disks and in buckets.

The safetensors library maps a whole file into memory, or holds a whole file to write it, and knows local disks only. A
model of 8 or 70 billion parameters must not pass through a host that way, so this is the format's definition
(https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length, a JSON header, the tensors' bytes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from etils import epath

from nca_jax.errors import UserError

# Weights that can be trained on. Integers and eight-bit floats are quantised weights, which need their scales.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": jnp.dtype(jnp.bfloat16)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the format's limit
_BLOCK_BYTES = 16 * 2**20  # what is read at a time where only some of a row is wanted

Index = tuple[slice, ...]


class StoredTensor(NamedTuple):
    """Where one tensor lies. `dtype` is the format's name and may be one that cannot be read."""

    file: epath.Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Size in the file; of dtypes in DTYPES only."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(file: epath.Path) -> dict[str, StoredTensor]:
    """Tensor name -> where it lies.

    Raises:
      UserError: the file is not in the format, or is not as long as its header says.
    """
    try:
        total = file.stat().length
        with file.open("rb") as stream:
            length = int.from_bytes(_read_exactly(stream, 8), "little")
            if length > min(_MAX_HEADER_BYTES, total - 8):
                raise ValueError("no header")
            header = json.loads(_read_exactly(stream, length))
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            stated = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else stop - start
            if start != end or stop - start != stated or min(shape, default=0) < 0:
                raise ValueError(f"tensor {name} does not lie where its header says")
            tensors[name], end = StoredTensor(file, dtype, shape, 8 + length + start), stop
        if 8 + length + end != total:
            raise ValueError(f"{total} bytes instead of {8 + length + end}")
        return tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read as safetensors ({error}); download it again.") from error


def read_parts(tensor: StoredTensor, indices: Iterable[Index]) -> list[np.ndarray]:
    """Parts of a tensor, in its own dtype. Rows that several parts want are read once.

    Beside the result there is at most one block of 16 MiB (or one row) in memory.

    Args:
      tensor: from `read_header`, of a dtype in DTYPES.
      indices: one slice per axis, of step 1. Only the first axis of [rows, ...] saves reading.
    """
    dtype, shape = DTYPES[tensor.dtype], tensor.shape
    wanted = [tuple(range(*s.indices(size)) for s, size in zip(index, shape, strict=True)) for index in indices]
    parts = [np.empty([len(r) for r in ranges], dtype) for ranges in wanted]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
    with tensor.file.open("rb") as stream:
        for rows in _distinct([ranges[0] for ranges in wanted]):
            stream.seek(tensor.start + rows.start * row_bytes)
            for first in range(rows.start, rows.stop, step):
                last = min(first + step, rows.stop)
                block = np.frombuffer(_read_exactly(stream, (last - first) * row_bytes), dtype)
                block = block.reshape(last - first, *shape[1:])
                for ranges, part in zip(wanted, parts, strict=True):
                    if ranges[0] == rows:
                        rest = tuple(slice(r.start, r.stop) for r in ranges[1:])
                        part[first - rows.start : last - rows.start] = block[:, *rest]
    return parts


def read_blocks(tensor: StoredTensor) -> Iterator[np.ndarray]:
    """The bytes of a tensor as uint8, block after block, for comparing."""
    left = tensor.nbytes
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        while left:
            block = _read_exactly(stream, min(left, _BLOCK_BYTES))
            left -= len(block)
            yield np.frombuffer(block, np.uint8)


class NewTensor(NamedTuple):
    """One tensor to be written; `values()` is called when its turn has come and gives an array of that shape."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]


def write_tensors(
    directory: epath.Path, tensors: Sequence[NewTensor], dtype: np.dtype, shard_bytes: int
) -> dict[str, int]:
    """Writes `model.safetensors`, or shards and their index; one tensor is in memory at a time.

    A shard has at most `shard_bytes`, or is one tensor that is larger.

    Returns:
      tensor name -> its bytes.

    Raises:
      UserError: a value that is not finite in `dtype`.
    """
    sizes = {t.name: math.prod(t.shape) * dtype.itemsize for t in tensors}
    shards: list[list[NewTensor]] = []
    room = -1
    for tensor in tensors:
        if sizes[tensor.name] > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= sizes[tensor.name]

    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        with (directory / name).open("wb") as stream:
            stream.write(_header(shard, sizes, dtype))
            for tensor in shard:
                flat = np.ascontiguousarray(tensor.values(), dtype).reshape(-1)
                for first in range(0, flat.size, _BLOCK_BYTES // 4):
                    block = flat[first : first + _BLOCK_BYTES // 4]
                    if not np.isfinite(block.astype(np.float32)).all():
                        raise UserError(f"{tensor.name} is not finite in {dtype}; choose another dtype or checkpoint.")
                    stream.write(block.view(np.uint8).data)
                del flat
    return sizes


def _header(shard: Sequence[NewTensor], sizes: Mapping[str, int], dtype: np.dtype) -> bytes:
    # transformers reads weights only from a file that says which framework's naming it follows.
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in shard:
        start, end = end, end + sizes[tensor.name]
        header[tensor.name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    return len(text).to_bytes(8, "little") + text


def _read_exactly(stream, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise ValueError("the file ends too early")
    return data


def _distinct(ranges: Iterable[range]) -> list[range]:
    return sorted(set(ranges), key=lambda r: (r.start, r.stop))
