"""Parameter servers: the same parameters as one learner's own, on any host; nothing applied twice, nothing too stale."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time

import numpy as np
import pytest
import torch

from manyhands.config import Recipe, TopologyConfig
from manyhands.hosts.inline import InlineHost
from manyhands.hosts.process import ProcessHost
from manyhands.keeper import Keeper
from manyhands.stores.rules import AdaGrad, Adam, Rule
from manyhands.stores.server import APPLIED, LATE, OLD_LIFE, STALE, Limits, Origin, Server
from manyhands.stores.servers import OutlierFilter, ServersConfig, ServersStore
from manyhands.types import EnvSpec, GradientInfo, Places, Seat

from .test_equivalence import BATCH, RULES, TOTAL, batches, learn, local, make_model

SPEC = EnvSpec("none", (5,), "float32", 1, 2)


def recipe_of(rule: Rule, learners: int = 1, **config) -> Recipe:
    return Recipe(rule=rule, store=ServersConfig(**config), topology=TopologyConfig(learners), total_steps=TOTAL)


@contextlib.contextmanager
def kept(host, recipe: Recipe, warn=print):
    keeper = Keeper(host, recipe, make_model(), SPEC, warn, None)
    try:
        yield keeper
    finally:
        keeper.close()


class Worker:
    """A learner in a process of its own, with its part of every batch."""

    def __init__(self, recipe: Recipe, seat: Seat, at: Places) -> None:
        self.model, self.seat = make_model(), seat
        self.store = ServersStore(self.model, recipe.rule, TOTAL, recipe.store, seat, at)

    def learn(self) -> np.ndarray:
        n = BATCH // self.seat.learners
        rows = slice(self.seat.rank * n, (self.seat.rank + 1) * n)
        return learn(self.model, self.store, [(x[rows], y[rows]) for x, y in batches()]).numpy()

    def close(self) -> None:
        self.store.close()


def together(host, recipe: Recipe, keeper: Keeper) -> list[np.ndarray]:
    n = recipe.topology.learners
    workers = [host.start(Worker, recipe, Seat(r, n), keeper.at, name=f"worker {r}") for r in range(n)]
    try:
        return [call.result() for call in [worker.call("learn", timeout_s=60) for worker in workers]]
    finally:
        for worker in workers:
            worker.close(0.0)


@pytest.mark.parametrize("mode", [{}, {"gather": 1}], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize(("host", "shards"), [(InlineHost, 1), (InlineHost, 3), (ProcessHost, 3)])
def test_servers_with_one_learner_equal_the_local_store(host, mode, shards):
    for rule in [*RULES.values(), AdaGrad(learning_rate=0.05)] if host is InlineHost else [RULES["adam"]]:
        recipe, started = recipe_of(rule, shards=shards, **mode), host()
        with kept(started, recipe) as keeper:
            (parameters,) = together(started, recipe, keeper)
            state = keeper.state()
        expected = local(rule).numpy()
        assert np.array_equal(parameters, expected)
        assert np.array_equal(state["parameters"].numpy(), expected)
        assert state["updates"] == 24 and state["steps"] == 240


def test_two_synchronous_learners_equal_one_double_batch():
    rule, host = Adam(learning_rate=0.05), ProcessHost()
    recipe = recipe_of(rule, learners=2, shards=2, gather=2)
    with kept(host, recipe) as keeper:
        one, two = together(host, recipe, keeper)
        assert keeper.state()["updates"] == 24
    assert np.array_equal(one, two)
    np.testing.assert_allclose(one, local(rule).numpy(), rtol=2e-5, atol=1e-6)


def test_a_saved_state_goes_on_with_another_number_of_servers():
    rule, host = RULES["adam"], InlineHost()
    model = make_model()
    with kept(host, recipe_of(rule, shards=2)) as keeper:
        store = ServersStore(model, rule, TOTAL, keeper._config, Seat(), keeper.at)
        learn(model, store, batches()[:10])
        state = keeper.state()
    recipe = recipe_of(rule, shards=5)
    again = Keeper(host, recipe, make_model(), SPEC, print, state)
    model = make_model()
    store = ServersStore(model, rule, TOTAL, recipe.store, Seat(life=1), again.at)
    assert torch.equal(learn(model, store, batches()[10:]), local(rule))
    assert store.clock.updates == 24 and store.clock.steps == 240


# -- one server, asked by hand -----------------------------------------------------------------------------------------


def server(limits: Limits = Limits(), life: int = 0, snapshot=None, **options) -> Server:  # noqa: B008
    zero = np.zeros(4, np.float32)
    optimiser = {"step": np.float32(0), "sum": zero}
    empty = {"parameters": zero, "optimiser": optimiser, "version": 0, "lost": 0, "table": {}}
    return Server(AdaGrad(learning_rate=1.0), 4, limits, life, snapshot or empty, **options)


ONE = np.ones(4, np.float32)


def test_a_push_that_is_repeated_is_applied_once():
    s = server()
    base = s.pull(0, 0, 0)["base"]
    first = s.push(Origin(0, 0, 1), base, ONE, 1.0, 5)
    again = s.push(Origin(0, 0, 1), base, ONE, 1.0, 5)
    assert first["outcome"] == again["outcome"] == APPLIED
    assert s.version == 1 and again["steps"] == 5
    assert np.array_equal(again["parameters"], -ONE)


def test_a_replaced_learner_cannot_push_any_more():
    s = server()
    base = s.pull(0, 0, 0)["base"]
    s.push(Origin(0, 1, 1), base, ONE, 1.0, 0)
    assert s.push(Origin(0, 0, 7), base, ONE, 1.0, 0)["outcome"] == "repeated"
    assert s.version == 1


def test_stale_gradients_are_refused_and_counted():
    s = server(Limits(staleness=2))
    old = s.pull(0, 0, 0)["base"]
    for sequence in range(3):
        s.push(Origin(1, 0, sequence), s.pull(1, 0, 0)["base"], ONE, 0.1, 0)
    assert s.push(Origin(0, 0, 1), old, ONE, 0.1, 0)["outcome"] == STALE
    assert s.report()["outcomes"] == {APPLIED: 3, STALE: 1} and s.version == 3


def test_gradients_can_be_too_old_in_seconds():
    s = server(Limits(age_s=0.05))
    base = s.pull(0, 0, 0)["base"]
    time.sleep(0.1)
    assert s.push(Origin(0, 0, 1), base, ONE, 0.1, 0)["outcome"] == STALE


def test_a_server_that_begins_anew_remembers_whose_gradients_it_has_and_refuses_those_meant_for_the_old_one():
    old = server()
    base = old.pull(0, 0, 0)["base"]
    old.push(Origin(0, 0, 1), base, ONE, 1.0, 10)
    new = server(life=1, snapshot={**old.state(), "parameters": old.state()["parameters"].copy()})
    assert new.push(Origin(0, 0, 1), base, ONE, 1.0, 10)["outcome"] == APPLIED  # it was, before
    assert new.version == 1
    answer = new.push(Origin(0, 0, 2), base, ONE, 1.0, 20)
    assert answer["outcome"] == OLD_LIFE and new.version == 1 and answer["steps"] == 20
    assert new.push(Origin(0, 0, 3), answer["base"], ONE, 1.0, 20)["outcome"] == APPLIED


def test_a_version_is_made_of_those_the_chief_names_and_the_others_come_too_late():
    s = server()
    base = s.pull(0, 0, 0)["base"]
    for learner in range(3):
        s.offer(Origin(learner, 0, 1), base, ONE * (learner + 1), 0)
    s.commit(0, [0, 2], 1.0)
    s.commit(0, [0, 2], 1.0)  # asked again
    assert s.version == 1
    assert s.report()["outcomes"] == {APPLIED: 2, LATE: 1}
    assert s.offer(Origin(1, 0, 2), base, ONE, 0)["outcome"] == LATE


def test_a_server_that_lacks_gradients_of_a_version_skips_it_and_says_so():
    s = server()
    s.offer(Origin(0, 0, 1), s.pull(0, 0, 0)["base"], ONE, 0)
    s.commit(0, [0, 1], 1.0)
    assert s.version == 1 and s.report()["lost"] == 1
    assert np.array_equal(s.pull(0, 0, 0)["parameters"], 0 * ONE)


def test_losses_far_above_the_others_are_outliers():
    outliers = OutlierFilter(3.0)
    losses = np.random.default_rng(0).normal(1.0, 0.1, 200)
    assert all(outliers.admit(x) for x in np.minimum(losses, 1.2))
    assert not outliers.admit(2.0)
    assert outliers.admit(1.1)


# -- real kills --------------------------------------------------------------------------------------------------------


def test_a_killed_server_comes_back_from_its_snapshot_and_nothing_is_applied_twice():
    rule, host, said = AdaGrad(learning_rate=0.1), ProcessHost(), []
    recipe = recipe_of(rule, shards=2, snapshot_s=0.05)
    with kept(host, recipe, said.append) as keeper:
        model = make_model()
        store = ServersStore(model, rule, TOTAL, recipe.store, Seat(), keeper.at)
        store.refresh()
        killed, lost = 0, []
        for update in range(60):
            keeper.watch()
            if update in (20, 40):
                pid = keeper._servers[killed].handle.child.pid
                os.kill(pid, signal.SIGKILL)
                seen = store._bases[killed].version
                killed += 1
                until = time.monotonic() + 20
                while keeper.replaced < killed and time.monotonic() < until:
                    keeper.watch()
                lost.append(seen - keeper._servers[killed - 1].snapshot["version"])
            store.count(1)
            model.gradient.fill_(0.01)
            store.step(GradientInfo(store.clock.updates, 1))
            time.sleep(0.005)
        until = time.monotonic() + 20
        while any(server.report.get("steps") != 60 for server in keeper._servers) and time.monotonic() < until:
            keeper.watch()
        told = [server.report["outcomes"] for server in keeper._servers]
        versions = [server.report["version"] for server in keeper._servers]
        store.close()
    assert len(said) == keeper.replaced == 2 and "SIGKILL" in said[0] and "snapshot" in said[0]
    assert [outcomes[APPLIED] for outcomes in told] == versions  # the counter is what the table says
    assert [server.report["lost"] for server in keeper._servers] == lost
    # What came after the snapshot is lost, and the one gradient that was meant for the old server is refused; nothing else.
    assert versions == [60 - missing - 1 for missing in lost] and all(outcomes[OLD_LIFE] == 1 for outcomes in told)


@pytest.mark.parametrize("gather", [0, 1])
def test_a_gradient_that_is_not_finite_never_reaches_a_server(gather):
    rule, recipe = Adam(learning_rate=0.01), recipe_of(Adam(learning_rate=0.01), gather=gather)
    with kept(ProcessHost(), recipe) as keeper:
        model = make_model()
        store = ServersStore(model, rule, TOTAL, recipe.store, Seat(), keeper.at)
        store.refresh()
        before = model.parameters.clone()
        model.gradient.fill_(0.1)[3] = math.nan
        assert not store.step(GradientInfo(0, 1)).applied and store.refused == 1
        store.refresh()
        assert store.clock.updates == 0 and model.parameters.equal(before)
        model.gradient.fill_(0.1)
        assert store.step(GradientInfo(0, 1)).applied and model.parameters.isfinite().all()
        store.close()


def test_late_learners_do_not_hold_up_a_version():
    rule, host = Adam(learning_rate=0.01), ProcessHost()
    recipe = recipe_of(rule, learners=3, gather=2)
    with kept(host, recipe) as keeper:
        models = [make_model() for _ in range(2)]
        workers = [host.start(Worker, recipe, Seat(rank, 3), keeper.at, name=f"worker {rank}") for rank in range(2)]
        calls = [worker.call("learn", timeout_s=60) for worker in workers]  # the third never comes
        for call in calls:
            call.result()
        assert keeper.state()["updates"] == 24
        late = ServersStore(models[0], rule, TOTAL, recipe.store, Seat(2, 3), keeper.at)
        late.model.gradient.fill_(1.0)
        receipt = late.step(GradientInfo(0, 1))  # computed from parameters of version 0
        assert not receipt.applied and receipt.metrics["late_gradients"] == 1.0
        assert receipt.clock.updates == 24
        for worker in workers:
            worker.close(0.0)


def test_a_synchronous_server_that_begins_anew_catches_up_with_the_chief():
    """Its only server loses some versions; the learner that asks it afterwards must not be late for ever."""
    rule, host = Adam(learning_rate=0.01), ProcessHost()
    recipe = recipe_of(rule, gather=1, snapshot_s=1e6)
    with kept(host, recipe) as keeper:
        model = make_model()
        store = ServersStore(model, rule, TOTAL, recipe.store, Seat(), keeper.at)
        store.refresh()
        model.gradient.fill_(0.1)
        assert all(store.step(GradientInfo(0, 1)).applied for _ in range(5))
        os.kill(keeper._servers[0].handle.child.pid, signal.SIGKILL)
        until = time.monotonic() + 20
        while keeper.replaced == 0 and time.monotonic() < until:
            keeper.watch()
        outcomes = [store.step(GradientInfo(0, 1)).applied for _ in range(6)]
        store.close()
        assert outcomes[-3:] == [True] * 3
        assert store.clock.updates >= 5 + 3
        report = keeper._servers[0].handle.call("report", timeout_s=20).result()
        assert report["lost"] == 5 and report["outcomes"][APPLIED] == report["version"] - 5
