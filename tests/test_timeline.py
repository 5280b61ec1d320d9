"""Where time goes, with a clock that the tests move and arrays that are there when the tests say so."""

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nca_jax.timeline import Timeline

BACKEND = "/jax/core/compile/backend_compile_duration"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Array:
    """Is there at a time of the clock, once it is released."""

    def __init__(self, clock, at, error=None):
        self.clock, self.at, self.error, self.released = clock, at, error, threading.Event()

    def block_until_ready(self):
        self.released.wait()
        self.clock.now = self.at
        if self.error:
            raise self.error


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    made = Timeline(clock=clock, wall_clock=clock)
    yield made
    made.close()


def play(clock, timeline, *events):
    """Marks (time, phase, when the array is there or None, step) at their times; only then do the arrays come."""
    arrays = []
    for now, phase, at, step in events:
        clock.now = now
        arrays.append(None if at is None else Array(clock, at))
        timeline.mark(phase, arrays[-1], step)
    for array in filter(None, arrays):
        array.released.set()


def test_asynchronous_work_is_timed_by_when_it_is_there(clock, timeline):
    # The host asks for everything within a second; the device is ready at 4, 10, 13 and 21.
    play(
        clock,
        timeline,
        (0.1, "rollout", 4, 1),
        (0.2, "step", 10, 1),
        (0.3, "rollout", 13, 2),
        (0.4, "step", 21, 2),
    )
    assert timeline.of_step(1) == {"time/rollout_seconds": 4, "time/step_seconds": 6}
    assert timeline.of_step(2) == {"time/rollout_seconds": 3, "time/step_seconds": 8}
    assert timeline.seconds() == {"rollout": 7, "step": 14}


def test_host_work_counts_where_the_device_waits_for_it(clock, timeline):
    play(
        clock,
        timeline,
        (3, "start", None, None),
        (4, "step", 10, 1),
        (6, "data", None, 2),  # while the device is busy until 10
        (7, "step", 15, 2),
        (20, "data", None, 3),  # the device has had nothing to do since 15
        (21, "step", 30, 3),
    )
    assert timeline.of_step(2) == {"time/data_seconds": 0, "time/step_seconds": 5}
    assert timeline.of_step(3) == {"time/data_seconds": 5, "time/step_seconds": 10}
    assert timeline.seconds() == {"start": 3, "step": 22, "data": 5}


def test_marking_does_not_wait(clock, timeline):
    before = time.monotonic()
    for step in range(50):
        timeline.mark("step", Array(clock, 1.0), step)  # never there
    assert time.monotonic() - before < 0.5


def test_closing_does_not_wait_for_what_never_comes(clock):
    timeline = Timeline(clock=clock)
    timeline.mark("step", Array(clock, 1.0), 1)
    before = time.monotonic()
    timeline.close()
    timeline.close()
    assert time.monotonic() - before < 3


def test_compiling_is_lost_and_not_part_of_the_phase(clock, timeline):
    clock.now = 9.0
    jax.monitoring.record_event_duration_secs(BACKEND, 7.0)  # from 2 to 9
    jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 8.0)  # from 1 to 9
    jax.monitoring.record_event_duration_secs("/jax/checkpoint/write/duration", 9.0)  # none of ours
    play(clock, timeline, (10, "rollout", 14, 1))
    assert timeline.of_step(1) == {"time/rollout_seconds": 6, "time/compile_seconds": 8}
    assert timeline.lost() == 8


def test_compiling_while_the_device_is_busy_costs_only_what_it_waits(clock, timeline):
    array, later = Array(clock, 10.0), Array(clock, 20.0)
    clock.now = 1.0
    timeline.mark("rollout", array)
    clock.now = 13.0
    jax.monitoring.record_event_duration_secs(BACKEND, 9.0)  # from 4 to 13, of which the device waits 3
    timeline.mark("step", later)
    array.released.set()
    later.released.set()
    assert timeline.seconds() == {"rollout": 10, "step": 7, "compile": 3}


def test_lost_time_goodput_and_the_closing_line(clock, timeline):
    play(
        clock,
        timeline,
        (10, "start", None, None),
        (11, "rollout", 51, 1),
        (12, "step", 81, 1),
        (91, "evaluation", None, None),
        (95, "save", None, None),
    )
    timeline.seconds()
    clock.now = 100.0
    assert timeline.wall_seconds() == 100
    assert timeline.goodput() == pytest.approx(0.71)
    assert timeline.lost() == 15  # the start, and what nobody has marked
    assert timeline.summary() == "time: rollout 41 % step 30 % evaluation 10 % save 4 % lost 15 % (start 10 %)"


def test_a_continued_run_has_lost_what_was_not_checkpointed(clock):
    wall = Clock()
    wall.now = 1000.0
    first = Timeline(clock=clock, wall_clock=wall)
    play(clock, first, (0, "rollout", 20, 1), (0, "step", 50, 1))
    saved = json.loads(json.dumps(first.state()))
    play(clock, first, (50, "rollout", 60, 2), (50, "step", 80, 2))  # done, and lost
    assert first.seconds() == {"rollout": 30, "step": 50}
    first.close()

    clock.now, wall.now = 7.0, 1200.0  # another process, whose clock starts anew
    second = Timeline(saved, began=5.0, clock=clock, wall_clock=wall)
    play(clock, second, (8, "start", None, None), (9, "step", 33, 2))
    assert second.seconds() == {"rollout": 20, "step": 55, "start": 3}
    wall.now = 1250.0
    assert second.wall_seconds() == 250
    assert second.goodput() == pytest.approx(75 / 250)
    assert second.lost() == 250 - 75
    second.close()


def test_a_new_run_began_when_its_process_did(clock):
    wall = Clock()
    clock.now, wall.now = 30.0, 1030.0
    timeline = Timeline(began=10.0, clock=clock, wall_clock=wall)
    timeline.mark("start")
    assert timeline.seconds() == {"start": 20} and timeline.state()["started"] == 1010
    timeline.close()


def test_a_clock_that_is_behind_makes_no_negative_time(clock):
    timeline = Timeline({"started": 5000.0, "seconds": {"step": 40.0}}, clock=clock, wall_clock=clock)
    assert timeline.lost() == 0 and timeline.goodput() == 1
    timeline.close()


def test_a_failed_computation_is_raised_in_the_main_thread(clock, timeline):
    broken, fine = Array(clock, 3.0, RuntimeError("out of memory")), Array(clock, 5.0)
    timeline.mark("rollout", broken, 1)
    timeline.mark("step", fine, 1)
    broken.released.set()
    fine.released.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        timeline.of_step(1)
    timeline.mark("rollout", None, 2)  # said once; the thread goes on
    assert timeline.seconds() == {"rollout": 3, "step": 2}


def test_steps_that_nobody_asks_for_are_dropped(timeline):
    for step in range(100):
        timeline.mark("step", None, step)
    timeline.seconds()
    assert len(timeline._steps) < 20 and not timeline._left
    assert timeline.of_step(99) == {"time/step_seconds": 0}


def test_real_computations_on_the_real_clock():
    def slow(seconds):
        def wait(x):
            time.sleep(seconds)
            return x

        return jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), x) + 1)

    rollout, step = slow(0.2), slow(0.1)
    timeline = Timeline()
    x = jnp.float32(0)
    timeline.mark("start", x)
    for k in (1, 2):
        x = rollout(x)
        timeline.mark("rollout", x, k)
        x = step(x)
        timeline.mark("step", x, k)
    steps = [timeline.of_step(k) for k in (1, 2)]
    # At least as long as they sleep, whatever else this machine does.
    assert steps[1]["time/rollout_seconds"] > 0.19 and steps[1]["time/step_seconds"] > 0.09
    assert "time/compile_seconds" not in steps[1]
    assert steps[0]["time/compile_seconds"] > 0
    timeline.close()


def test_a_closed_timeline_listens_no_more(clock):
    timeline = Timeline(clock=clock)
    timeline.close()
    jax.monitoring.record_event_duration_secs(BACKEND, 7.0)
    assert not timeline._compiling
