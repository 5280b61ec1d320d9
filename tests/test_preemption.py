"""Signals that ask to stop, sent to this process and to others; and flags that several processes agree on."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nca_jax.preemption import RETRY_EXIT_CODE, Agreement, StopSignals


@pytest.fixture(autouse=True)
def unchanged_handlers():
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def test_the_exit_code_is_that_of_sysexits():
    assert os.EX_TEMPFAIL == RETRY_EXIT_CODE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_with_its_time(number):
    with StopSignals() as stop:
        assert stop.received is None and stop.received_at is None
        before = time.monotonic()
        signal.raise_signal(number)
        assert stop.received == number
        assert before <= stop.received_at <= time.monotonic()


def test_the_same_request_twice_and_a_later_warning_end_nothing():
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGUSR1)
        at = stop.received_at
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        stop.received_at -= 60
        signal.raise_signal(signal.SIGUSR1)
        assert (stop.received, stop.received_at) == (signal.SIGUSR1, at - 60)


def test_ctrl_c_is_left_alone():
    # A shell starts what it runs in the background with this signal ignored, and Python then leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)


def _ctrl_c():
    with StopSignals() as stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert stop.received is None


def test_previous_handlers_come_back_also_after_an_exception():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("ours"))
    try:
        with pytest.raises(ZeroDivisionError), StopSignals():
            _ = 1 / 0
        signal.raise_signal(signal.SIGTERM)
        assert seen == ["ours"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_it_is_inert():
    failures = []

    def work():
        try:
            with StopSignals() as stop:
                assert stop.received is None
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_a_second_sigterm_ends_the_process():
    script = """if True:
        import time
        from nca_jax.preemption import StopSignals
        with StopSignals() as stop:
            print("ready", flush=True)
            while stop.received is None:
                time.sleep(0.01)
            print(stop.received.name, flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    time.sleep(1.1)
    assert process.poll() is None, "the first one was caught"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    process.stdout.close()


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "fsdp", "tensor")[: len(shape)])


FLAGS = [(True, False, False), (False, True, True), (False, False, False), (True, True, True)]


def test_the_result_is_that_of_the_last_cast():
    wishes = iter(FLAGS)
    agreement = Agreement(mesh(2, 4), lambda: next(wishes), processes=2)
    for flags in FLAGS:
        agreement.cast()
        assert agreement.result() == flags
        assert agreement.result() == flags, "reading changes nothing"


def test_alone_the_device_has_no_part_in_it(monkeypatch):
    wishes = [(False, False)]
    agreement = Agreement(mesh(8), lambda: wishes[0])

    def work(*_, **__):
        raise AssertionError("work for the device")

    monkeypatch.setattr(jax, "make_array_from_process_local_data", work)
    agreement.cast()
    wishes[0] = (True, False)  # during the step: there is nobody who might not know of it
    assert agreement.result() == (True, False)


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_one_process_of_many_is_enough(shape, monkeypatch):
    """Eight devices stand for eight processes, of which each sets other flags than the one here."""
    real = jax.make_array_from_process_local_data
    of_processes = np.zeros((8, 4), np.int32)
    of_processes[5, 1] = of_processes[0, 2] = of_processes[7, 2] = 1
    of_processes[:, 3] = 1

    def others(sharding, rows, shape):
        assert rows.shape == shape == (8, 4)
        return real(sharding, of_processes, shape)

    monkeypatch.setattr(jax, "make_array_from_process_local_data", others)
    agreement = Agreement(mesh(*shape), lambda: (False,) * 4, processes=8)
    agreement.cast()
    assert agreement.result() == (False, True, True, True)


def test_reading_does_not_wait_for_work_that_was_dispatched_after_the_cast():
    wishes = iter([(True,), (False,)])
    agreement = Agreement(mesh(8), lambda: next(wishes), processes=8)
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 600, lambda _, y: jnp.tanh(y @ y), x))
    x = jax.device_put(jnp.ones((256, 256)), NamedSharding(mesh(8), PartitionSpec()))
    agreement.cast()
    step(x).block_until_ready()  # both are compiled now
    agreement.cast()
    dispatched = step(x)
    assert agreement.result() == (False,)
    assert not dispatched.is_ready()
    dispatched.block_until_ready()
