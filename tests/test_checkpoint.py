"""Saved and restored, also from damage and onto other devices."""

import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nca_jax.checkpoint import Checkpoints
from nca_jax.errors import UserError
from nca_jax.train_step import TrainState

FINGERPRINT = {"seed": 0, "optimizer.learning_rate": 5e-6, "teacher.source": None, "domain.settings.names": ("a", "b")}
OPTIMIZER = optax.adamw(1e-3)


def sharding(devices: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), "fsdp"), PartitionSpec("fsdp"))


def make_state(step: int, devices: int = 1) -> TrainState:
    """A state after `step` steps: no two steps have an equal leaf."""
    params = {"w": jnp.arange(16.0) + step, "b": jnp.full(8, step, jnp.bfloat16)}
    moments = jax.tree.map(lambda x: x + jnp.asarray(step, x.dtype), OPTIMIZER.init(params))
    return jax.tree.map(lambda x: jax.device_put(x, placed(x, devices)), TrainState(jnp.int32(step), params, moments))


def placed(x, devices: int) -> NamedSharding:
    spread = sharding(devices)
    return spread if x.ndim else NamedSharding(spread.mesh, PartitionSpec())


def abstract(devices: int = 1) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed(x, devices)), make_state(0))


def position(step: int) -> dict:
    return {"iterator": {"next_index": step * 8, "nested": [1, {"a": "b"}]}, "seconds": step / 4}


def save(directory, *steps: int, devices: int = 1, keep: int = 3) -> None:
    checkpoints = Checkpoints(directory, keep, FINGERPRINT)
    for step in steps:
        checkpoints.save(make_state(step, devices), position(step), step)
    checkpoints.close()


def restore(directory, devices: int = 1, **changes):
    checkpoints = Checkpoints(directory, 3, FINGERPRINT | changes)
    try:
        return checkpoints.restore_latest(abstract(devices))
    finally:
        checkpoints.close()


def assert_is_step(restored, step: int) -> None:
    state, data, found = restored
    assert (found, data) == (step, position(step))
    for ours, saved in zip(jax.tree.leaves(state), jax.tree.leaves(make_state(step)), strict=True):
        assert ours.dtype == saved.dtype
        np.testing.assert_array_equal(ours, saved)


def truncate_arrays(checkpoint) -> None:
    (arrays,) = (checkpoint / "state" / "d").iterdir()
    arrays.write_bytes(arrays.read_bytes()[: arrays.stat().st_size // 2])


DAMAGE = {
    "state without its metadata": lambda checkpoint: (checkpoint / "state" / "_METADATA").unlink(),
    "state without its arrays": lambda checkpoint: shutil.rmtree(checkpoint / "state" / "d"),
    "arrays cut short": truncate_arrays,
    "no state": lambda checkpoint: shutil.rmtree(checkpoint / "state"),
    "no data position": lambda checkpoint: shutil.rmtree(checkpoint / "data"),
    "data position cut short": lambda checkpoint: (checkpoint / "data" / "metadata").write_text('{"ite'),
    "empty": lambda checkpoint: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in checkpoint.iterdir()],
}


def test_no_checkpoint_is_none(tmp_path):
    assert restore(tmp_path / "checkpoints") is None


def test_round_trip_of_state_and_data_position(tmp_path):
    save(tmp_path, 1, 2)
    assert_is_step(restore(tmp_path), 2)


def test_only_the_newest_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


@pytest.mark.parametrize("devices", [1, 4])
def test_saved_on_eight_devices_and_restored_on_fewer(devices, tmp_path):
    save(tmp_path, 1, devices=8)
    restored = restore(tmp_path, devices)
    assert_is_step(restored, 1)
    assert len(restored[0].params["w"].sharding.device_set) == devices
    assert restored[0].params["w"].addressable_shards[0].data.shape == (16 // devices,)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"teacher.source": "other"}, "teacher.source: None there, 'other' now"),
        ({"loss.new_key": 3}, "loss.new_key: None there, 3 now"),
    ],
)
def test_a_checkpoint_of_another_config_is_refused(changes, shown, tmp_path):
    save(tmp_path, 1)
    with pytest.raises(UserError) as error:
        restore(tmp_path, **changes)
    assert f"another config ({shown})" in str(error.value)
    assert (tmp_path / "1").exists(), "nothing is deleted"


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_checkpoint_gives_way_to_the_previous_and_can_be_saved_again(damage, tmp_path, caplog):
    save(tmp_path, 1, 2)
    damage(tmp_path / "2")
    with caplog.at_level(logging.WARNING, "nca_jax"):
        assert_is_step(restore(tmp_path), 1)
    assert "checkpoint 2 cannot be read and is skipped" in caplog.text
    save(tmp_path, 2)
    assert_is_step(restore(tmp_path), 2)


def test_an_unfinished_write_is_not_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp-0")
    assert_is_step(restore(tmp_path), 1)


def test_no_readable_checkpoint_is_an_error_and_deletes_nothing(tmp_path):
    save(tmp_path, 1, 2)
    for step in "12":
        truncate_arrays(tmp_path / step)
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        restore(tmp_path)
    assert (tmp_path / "1").exists() and (tmp_path / "2").exists()
