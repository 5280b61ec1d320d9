"""What is chosen, read and left out of a split vocabulary is what it is of a whole one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from nca_jax.axes import RULES, named
from nca_jax.sharding import make_mesh
from nca_jax.split_vocabulary import take, top_k_ids, without

B, R, V, K = 4, 3, 32, 5
# replica, data, fsdp, tensor: the vocabulary over one axis, over the other, over both; rows over none, one, both.
MESHES = [(1, 1, 8, 1), (1, 1, 1, 8), (1, 1, 4, 2), (1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 2, 1)]


def mesh_of(sizes):
    return make_mesh(dict(zip(("replica", "data", "fsdp", "tensor"), sizes, strict=True)))


def log_p(seed: int = 0, shape=(B, R, V)) -> jax.Array:
    return jax.nn.log_softmax(jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32))


def split(mesh, array):
    return jax.device_put(array, named(mesh, "loss_rows", None, "head_vocab"))


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_on_every_mesh_the_same_to_the_last_bit(sizes):
    mesh, whole = mesh_of(sizes), log_p()
    ids = top_k_ids(whole, K)
    weight = log_p(1, ids.shape)

    def everything(log_p, ids, mesh=None):
        gradient = jax.grad(lambda x: jnp.sum(weight * take(x, ids, mesh)))(log_p)
        left_gradient = jax.grad(lambda x: jnp.sum(without(x, ids, -1e4, mesh) ** 2))(log_p)
        return (
            top_k_ids(log_p, K, mesh),
            take(log_p, ids, mesh),
            without(log_p, ids, -1e4, mesh),
            gradient,
            left_gradient,
        )

    found = jax.jit(lambda x, ids: everything(x, ids, mesh))(split(mesh, whole), ids)
    for ours, plain in zip(found, everything(whole, ids), strict=True):
        np.testing.assert_array_equal(ours, plain)
    # A gradient stays where its entries are.
    wanted = NamedSharding(mesh, PartitionSpec(RULES["loss_rows"], None, RULES["head_vocab"]))
    assert found[3].sharding.is_equivalent_to(wanted, 3)


def test_of_equal_entries_the_first_is_chosen():
    mesh = mesh_of((1, 1, 4, 2))
    flat = jnp.zeros((B, R, V)).at[..., [3, 17, 30]].set(1.0)
    found = jax.jit(lambda x: top_k_ids(x, K, mesh))(split(mesh, flat))
    np.testing.assert_array_equal(found, jnp.broadcast_to(jnp.array([3, 17, 30, 0, 1]), (B, R, K)))


@pytest.mark.parametrize("shape", [(B, R, 30), (3, 1, V)], ids=["vocabulary", "rows"])
def test_what_the_devices_do_not_divide_is_the_same_too(shape):
    mesh, whole = mesh_of((1, 2, 2, 2)), log_p(0, shape)
    ids = jax.jit(lambda x: top_k_ids(x, K, mesh))(whole)
    np.testing.assert_array_equal(ids, top_k_ids(whole, K))
    np.testing.assert_array_equal(jax.jit(lambda x: take(x, ids, mesh))(whole), take(whole, ids))
    np.testing.assert_array_equal(jax.jit(lambda x: without(x, ids, 0.0, mesh))(whole), without(whole, ids, 0.0))
