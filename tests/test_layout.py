"""The table of a run's start: how arrays are split, and what a device holds of them."""

import re

import jax
import pytest

from configs import medmcqa
from nca_jax.assembly import assemble
from nca_jax.layout import layout_table
from nca_jax.models.presets import preset
from nca_jax.sharding import make_mesh

# 8,190,735,360 parameters, 36 layers, vocabulary 151,936 x 4096 twice.
QWEN3_8B = 8_190_735_360


@pytest.fixture(scope="module")
def table() -> str:
    config = medmcqa.get_config("qwen3_8b")
    config.teacher.dtype, config.model.compute_dtype = "bfloat16", "bfloat16"
    config.mesh.fsdp, config.mesh.tensor = 4, 2
    config.mesh.decode_tensor = 8
    arch, mesh = preset("qwen3_8b"), make_mesh(config.mesh, jax.devices()[:8])
    job = assemble(config, arch, arch, (0,), arch.vocab_size, mesh)
    return layout_table(config, job, arch, arch, mesh)


def test_on_one_device_it_is_a_line():
    config, arch = medmcqa.get_config("tiny"), preset("tiny_llama3")
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    line = layout_table(config, assemble(config, arch, arch, (0,), arch.vocab_size, mesh), arch, arch, mesh)
    # 135,488 parameters of 4 bytes, and two moments of each.
    assert line.startswith("layout: one cpu device; MB of all weights 0.5, optimizer state and averages 1.1, ")


def megabytes(table: str, what: str) -> float:
    (line,) = (line for line in table.splitlines() if line.strip().startswith(f"{what}  "))
    return float(line.split()[-1])


def test_both_meshes_are_named(table):
    assert "training replica 1 x data 1 x fsdp 4 x tensor 2; decode replica 1 x data 1 x fsdp 1 x tensor 8" in table


def test_a_weight_has_its_shape_its_split_and_its_share(table):
    assert re.search(r"query +36x4096x32x128 +layers embed/fsdp heads/tensor head_dim +302\.0", table)
    assert megabytes(table, "query") == round(36 * 4096 * 32 * 128 * 4 / 8 / 1e6, 1)
    assert megabytes(table, "embedding") == round(151_936 * 4096 * 4 / 8 / 1e6, 1)
    assert re.search(r"final_norm +4096 +norm ", table), "not split"


def test_totals_are_of_one_device(table):
    # Norms are whole on every device, so each holds a little more than its eighth.
    assert megabytes(table, "all weights") == pytest.approx(QWEN3_8B * 4 / 8 / 1e6, rel=1e-3)
    assert megabytes(table, "optimizer state and averages") == pytest.approx(QWEN3_8B * 8 / 8 / 1e6, rel=1e-3)
    assert megabytes(table, "frozen teacher") == pytest.approx(QWEN3_8B * 2 / 8 / 1e6, rel=1e-3)
    assert megabytes(table, "all weights while sampling") == pytest.approx(QWEN3_8B * 2 / 8 / 1e6, rel=1e-3)
    # 36 layers, one of the 8 heads, keys and values of 128 bfloat16.
    assert megabytes(table, "keys and values of one row and token while sampling") == round(36 * 2 * 128 * 2 / 1e6, 1)
    # A chunk of 1024 positions, an eighth of the vocabulary each, float32.
    assert megabytes(table, "logits of one chunk of the loss") == round(1024 * 151_936 / 8 * 4 / 1e6, 1)
    assert "rows: 128 a step in 32 micro-batches, each split over 4 devices" in table
