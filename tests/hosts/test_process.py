"""Components in processes: calls in order, failures with their own words and soon, shutdown that is bounded and idempotent."""

import os
import signal
import time

import numpy as np
import pytest

from manyhands.hosts.inline import InlineHost
from manyhands.hosts.process import ChildError, ChildLost, ProcessHost, gave_up, shared_arrays
from manyhands.types import RunError, UsageError
from tests.processes import alive, wait_for


class Counter:
    def __init__(self, start=0, fail=None):
        if fail is not None:
            raise fail
        self.value = start

    def add(self, n):
        self.value += n
        return self.value

    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        """Until the time is over, or somebody is in a hurry."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not gave_up():
            time.sleep(0.01)
        return gave_up()

    def stubborn(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def fail(self, error):
        raise error

    def array(self, n):
        return np.arange(n)

    def close(self):
        pass


@pytest.fixture(params=["process", "inline"])
def host(request):
    return ProcessHost() if request.param == "process" else InlineHost()


@pytest.fixture
def counter():
    handle = ProcessHost().start(Counter, name="counter")
    yield handle
    handle.close(time.monotonic() + 2)


def test_calls_are_answered_in_order_on_every_host(host):
    counter = host.start(Counter, 10, name="counter")
    calls = [counter.call("add", n) for n in (1, 2, 3)]
    host.wait(calls, 5.0)
    assert [call.result() for call in calls] == [11, 13, 16] and all(call.done() for call in calls)
    assert counter.call("array", 100_000).result().sum() == 99_999 * 50_000
    counter.close(time.monotonic() + 2)


def test_a_failure_arrives_with_the_child_s_traceback(counter):
    with pytest.raises(ChildError, match=r"in fail[\s\S]*ZeroDivisionError: the answer"):
        counter.call("fail", ZeroDivisionError("the answer")).result()
    with pytest.raises(ChildError, match="ZeroDivisionError"):  # so do later calls
        counter.call("add", 1).result()


@pytest.mark.parametrize("error", [UsageError("give a number"), RunError("the disk is gone")])
def test_our_own_errors_stay_what_they_are(error):
    counter = ProcessHost().start(Counter, 0, error, name="counter")
    with pytest.raises(type(error), match=str(error)):
        counter.call("add", 1).result()
    counter.close(time.monotonic() + 2)


def test_a_killed_process_is_noticed_at_once(counter):
    pid = counter.call("pid").result()
    call = counter.call("sleep", 60)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ChildLost, match=rf"counter \(process {pid}\) was ended by SIGKILL"):
        call.result()
    assert time.monotonic() - begin < 3


def test_a_call_has_a_deadline(counter):
    pid = counter.call("pid").result()
    begin = time.monotonic()
    with pytest.raises(ChildLost, match="no answer"):
        counter.call("sleep", 60, timeout_s=0.3).result()
    assert time.monotonic() - begin < 3 and not alive([pid])


def test_waiting_returns_with_the_first_that_is_done():
    host = ProcessHost()
    slow, quick = (host.start(Counter, name=name) for name in ("slow", "quick"))
    for handle in (slow, quick):
        handle.call("pid").result()
    calls = [slow.call("sleep", 30), quick.call("add", 1)]
    begin = time.monotonic()
    host.wait(calls, 20.0)
    assert time.monotonic() - begin < 5 and [call.done() for call in calls] == [False, True]
    slow.hurry()
    assert calls[0].result() is True  # it was told to hurry
    for handle in (slow, quick):
        handle.close(time.monotonic() + 2)


def test_closing_is_bounded_and_may_be_repeated():
    handle = ProcessHost().start(Counter, name="counter")
    pid = handle.call("pid").result()
    handle.call("stubborn")
    begin = time.monotonic()
    handle.close(time.monotonic() + 0.5)
    handle.close(time.monotonic() + 0.5)
    assert time.monotonic() - begin < 2
    wait_for(lambda: not alive([pid]), 2)


def test_shared_arrays_are_the_same_memory():
    fd = os.memfd_create("test")
    layout = {"a": ((3,), "float32"), "b": ((2, 2), "int64")}
    one, two = shared_arrays(fd, layout), shared_arrays(fd, layout)
    one["b"][1, 1] = 7
    assert two["b"][1, 1] == 7 and two["a"].sum() == 0
    os.close(fd)
