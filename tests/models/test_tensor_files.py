"""The safetensors format, read and written in pieces; the safetensors library is the reference."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from nca_jax.errors import UserError
from nca_jax.models import tensor_files
from nca_jax.models.tensor_files import DTYPES, NewTensor, read_blocks, read_header, read_parts, write_tensors

RNG = np.random.default_rng(0)
TENSORS = {
    "matrix": RNG.normal(size=(7, 5)).astype(np.float32),
    "half": RNG.normal(size=(4, 3, 2)).astype(ml_dtypes.bfloat16),
    "vector": RNG.normal(size=11).astype(np.float16),
    "empty": np.zeros((0, 3), np.float32),
}


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return epath.Path(path)


def entry(start, stop, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return epath.Path(tmp_path / "model.safetensors")


@pytest.mark.parametrize("block_bytes", [1, 24, 1 << 20])
def test_parts_equal_the_slices_of_the_library(block_bytes, file, monkeypatch):
    """Whatever the block: smaller than a row, two rows, or the whole tensor."""
    monkeypatch.setattr(tensor_files, "_BLOCK_BYTES", block_bytes)
    header = read_header(file)
    assert header.keys() == TENSORS.keys()
    assert {name: (t.shape, DTYPES[t.dtype]) for name, t in header.items()} == {
        name: (t.shape, t.dtype) for name, t in TENSORS.items()
    }
    indices = [np.s_[:, :], np.s_[2:6, 1:3], np.s_[2:6, 3:5], np.s_[6:7, :], np.s_[3:3, :]]
    for part, index in zip(read_parts(header["matrix"], indices), indices, strict=True):
        np.testing.assert_array_equal(part, TENSORS["matrix"][index])
    (part,) = read_parts(header["half"], [np.s_[1:4, 0:2, 1:2]])
    np.testing.assert_array_equal(part, TENSORS["half"][1:4, 0:2, 1:2])
    (part,) = read_parts(header["vector"], [(np.s_[4:9],)])
    np.testing.assert_array_equal(part, TENSORS["vector"][4:9])
    assert b"".join(map(bytes, read_blocks(header["matrix"]))) == TENSORS["matrix"].tobytes()


def test_rows_that_several_parts_want_are_read_once(file, monkeypatch):
    tensor, read, counts = read_header(file)["matrix"], tensor_files._read_exactly, []
    monkeypatch.setattr(tensor_files, "_read_exactly", lambda stream, n: counts.append(n) or read(stream, n))
    read_parts(tensor, [np.s_[0:4, 0:2], np.s_[0:4, 2:5], np.s_[4:7, 0:2], np.s_[4:7, 2:5]])
    assert sum(counts) == TENSORS["matrix"].nbytes


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"a": entry(0, 8, [3])}, b"12345678"),  # 3 float32 are not 8 bytes
        ({"a": entry(4, 12, [2])}, b"123456789012"),  # a hole before it
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"123456789012"),  # they overlap
        ({"a": entry(0, 8, [2])}, b"1234"),  # cut
        ({"a": entry(0, 8, [2])}, b"12345678rest"),  # something follows
        ({"a": entry(0, 8, [-1, -2])}, b"12345678"),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": 7}, b""),
        ([1, 2], b""),
        (b"{not json", b""),
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(header, data, tmp_path):
    with pytest.raises(UserError, match=r"bad\.safetensors cannot be read as safetensors .*; download it again"):
        read_header(write_raw(tmp_path / "bad.safetensors", header, data))


@pytest.mark.parametrize("length", [10**6, 2**63])
def test_a_header_longer_than_the_file_is_not_read(length, tmp_path):
    with pytest.raises(UserError, match="no header"):
        read_header(write_raw(tmp_path / "bad.safetensors", {}, length=length))


def new_tensors(order):
    def values(name):
        order.append(name)
        return TENSORS[name].astype(np.float32)

    return [NewTensor(name, t.shape, lambda name=name: values(name)) for name, t in TENSORS.items()]


def test_one_file_as_the_library_reads_it(tmp_path):
    sizes = write_tensors(epath.Path(tmp_path), new_tensors([]), np.dtype(np.float32), 10**9)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert sizes == {name: 4 * t.size for name, t in TENSORS.items()}
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(loaded[name], tensor.astype(np.float32))
    assert read_header(epath.Path(tmp_path / "model.safetensors"))["matrix"].start % 8 == 0


def test_shards_are_filled_in_order_and_indexed(tmp_path):
    order = []
    write_tensors(epath.Path(tmp_path), new_tensors(order), np.dtype(DTYPES["BF16"]), shard_bytes=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    # 70 + 48 + 22 + 0 bytes: the first fills a shard nearly, the others share the second.
    assert index["weight_map"] == {
        "matrix": "model-00001-of-00002.safetensors",
        "half": "model-00002-of-00002.safetensors",
        "vector": "model-00002-of-00002.safetensors",
        "empty": "model-00002-of-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == 140
    assert order == list(TENSORS)
    for name, shard in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / shard)[name], TENSORS[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("dtype", "value"), [("F32", np.nan), ("F16", 1e6), ("BF16", np.inf)])
def test_values_that_are_not_finite_in_the_dtype_are_refused(dtype, value, tmp_path):
    tensor = NewTensor("weight", (2,), lambda: np.array([1.0, value], np.float32))
    with pytest.raises(UserError, match="weight is not finite in"), np.errstate(over="ignore"):
        write_tensors(epath.Path(tmp_path), [tensor], DTYPES[dtype], 10**9)
