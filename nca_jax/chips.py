"""Published peak figures of accelerators: what a step could reach at best, and the share of it that a run reaches.

Peaks are of dense bfloat16 matrix multiplication; NVIDIA prints twice as much "with sparsity". None of them is reached
by a real program.

Sources are the vendors' public specifications: for TPUs the "system architecture" pages of Google Cloud (v4, v5e, v5p,
v6e, TPU7x) and, for what the page of v4 leaves out, Google's announcement of v5p, which compares both; for GPUs the
data sheets of NVIDIA's A100, H100, H200 and DGX B200; SXM boards only, as PCIe boards are slower or without NVLink.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from nca_jax.errors import UserError

_TERA, _GIGA, _GIB = 1e12, 1e9, 2**30


class Chip(NamedTuple):
    """Peak figures of one chip, which is not always one `jax.Device`: see `cores` and `chips_in`.

    Attributes:
      name: what people call it, such as "v5e".
      kinds: what `jax.Device.device_kind` says.
      flops_bf16: floating-point operations a second, a multiply-add being two.
      hbm_bytes: memory. A program gets a little less: the runtime keeps a part (v5p's figure is without it), and on
        GPUs jax takes only 75 % unless it is told otherwise.
      hbm_bytes_per_second: reading or writing it.
      ici_bytes_per_second: to the other chips of its slice (TPU) or its node (GPU, NVLink), over all of its links
        together and in one direction: half of the published "bidirectional" figure in bytes, which is also the older
        published figure in bits (v5p: 1200 GB/s and 4800 Gb/s, both 600 GB/s). A ring along one of the axes of a
        torus uses two links, that is a half of it in a 2D torus (v5e, v6e) and a third in a 3D torus.
      dcn_bytes_per_second: to chips elsewhere, in one direction: its share of the host's network cards. What there is
        depends on the machine and the data center, so take it for an assumption. For v5e, v5p, v6e and TPU7x it is
        Google's figure for its own machines, for v4 that of v5p is assumed, for GPUs it is that of NVIDIA's DGX.
      cores: TensorCores. jax makes one device of a v5p or, in a real run, of a v4 (megacore), two of a TPU7x; and of a
        v4 too where it is only described (`jax.experimental.topologies`).
    """

    name: str
    kinds: tuple[str, ...]
    flops_bf16: float
    hbm_bytes: float
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    dcn_bytes_per_second: float
    cores: int = 1


def _chip(
    name: str, kinds: tuple[str, ...], tflops: float, gib: int, hbm: float, ici: float, dcn: float, cores: int
) -> Chip:
    """Bandwidths in GB/s. Sizes count as GiB, NVIDIA's too: nvidia-smi shows 143771 MiB for the "141 GB" of an H200."""
    return Chip(name, kinds, tflops * _TERA, gib * _GIB, hbm * _GIGA, ici * _GIGA, dcn * _GIGA, cores)


CHIPS = (
    # name, device_kind, TFLOP/s, GiB, GB/s of HBM, ICI and DCN, cores
    _chip("v4", ("TPU v4",), 275, 32, 1200, 300, 6.25, 2),
    _chip("v5e", ("TPU v5 lite", "TPU v5e"), 197, 16, 819, 200, 3.125, 1),
    _chip("v5p", ("TPU v5", "TPU v5p"), 459, 95, 2765, 600, 6.25, 2),
    _chip("v6e", ("TPU v6 lite", "TPU v6e"), 918, 32, 1638, 400, 12.5, 1),
    _chip("tpu7x", ("TPU7x",), 2307, 192, 7380, 600, 12.5, 2),
    _chip("a100_40gb", ("NVIDIA A100-SXM4-40GB",), 312, 40, 1555, 300, 25, 1),
    _chip("a100_80gb", ("NVIDIA A100-SXM4-80GB",), 312, 80, 2039, 300, 25, 1),
    _chip("h100", ("NVIDIA H100 80GB HBM3",), 989, 80, 3350, 450, 50, 1),
    _chip("h200", ("NVIDIA H200",), 989, 141, 4800, 450, 50, 1),
    _chip("b200", ("NVIDIA B200",), 2250, 180, 8000, 900, 50, 1),
)


def chip_of(device_kind: str) -> Chip | None:
    """The chip that `jax.Device.device_kind` names. None for any other and for CPUs: a guess would look like a fact."""
    return next((chip for chip in CHIPS if device_kind in chip.kinds), None)


def chip_named(name: str) -> Chip:
    """The chip of that name.

    Raises:
      UserError: there is none.
    """
    for chip in CHIPS:
        if chip.name == name:
            return chip
    raise UserError(f"no figures for a chip {name!r}; there are those of {', '.join(chip.name for chip in CHIPS)}.")


def chips_in(devices: Sequence[jax.Device], chip: Chip) -> float:
    """How many chips these devices are; a device of one core of a chip with two is half a chip."""
    return sum(getattr(device, "num_cores", chip.cores) for device in devices) / chip.cores


def mfu(flops: float, seconds: float, chip: Chip, chips: float) -> float:
    """Model FLOPs utilisation (the term of the PaLM paper, appendix B): the share of the peak, between 0 and 1.

    Args:
      flops: that the arithmetic of the model needs, over all chips; what is computed twice to save memory not counted.
      seconds: that it took.
      chips: how many took part: `chips_in(mesh.devices.flat, chip)`.
    """
    return flops / (seconds * chip.flops_bf16 * chips)
