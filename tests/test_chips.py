"""Figures of accelerators, against what the vendors print in other units."""

from types import SimpleNamespace

import jax
import pytest

from nca_jax.chips import CHIPS, chip_named, chip_of, chips_in, mfu
from nca_jax.errors import UserError


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_a_device_kind_names_its_chip(kind, name):
    assert chip_of(kind).name == name and chip_named(name) is chip_of(kind)


@pytest.mark.parametrize("kind", ["cpu", "TPU v3", "TPU v4 lite", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", ""])
def test_an_unknown_device_is_not_guessed(kind):
    assert chip_of(kind) is None


def test_the_devices_of_the_tests_are_none():
    assert chip_of(jax.devices()[0].device_kind) is None


def test_an_unknown_name_is_one_sentence():
    with pytest.raises(UserError, match="'v9'; there are those of v4, v5e, v5p"):
        chip_named("v9")


@pytest.mark.parametrize(
    ("name", "chips", "pod_flops", "ici_gbit"),
    # Of a whole pod, and bits over the links of a chip, as Google's older pages have them.
    [
        ("v4", 4096, 1.1e18, 2400),
        ("v5e", 256, 50.63e15, 1600),
        ("v5p", 8960, 4.11e18, 4800),
        ("v6e", 256, 234.9e15, 3200),
        ("tpu7x", 9216, 21.26e18, 4800),
    ],
)
def test_tpus_agree_with_the_figures_of_pods(name, chips, pod_flops, ici_gbit):
    chip = chip_named(name)
    assert chips * chip.flops_bf16 == pytest.approx(pod_flops, rel=0.03)
    assert chip.ici_bytes_per_second * 8 == ici_gbit * 1e9


@pytest.mark.parametrize(("name", "pod_tbit"), [("v5e", 6.4), ("v6e", 25.6)])
def test_network_agrees_with_the_figures_of_pods(name, pod_tbit):
    assert 256 * chip_named(name).dcn_bytes_per_second * 8 == pytest.approx(pod_tbit * 1e12)


@pytest.mark.parametrize(
    ("name", "node_sparse_flops", "nvlink_both_ways", "mib_of_nvidia_smi"),
    [("h100", 15.8e15, 900e9, 81559), ("h200", 15.8e15, 900e9, 143771), ("b200", 36e15, 1800e9, 183359)],
)
def test_gpus_agree_with_a_node_of_eight(name, node_sparse_flops, nvlink_both_ways, mib_of_nvidia_smi):
    chip = chip_named(name)
    assert 8 * 2 * chip.flops_bf16 == pytest.approx(node_sparse_flops, rel=0.01)
    assert 2 * chip.ici_bytes_per_second == nvlink_both_ways
    assert chip.hbm_bytes == pytest.approx(mib_of_nvidia_smi * 2**20, rel=0.01)


def test_memory_is_faster_than_links_and_links_than_the_network():
    for chip in CHIPS:
        assert chip.hbm_bytes_per_second > chip.ici_bytes_per_second > chip.dcn_bytes_per_second > 1e9
        assert 100 < chip.flops_bf16 / chip.hbm_bytes_per_second < 600  # a slip in a unit would leave this range
        assert 15e9 < chip.hbm_bytes < 250e9


def test_a_device_can_be_half_a_chip():
    core = SimpleNamespace(num_cores=1)
    both = SimpleNamespace(num_cores=2)
    gpu = SimpleNamespace()
    assert chips_in([core] * 8, chip_named("tpu7x")) == 4
    assert chips_in([both] * 4, chip_named("v5p")) == 4
    assert chips_in([core] * 4, chip_named("v5e")) == 4
    assert chips_in([gpu] * 8, chip_named("h200")) == 8


def test_mfu_is_the_share_of_the_peak():
    # 100 TFLOP on 4 chips of 197 TFLOP/s in a quarter of a second: 100 / (4 * 197 / 4).
    assert mfu(100e12, 0.25, chip_named("v5e"), 4) == pytest.approx(100 / 197)
