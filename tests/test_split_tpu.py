"""What is split over the vocabulary stays so, as the TPU's compiler compiles it for 64 chips.

No TPU is needed, only libtpu; without it the tests are skipped. A compilation is a process of its own, this file run as
a script: pytest's process never loads libtpu.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import scaling_mesh

B, R, D, V, K = 8, 256, 2048, 32768, 256


def received() -> float:
    """Bytes that a device receives in the loss and its gradients, the vocabulary over all 8 x 8 chips."""
    from jax.experimental import topologies

    from nca_jax.axes import named
    from nca_jax.collectives import collectives
    from nca_jax.objectives import Support
    from nca_jax.sharding import make_mesh
    from nca_jax.vocab_loss import AnchorTerm, Hidden, Terms, weighted_loss

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:4x4x4").devices
    mesh = make_mesh({"data": 1, "fsdp": 8, "tensor": 8}, devices)
    terms = Terms(vocab_size=V, anchor=AnchorTerm(), support=Support("student_top_k", K))

    def loss(q_x, q_c, f, head, teacher_head, token, weight):
        return weighted_loss(Hidden(q_x, q_c, f), head, teacher_head, token, weight, 0.5, terms, mesh)[0]

    def array(sizes, dtype, *axes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=named(mesh, *axes))

    hidden = [array((B, R, D), jnp.bfloat16, "batch", None, None)] * 3
    heads = [array((V, D), jnp.bfloat16, "vocab", "embed")] * 2
    rows = [array((B, R), dtype, "batch", None) for dtype in (jnp.int32, jnp.float32)]
    program = jax.jit(jax.value_and_grad(loss, (0, 1, 3))).lower(*hidden, *heads, *rows).compile()
    return sum(c.nbytes for c in collectives(program.as_text(), mesh.size))


def in_child() -> float:
    """`received` of a process that never looks for a TPU; conftest.py's flags are the CPU's."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    path = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    env |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": path}
    child = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.slow
@needs_libtpu
def test_no_distribution_over_the_vocabulary_is_put_together():
    """Hidden states and their gradients, of two chunks of 1024 positions each, are most of it; less than half an array
    of all logits, of which there would be several."""
    states = B * R * D
    assert 3 * states * 2 < in_child() < B * R * V * 4 / 2


@pytest.mark.slow
@needs_libtpu
def test_no_device_makes_the_whole_gradient_of_a_tied_embedding():
    """Of the whole step, in which several lookups' gradients and the head's are added."""
    case = scaling_mesh.Case("small", "v5p:4x4x4")
    table = scaling_mesh.MODELS[case.model].vocab_size * scaling_mesh.MODELS[case.model].hidden_size * 4
    assert scaling_mesh.in_child(case)["peak bytes"] < 1.5 * table  # with it, twice of it live


if __name__ == "__main__":
    print(json.dumps(received()))
