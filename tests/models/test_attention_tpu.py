"""The decoder with splash attention goes through the real TPU compiler, and needs less memory than with plain XLA.

No TPU is needed, only libtpu, in the version that jax's own `tpu` extra pins; without it the tests are skipped. Each
compilation is a process of its own, this file run as a script: pytest's process never loads libtpu.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

# At 256 plain attention's reported temporaries are smaller than the kernel's (2.7 against 6.0 MB): presumably scores
# then fit into the chip's vector memory, which the report leaves out.
B, T, C = 8, 512, 512


def temporaries(attention: str, head_dim: int) -> int:
    """Bytes that the compiled loss and gradient of a small Llama needs per device, besides arguments and results."""
    from flax import nnx
    from jax.experimental import topologies

    from nca_jax.models.decoder import decoder_graph, encode_prefix, weight_table
    from nca_jax.models.presets import preset
    from nca_jax.sharding import make_mesh, named, params_sharding

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, devices)
    sizes = {"hidden_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": head_dim, "mlp_size": 1024}
    arch = dataclasses.replace(preset("tiny_llama3"), **sizes)
    graph = decoder_graph(arch, jnp.bfloat16, attention=attention, mesh=mesh)

    def loss(params, prefix_C, token_BxT):
        model = nnx.merge(graph, params)
        past = [encode_prefix(model, prefix_C)]
        hidden_BxTxD, _ = model(token_BxT, C + jnp.arange(T)[None], past)
        return jnp.square(hidden_BxTxD.astype(jnp.float32)).mean()

    shardings = params_sharding(mesh, arch)
    params = {n: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=shardings[n]) for n, s in weight_table(arch).items()}
    prefix_C = jax.ShapeDtypeStruct((C,), jnp.int32, sharding=named(mesh, None))
    token_BxT = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=named(mesh, "batch", None))
    program = jax.jit(jax.value_and_grad(loss)).lower(params, prefix_C, token_BxT).compile()
    assert ("tpu_custom_call" in program.as_text()) == (attention == "splash")
    return program.memory_analysis().temp_size_in_bytes


def compiled(attention: str, head_dim: int) -> int:
    """`temporaries` of a child. On the cpu platform it never looks for a TPU; conftest.py's flags are the CPU's."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    path = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
    env |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": path}
    command = [sys.executable, __file__, attention, str(head_dim)]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.slow
@needs_libtpu
def test_splash_compiles_for_a_tpu_and_needs_less_memory_than_xla():
    # One layer's float32 scores on one device, which has half of the examples and of the heads.
    scores = B // 2 * 4 * T * (C + T) * 4
    assert compiled("splash", 128) < compiled("xla", 128) - scores


@pytest.mark.slow
@needs_libtpu
def test_splash_compiles_for_heads_narrower_than_the_128_lanes():
    compiled("splash", 64)


if __name__ == "__main__":
    print(json.dumps(temporaries(sys.argv[1], int(sys.argv[2]))))
