"""Steps are logged late, so that the device never waits for the log."""

import jax.numpy as jnp
import optax
import pytest

from nca_jax.step_log import Dispatched, StepLog


class Unread:
    """A metric that is not there yet: reading it before it may be is an error."""

    def __init__(self):
        self.there = False

    def __float__(self):
        assert self.there, "read too early"
        return 1.0

    def __array__(self, dtype=None, copy=None):
        return jnp.asarray(float(self)).__array__()


class FakeLogbook:
    def __init__(self):
        self.steps = []

    def metrics(self, step, values):
        self.steps.append(step)

    def progress(self, *_):
        pass


class FakeTimeline:
    def of_step(self, step):
        return {"time/step_seconds": 1.0}


def dispatched(step: int) -> Dispatched:
    names = ("loss", "opd", "nca", "gate", "grad_norm", "tokens", "finite", "computed")
    return Dispatched(step, {name: Unread() for name in names}, batch=None)


@pytest.fixture
def log():
    logbook = FakeLogbook()
    steps = StepLog(logbook, FakeTimeline(), optax.constant_schedule(0.1), 0, 3, lambda step: 1.0, pytest.fail)
    return steps, logbook


def make_there(step: Dispatched) -> None:
    for metric in step.metrics.values():
        metric.there = True


def test_a_step_is_read_when_the_next_one_has_been_dispatched_and_not_before(log):
    steps, logbook = log
    one, two = dispatched(1), dispatched(2)
    steps.dispatched(one)
    assert logbook.steps == []
    make_there(one)
    steps.dispatched(two)  # its own metrics are not there
    assert logbook.steps == [1]
    make_there(two)
    steps.settle()
    assert logbook.steps == [1, 2]
