"""What the table of axes says, and that the compiler follows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nca_jax.axes import constrain, named, parts
from nca_jax.sharding import make_mesh
from nca_jax.vocab_loss import AnchorTerm, Hidden, Terms, weighted_loss


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1, "fsdp": 4, "tensor": 2})


def test_names_become_mesh_axes(mesh):
    assert named(mesh, "batch", None, "heads").spec == PartitionSpec(("replica", "data", "fsdp"), None, ("tensor",))
    assert [parts(mesh, axis) for axis in ("batch", "heads", "head_vocab", "norm", None)] == [4, 2, 8, 1, 1]


def test_a_dimension_that_does_not_divide_stays_whole(mesh):
    place = jax.jit(lambda x: constrain(mesh, x, "batch", "heads"))
    assert place(jnp.ones((8, 6))).sharding.is_equivalent_to(named(mesh, "batch", "heads"), 2)
    assert place(jnp.ones((7, 6))).sharding.is_equivalent_to(named(mesh, None, "heads"), 2)


def test_without_a_mesh_nothing_happens():
    x = jnp.ones(3)
    assert constrain(None, x, "batch") is x


def test_in_the_loss_each_device_takes_a_part_of_the_vocabulary(mesh):
    """The compiled program of a device has logits [16, V / 8], and none of the whole vocabulary."""
    B, R, D, V = 4, 4, 8, 272
    terms = Terms(vocab_size=V, anchor=AnchorTerm(), chunk_size=16)
    rng = np.random.default_rng(0)
    hidden_BxRxD = jax.device_put(rng.normal(size=(B, R, D)).astype(np.float32), named(mesh, "batch", None, None))
    head_VxD = jax.device_put(rng.normal(size=(V, D)).astype(np.float32), named(mesh, "vocab", "embed"))
    weight_BxR, token_BxR = jnp.full((B, R), 1 / 16), jnp.zeros((B, R), jnp.int32)

    def loss(q_x, head):
        hidden = Hidden(q_x, q_x * 0.5, q_x * 0.25)
        return weighted_loss(hidden, head, head, token_BxR, weight_BxR, 0.5, terms, mesh)[0]

    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden_BxRxD, head_VxD).compile().as_text()
    assert f"f32[16,{V // 8}]" in program
    assert f"f32[16,{V}]" not in program and f"f32[{V},{D}]" not in program
