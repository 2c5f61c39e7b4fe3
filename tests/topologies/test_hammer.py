"""A shared store under four processes at once: nothing torn, nothing lost, and the dead leave no lock behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from manyhands.hosts.process import ChildLost, ProcessHost, SharedBlock
from manyhands.nets.flat import flatten
from manyhands.stores import chunks
from manyhands.stores.chunks import ByteLocks, SharedConfig
from manyhands.stores.local import LocalStore
from manyhands.stores.rules import RMSProp
from manyhands.stores.shared import SharedStore
from manyhands.types import GradientInfo
from tests.processes import alive, wait_for

SIZE, CHUNKS = 50_000, 3
RULE = RMSProp(learning_rate=0.01, decay=0.5, epsilon=1.0, epsilon_inside=True)


def make_store(fds, cls=SharedStore, **config):
    net = torch.nn.Linear(SIZE, 1, bias=False)
    net.weight.data.fill_(1.0)
    model = flatten(net)
    if cls is LocalStore:
        return LocalStore(model, RULE, 10**9)
    return SharedStore(model, RULE, 10**9, SharedConfig(chunks=CHUNKS, **config), *fds)


class Hammer:
    """Every gradient is 1 everywhere: all parameters of a chunk are equal, and their value tells how many updates it saw."""

    def __init__(self, fds) -> None:
        self.store = make_store(fds)

    def pid(self) -> int:
        return os.getpid()

    def hammer(self, updates: int) -> int:
        torn = 0
        for _ in range(updates):
            self.store.refresh()
            for piece in self.store._central.pieces:
                values = self.store.model.parameters[piece]
                torn += int(values.min() != values.max())
            self.store.model.gradient.fill_(1.0)
            self.store.count(7)
            self.store.step(GradientInfo(0, 1))
        return torn

    def hold_a_lock(self, seconds: float) -> None:
        with self.store.locks.hold(0):
            time.sleep(seconds)

    def stop_with_a_lock(self) -> None:
        with self.store.locks.hold(0):
            os.kill(os.getpid(), signal.SIGSTOP)

    def close(self) -> None:
        pass


@pytest.fixture
def fds():
    blocks = [SharedBlock(), SharedBlock()]
    yield tuple(block.fd for block in blocks)
    for block in blocks:
        block.close()


def after(updates: int) -> float:
    """What a parameter is after so many updates, by a store of one learner."""
    store = make_store((), LocalStore)
    for _ in range(updates):
        store.model.gradient.fill_(1.0)
        store.step(GradientInfo(0, 1))
    return float(store.model.parameters[0])


def check_whole(store: SharedStore) -> dict:
    state = store.state()
    for piece, updates in zip(store._central.pieces, state["chunk_updates"], strict=True):
        values = state["parameters"][piece]
        assert values.min() == values.max() == after(updates)
    return state


def test_four_processes_lose_nothing_and_read_nothing_torn(fds):
    central = make_store(fds)
    central.load(central.initial_state())
    host = ProcessHost(fds)
    hands = [host.start(Hammer, fds, name=f"hammer {i}") for i in range(4)]
    calls = [hand.call("hammer", 80, timeout_s=120) for hand in hands]
    assert [call.result() for call in calls] == [0, 0, 0, 0]
    state = check_whole(central)
    assert state["chunk_updates"] == [320] * CHUNKS and state["steps"] == 320 * 7
    for hand in hands:
        hand.close(time.monotonic() + 5)


def test_killed_in_the_middle_of_an_update_nobody_waits_and_nothing_is_torn(fds):
    central = make_store(fds)
    central.load(central.initial_state())
    host = ProcessHost(fds)
    for life in range(2):
        hands = [host.start(Hammer, fds, name=f"hammer {i}") for i in range(2)]
        pids = [hand.call("pid", timeout_s=60).result() for hand in hands]
        calls = [hand.call("hammer", n, timeout_s=120) for hand, n in zip(hands, (10**9, 60), strict=True)]
        time.sleep(0.3 + 0.01 * life)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ChildLost, match="SIGKILL"):
            calls[0].result()
        assert calls[1].result() == 0  # it was not kept waiting by the lock of the dead
        check_whole(central)
        for hand in hands:
            hand.close(time.monotonic() + 5)


def test_who_is_stopped_with_a_lock_is_ended_and_nobody_else(fds, monkeypatch):
    monkeypatch.setattr(chunks, "STOPPED_S", 1)
    central = make_store(fds)
    central.load(central.initial_state())
    host = ProcessHost(fds)
    hands = [host.start(Hammer, fds, name=f"hammer {i}") for i in range(3)]
    free, holder, _ = [hand.call("pid", timeout_s=60).result() for hand in hands]
    os.kill(free, signal.SIGSTOP)  # it keeps nobody waiting
    lost = hands[1].call("stop_with_a_lock", timeout_s=120)
    wait_for(lambda: chunks.is_stopped(holder))
    central.refresh()
    with pytest.raises(ChildLost, match="SIGKILL"):
        lost.result()
    assert hands[2].call("hammer", 20, timeout_s=60).result() == 0
    assert alive([free]) and check_whole(central)["chunk_updates"] == [20] * CHUNKS
    os.kill(free, signal.SIGCONT)
    for hand in hands:
        hand.close(time.monotonic() + 5)


def test_a_stopped_parent_is_waited_for(fds, monkeypatch):
    """The whole run may have been stopped by Ctrl-Z."""
    monkeypatch.setattr(chunks, "STOPPED_S", 1)
    monkeypatch.setattr(chunks, "LOCK_TIMEOUT_S", 2.0)
    central = make_store(fds)
    central.load(central.initial_state())
    monkeypatch.setattr(central.locks, "_owner", lambda number: os.getppid())
    monkeypatch.setattr(chunks, "is_stopped", lambda pid: pid == os.getppid())
    host = ProcessHost(fds)
    hand = host.start(Hammer, fds, name="hammer")
    holder = hand.call("pid", timeout_s=60).result()
    held = hand.call("hold_a_lock", 4.0, timeout_s=60)
    wait_for(lambda: ByteLocks._owner(central.locks, 0) == holder)
    central.refresh()
    assert held.result() is None and central.locks.seconds > 2.5
    hand.close(time.monotonic() + 5)
