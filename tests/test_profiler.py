"""Traces of a few steps: a real file of the profiler, of the right steps, and never one that goes on."""

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from nca_jax.profiler import Profile


def run(profile, steps, traced):
    """Steps as the training loop has them; notes in which of them a trace was running."""

    @jax.jit
    def work(x):
        return x @ x

    for step in steps:
        profile.before(step)
        traced[step] = profile._local is not None
        x = work(jnp.ones((64, 64)))
        profile.after(step, x)


def traces(directory) -> list[str]:
    """Names of trace files, where TensorBoard's plugin looks for them."""
    return sorted(path.name for path in epath.Path(directory).glob("plugins/profile/*/*.xplane.pb"))


def test_a_trace_of_the_steps_appears(tmp_path):
    profile, traced = Profile(tmp_path / "profile", 3, 2), {}
    run(profile, range(1, 7), traced)
    assert [step for step in traced if traced[step]] == [3, 4]
    assert len(traces(tmp_path / "profile")) == 1
    file = next((tmp_path / "profile").rglob("*.xplane.pb"))
    assert b"jit_work" in file.read_bytes()  # the traced program, by its name
    profile.close()
    assert len(traces(tmp_path / "profile")) == 1


def test_a_run_that_ends_early_leaves_no_trace_running(tmp_path):
    profile = Profile(tmp_path / "profile", 2, 5)
    run(profile, range(1, 4), {})
    profile.close()
    assert len(traces(tmp_path / "profile")) == 1
    with pytest.raises(RuntimeError):
        jax.profiler.stop_trace()  # none is running


def test_a_continued_run_traces_the_rest_or_nothing(tmp_path):
    profile, traced = Profile(tmp_path / "rest", 3, 3), {}
    run(profile, range(5, 8), traced)
    assert traced == {5: True, 6: False, 7: False} and traces(tmp_path / "rest")
    profile, traced = Profile(tmp_path / "later", 3, 3), {}
    run(profile, range(6, 9), traced)
    assert not any(traced.values()) and not (tmp_path / "later").exists()


def test_no_steps_no_trace(tmp_path):
    traced = {}
    run(Profile(tmp_path / "profile", 1, 0), range(1, 4), traced)
    assert not any(traced.values()) and not (tmp_path / "profile").exists()


def test_a_trace_goes_to_a_bucket(bucket):
    run(Profile(f"{bucket}/run/profile", 1, 1), [1], {})
    assert len(traces(f"{bucket}/run/profile")) == 1
