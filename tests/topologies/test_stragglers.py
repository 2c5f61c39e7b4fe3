"""Backup workers: with K < n gradients a version, a learner that is frozen holds nobody up; with K = n it does, and is named."""

from __future__ import annotations

import os
import signal
import time

import pytest

from manyhands.hosts.process import ProcessHost
from manyhands.stores.rules import Adam
from manyhands.stores.servers import ServersStore
from manyhands.types import GradientInfo, Seat
from tests.processes import wait_for

from .test_equivalence import TOTAL, make_model
from .test_servers import kept, recipe_of

LEARNERS, GRADIENT_S = 4, 0.1


class Sleeper:
    """A learner whose gradients take a fixed time and no core."""

    def __init__(self, recipe, seat, places) -> None:
        self.model = make_model()
        self.store = ServersStore(self.model, recipe.rule, TOTAL, recipe.store, seat, places)

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.store.refresh()
        while time.monotonic() < until:
            time.sleep(GRADIENT_S)
            self.model.gradient.fill_(0.01)
            self.store.step(GradientInfo(self.store.clock.updates, 1))

    def close(self) -> None:
        self.store.close()


def rate(keeper, seconds: float) -> float:
    """Versions a second, by the chief."""
    begin, first = time.monotonic(), keeper._chief.report["version"]
    while time.monotonic() < begin + seconds:
        keeper.watch()
        time.sleep(0.02)
    return (keeper._chief.report["version"] - first) / (time.monotonic() - begin)


def frozen(gather: int, seconds: float) -> tuple[float, float, dict]:
    """Versions a second before and while learner 2 is frozen, and the metrics at the end of that."""
    host = ProcessHost()
    recipe = recipe_of(Adam(), learners=LEARNERS, gather=gather, shards=2)
    with kept(host, recipe) as keeper:
        sleepers = [host.start(Sleeper, recipe, Seat(r, LEARNERS), keeper.at, name=f"learner {r}") for r in range(LEARNERS)]
        for sleeper in sleepers:
            sleeper.call("run", 300.0)
        try:
            wait_for(lambda: keeper.watch() is not None and keeper._chief.report.get("version", 0) > 10)
            before = rate(keeper, min(seconds, 10.0))
            os.kill(sleepers[2].child.pid, signal.SIGSTOP)
            rate(keeper, 1.0)  # what it had pushed already, and what the chief had not told yet
            during = rate(keeper, seconds)
            metrics = keeper.metrics()
            os.kill(sleepers[2].child.pid, signal.SIGCONT)
            again = keeper._chief.report["version"]
            wait_for(lambda: keeper.watch() is not None and keeper._chief.report["version"] > again + 5)
        finally:
            for sleeper in sleepers:
                sleeper.close(0.0)
    return before, during, metrics


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_learner_frozen_for_half_a_minute_does_not_slow_the_others_with_a_backup():
    before, during, _ = frozen(LEARNERS - 1, 30.0)
    assert during >= 0.9 * before, (before, during)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_without_backups_everybody_waits_and_the_metrics_say_for_whom():
    before, during, metrics = frozen(LEARNERS, 3.0)
    assert during < 0.2 * before, (before, during)
    assert metrics["waiting_for"] == [2]
