"""Saved and restored, also from damage and onto other devices."""

import contextlib
import dataclasses
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

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
    rate(directory, dict.fromkeys(steps), devices, keep)


def rate(directory, accuracies: dict[int, float | None], devices: int = 1, keep: int = 1, best: int = 0):
    """Saves steps with their accuracies; returns what is the best then."""
    checkpoints = Checkpoints(directory, keep, FINGERPRINT, best)
    for step, accuracy in accuracies.items():
        checkpoints.save(make_state(step, devices), position(step), step, accuracy)
    checkpoints.close()
    return checkpoints.best()


def kept(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


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
    assert kept(tmp_path) == ["2", "3"]


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
    aside = next(tmp_path.glob("2.skipped-*"))
    assert f"checkpoint 2 is now {aside}" in caplog.text, "nothing is deleted"
    save(tmp_path, 2)
    assert_is_step(restore(tmp_path), 2)


def test_an_unfinished_write_is_not_a_checkpoint_and_is_cleared_away(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    assert_is_step(restore(tmp_path), 1)
    assert kept(tmp_path) == ["1"]


def test_no_readable_checkpoint_is_an_error_and_deletes_nothing(tmp_path):
    save(tmp_path, 1, 2)
    for step in "12":
        truncate_arrays(tmp_path / step)
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        restore(tmp_path)
    assert (tmp_path / "1").exists() and (tmp_path / "2").exists()


@pytest.mark.parametrize(
    ("accuracies", "keep", "best", "stay", "is_best"),
    [
        ({1: 0.5, 2: 0.9, 3: None, 4: 0.7, 5: 0.6}, 1, 1, ["2", "5"], (2, 0.9)),
        ({1: 0.5, 2: 0.9, 3: None, 4: 0.7, 5: 0.6}, 1, 2, ["2", "4", "5"], (2, 0.9)),
        ({1: 0.5, 2: 0.9, 3: 0.2, 4: 0.7, 5: 0.6}, 2, 0, ["4", "5"], (4, 0.7)),
        ({1: 0.5, 2: 0.9, 3: 0.9, 4: 0.7}, 1, 1, ["3", "4"], (3, 0.9)),
        ({1: 0.0, 2: None, 3: None}, 1, 1, ["1", "3"], (1, 0.0)),
        ({1: None, 2: None, 3: None}, 1, 2, ["3"], None),
    ],
    ids=["best and latest", "two best", "latest only", "of equal ones the newer", "a zero is one", "none evaluated"],
)
def test_the_best_stay_beside_the_latest_also_across_a_restart(accuracies, keep, best, stay, is_best, tmp_path):
    for run in ({s: a for s, a in accuracies.items() if s <= 2}, {s: a for s, a in accuracies.items() if s > 2}):
        found = rate(tmp_path, run, keep=keep, best=best)
    assert kept(tmp_path) == stay
    assert found == is_best
    assert_is_step(restore(tmp_path), max(accuracies))


def test_an_accuracy_that_cannot_be_read_does_no_harm(tmp_path):
    rate(tmp_path, {1: 0.9, 2: 0.5, 3: 0.1}, keep=3)
    (tmp_path / "1" / "metrics" / "metrics").write_text('{"accu')
    assert rate(tmp_path, {4: 0.2}, keep=1, best=1) == (2, 0.5)
    assert kept(tmp_path) == ["2", "4"]


def test_a_step_that_is_there_is_not_written_again(tmp_path):
    rate(tmp_path, {1: 0.9})
    checkpoints = Checkpoints(tmp_path, 1, FINGERPRINT)
    checkpoints.save(make_state(7), position(7), 1)
    checkpoints.close()
    assert checkpoints.best() == (1, 0.9)
    assert_is_step(restore(tmp_path), 1)


# ---------------------------------------------------------------- permissions and disks


@pytest.fixture
def ordinary_directory(tmp_path):
    """A directory of a user for whom permissions are binding, which the test runs as: root reads everything."""
    directory = Path(tempfile.mkdtemp())
    root = os.geteuid() == 0
    if root:
        save(tmp_path, 1)  # imports what is imported late: the packages may be root's alone
        restore(tmp_path)
        nobody = 65534
        os.chown(directory, nobody, nobody)
        os.seteuid(nobody)
    yield directory
    if root:
        os.seteuid(0)
    for path, _, _ in os.walk(directory):
        os.chmod(path, 0o700)
    shutil.rmtree(directory)


@pytest.mark.parametrize("where", ["", "state/d", "metrics/metrics", "data"])
def test_an_unreadable_checkpoint_is_kept_and_can_be_had_back(where, ordinary_directory, caplog):
    rate(ordinary_directory, {1: None, 2: 0.5}, keep=3)
    denied = ordinary_directory / "2" / where
    mode = denied.stat().st_mode
    denied.chmod(0)
    if where == "metrics/metrics":  # which restoring does not need
        assert_is_step(restore(ordinary_directory), 2)
        return
    with caplog.at_level(logging.WARNING, "nca_jax"):
        assert_is_step(restore(ordinary_directory), 1)
    assert "checkpoint 2 cannot be read and is skipped" in caplog.text
    aside = next(ordinary_directory.glob("2.skipped-*"))
    (aside / where).chmod(mode)
    aside.rename(ordinary_directory / "2")
    assert_is_step(restore(ordinary_directory), 2)


def test_a_directory_that_may_not_be_written_is_an_error_at_once(ordinary_directory):
    ordinary_directory.chmod(0o500)
    for directory in (ordinary_directory, ordinary_directory / "new"):
        with pytest.raises(UserError) as error:
            Checkpoints(directory, 1, FINGERPRINT)
        assert str(error.value).startswith(f"{directory} cannot be written (Permission denied); free space there or")


def test_unreadable_and_not_to_be_renamed_is_an_error(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    truncate_arrays(tmp_path / "2")

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(Checkpoints(tmp_path, 3, FINGERPRINT)._directory), "rename", denied)
    with pytest.raises(UserError, match=r"checkpoint 2 cannot be read, nor renamed \(Permission denied\); make it"):
        restore(tmp_path)
    assert kept(tmp_path) == ["1", "2"]


def sentence(step: int, directory, reason: str, last: str) -> str:
    return (
        f"checkpoint {step} cannot be written to {directory} ({reason}), {last}; free space there or make it writable, "
        "then start the same command again.\n"
    )


def failing_run(function, directory) -> str:
    """What a process of its own prints that calls a function of this module: threads of a write that failed linger."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_checkpoint\n"
        "from nca_jax.command import set_up_logging; set_up_logging()\n"
        f"test_checkpoint.{function.__name__}({str(directory)!r})\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "ERROR" not in run.stderr, "Orbax says it again, with tracebacks"
    return run.stdout


def tell(write) -> None:
    try:
        write()
    except UserError as error:
        print(error)


def run_into_a_limit(directory) -> None:
    """No file may be larger than 64 kB, as a quota would have it; no root needed."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for noticed in ("close", "wait", "save"):
        checkpoints = Checkpoints(Path(directory) / noticed, 1, FINGERPRINT)
        checkpoints.save(make_state(1), position(1), 1)
        checkpoints.wait()
        large = dataclasses.replace(make_state(2), params={"w": jax.random.normal(jax.random.key(0), 1 << 16)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        checkpoints.save(large, position(2), 2)  # does not fail yet
        again = (make_state(3), position(3), 3)
        tell(partial(getattr(checkpoints, noticed), *(again if noticed == "save" else ())))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_write_that_fails_in_the_background_is_noticed_by_whatever_comes_next(tmp_path):
    last = "the last good checkpoint is step 1"
    said = failing_run(run_into_a_limit, tmp_path)
    assert said == "".join(sentence(2, tmp_path / way, "File too large", last) for way in ("close", "wait", "save"))
    for way in ("close", "wait", "save"):
        assert_is_step(restore(tmp_path / way), 1)
        assert kept(tmp_path / way) == ["1"], "no half-written leftover"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB of its own, where this machine lets us have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system takes root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_that_is_full_at_the_start_is_an_error_at_once(small_disk):
    fill(small_disk)
    with pytest.raises(UserError, match=r"disk/checkpoints cannot be written \(No space left on device\); free space"):
        Checkpoints(small_disk / "checkpoints", 1, FINGERPRINT)


def run_out_of_space(disk) -> None:
    first, later = (Checkpoints(Path(disk) / name, 1, FINGERPRINT) for name in ("first", "later"))
    later.save(make_state(1), position(1), 1)
    later.wait()
    fill(Path(disk))
    for checkpoints in (first, later):
        tell(lambda c=checkpoints: [c.save(make_state(2), position(2), 2), c.wait()])


def test_a_full_disk_is_one_sentence_and_space_mends_it(small_disk):
    first, later = small_disk / "first", small_disk / "later"
    said = failing_run(run_out_of_space, small_disk)
    assert said == "".join(
        sentence(2, directory, "No space left on device", last)
        for directory, last in ((first, "there is no earlier one"), (later, "the last good checkpoint is step 1"))
    )
    (small_disk / "ballast").unlink()
    assert_is_step(restore(later), 1)
    for directory in (first, later):
        save(directory, 2, keep=1)
        assert kept(directory) == ["2"], "no half-written leftover"
        assert_is_step(restore(directory), 2)


def lose_the_disk(disk) -> None:
    checkpoints = Checkpoints(disk, 1, FINGERPRINT)
    checkpoints.save(make_state(1), position(1), 1)
    checkpoints.wait()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    tell(lambda: [checkpoints.save(make_state(2), position(2), 2), checkpoints.wait()])


def test_a_disk_that_becomes_read_only_is_one_sentence(small_disk):
    said = failing_run(lose_the_disk, small_disk)
    assert said == sentence(2, small_disk, "Read-only file system", "the last good checkpoint is step 1")
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        restore(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert_is_step(restore(small_disk), 1)


def test_an_error_that_is_not_the_disks_keeps_its_traceback(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 1, FINGERPRINT)

    def out_of_memory(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16 bytes")

    monkeypatch.setattr(checkpoints._manager, "save", out_of_memory)
    with pytest.raises(ValueError, match="Out of memory"):
        checkpoints.save(make_state(1), position(1), 1)
