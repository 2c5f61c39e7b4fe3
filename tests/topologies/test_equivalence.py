"""One algorithm, any store: the same stream of batches gives the same parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyhands.hosts.process import ProcessHost, SharedBlock
from manyhands.nets.flat import Model, flatten
from manyhands.stores.allreduce import AllReduceConfig, AllReduceStore
from manyhands.stores.chunks import SharedConfig
from manyhands.stores.gate import PATIENCE
from manyhands.stores.local import LocalStore
from manyhands.stores.rules import Adam, RMSProp, Rule
from manyhands.stores.shared import SharedStore
from manyhands.types import GradientInfo, RunError, Seat
from tests.gpu import GPU

BATCH, UPDATES, TOTAL = 16, 24, 1000
RULES = {
    "adam": Adam(learning_rate=0.05, anneal="linear", max_grad_norm=0.7),
    "rmsprop": RMSProp(learning_rate=0.02, epsilon_inside=True, epsilon=0.1, initial_square=1.0),
    "torch-rmsprop": RMSProp(learning_rate=0.02, epsilon=0.01, max_average_norm=0.001),
}


def make_model() -> Model:
    torch.manual_seed(3)
    return flatten(torch.nn.Sequential(torch.nn.Linear(5, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1, bias=False)))


def batches(count: int = UPDATES, size: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(size, 5, generator=g), torch.randn(size, 1, generator=g)) for _ in range(count)]


def learn(model: Model, store, stream) -> torch.Tensor:
    """Squared error on each batch in turn; each counts as 10 steps of the schedule."""
    store.refresh()
    for x, y in stream:
        store.count(10)
        model.gradient.zero_()
        ((model.net(x) - y) ** 2).mean().backward()
        store.step(GradientInfo(store.clock.updates, len(x)))
    return model.parameters.clone()


def local(rule: Rule, stream=None) -> torch.Tensor:
    model = make_model()
    return learn(model, LocalStore(model, rule, TOTAL), stream or batches())


def shared_store(model: Model, rule: Rule, **config) -> SharedStore:
    blocks = [SharedBlock(), SharedBlock()]
    store = SharedStore(model, rule, TOTAL, SharedConfig(**config), *(b.fd for b in blocks))
    store.load(store.initial_state())
    store.blocks = blocks  # type: ignore[attr-defined]
    return store


class Rank:
    """A component that learns from its half of every batch, or from all of it."""

    def __init__(self, rule: Rule, seat: Seat, fd: int, spoil: bool = False) -> None:
        self.model = make_model()
        self.store = AllReduceStore(self.model, rule, TOTAL, AllReduceConfig(check_every=4), seat, fd)
        self.seat, self.spoil = seat, spoil

    def learn(self) -> np.ndarray:
        n = BATCH // self.seat.learners
        rows = slice(self.seat.rank * n, (self.seat.rank + 1) * n)
        stream = [(x[rows], y[rows]) for x, y in batches()]
        if self.spoil and self.seat.rank == 1:
            self.model.parameters[0] += 1e-6
        self.store.count = lambda steps, count=self.store.count: count(steps // self.seat.learners)  # type: ignore[method-assign]
        return learn(self.model, self.store, stream).numpy()

    def close(self) -> None:
        self.store.close()


def all_reduce(rule: Rule, ranks: int, spoil: bool = False) -> list[np.ndarray]:
    block = SharedBlock()
    host = ProcessHost((block.fd,))
    hands = [host.start(Rank, rule, Seat(r, ranks), block.fd, spoil, name=f"rank {r}") for r in range(ranks)]
    try:
        return [call.result() for call in [hand.call("learn", timeout_s=60) for hand in hands]]
    finally:
        for hand in hands:
            hand.close(0.0)
        block.close()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_shared_store_with_one_learner_equals_the_local_one(rule, chunks):
    model = make_model()
    assert torch.equal(learn(model, shared_store(model, rule, chunks=chunks), batches()), local(rule))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_lock_free_store_with_one_learner_equals_the_local_one(rule):
    model = make_model()
    assert torch.equal(learn(model, shared_store(model, rule, lock=False), batches()), local(rule))


def test_all_reduce_with_one_rank_equals_the_local_store():
    (parameters,) = all_reduce(RULES["adam"], 1)
    assert np.array_equal(parameters, local(RULES["adam"]).numpy())


@pytest.mark.parametrize("rule", [RULES["adam"], RULES["rmsprop"]], ids=["adam", "rmsprop"])
def test_two_ranks_equal_one_learner_with_the_double_batch(rule):
    """Also with clipping: it happens after the reduction."""
    one, two = all_reduce(rule, 2)
    assert np.array_equal(one, two)
    np.testing.assert_allclose(one, local(rule).numpy(), rtol=2e-5, atol=1e-6)


def test_ranks_that_differ_stop_the_run():
    from manyhands.types import RunError

    with pytest.raises(RunError, match="parameters differ at update"):
        all_reduce(RULES["adam"], 2, spoil=True)


def test_multi_step_adam_with_one_learner_equals_adam():
    rule = Adam(learning_rate=0.05, epsilon=1e-5)
    expected = local(rule)
    for n in (1, 2, 3, 4):
        model = make_model()
        store = shared_store(model, rule, chunks=2, sync_updates=n)
        parameters = learn(model, store, batches())
        state = store.state()
        assert state["updates"] == UPDATES and state["chunk_updates"] == [UPDATES] * 2
        if n == 1:
            assert torch.equal(parameters, expected)
        else:
            torch.testing.assert_close(parameters, expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(state["parameters"], parameters, rtol=0, atol=0)


ON_GPU = {
    "captured": (RULES["adam"], {"chunks": 3}),
    "captured-rmsprop": (RULES["rmsprop"], {"chunks": 3}),
    "kernel-by-kernel": (RULES["torch-rmsprop"], {"chunks": 3}),
    "lock-free": (RULES["adam"], {"lock": False}),
    "multi-step": (Adam(learning_rate=0.05), {"chunks": 2, "sync_updates": 2}),
}


@GPU
@pytest.mark.parametrize(("rule", "config"), ON_GPU.values(), ids=ON_GPU)
def test_a_shared_store_works_on_a_gpu(rule, config):
    model = flatten(make_model().net.cuda())
    stream = [(x.cuda(), y.cuda()) for x, y in batches()]
    store = shared_store(model, rule, **config)
    parameters = learn(model, store, stream)
    state = store.state()  # what others would see now: nobody has waited for the GPU
    torch.testing.assert_close(parameters.cpu(), local(rule), rtol=1e-4, atol=1e-5)
    assert state["updates"] == UPDATES
    torch.testing.assert_close(state["parameters"], parameters.cpu(), rtol=0, atol=0)


@GPU
@pytest.mark.parametrize(("rule", "config"), ON_GPU.values(), ids=ON_GPU)
def test_a_shared_store_leaves_out_what_is_not_finite(rule, config):
    model = flatten(make_model().net.cuda())
    store = shared_store(model, rule, **config)
    stream = batches(8)
    store.refresh()
    for i, (x, y) in enumerate(stream):
        model.gradient.zero_()
        ((model.net(x.cuda()) - y.cuda()) ** 2).mean().backward()
        if i in (0, 3, 4):
            model.gradient[i] = float("nan") if i < 4 else float("inf")
        good = i not in (0, 3, 4)
        store.count(10 * good)
        assert store.step(GradientInfo(store.clock.updates, len(x))).applied == good
    store.flush()
    expected = local(rule, [stream[i] for i in (1, 2, 5, 6, 7)])
    assert store.refused == 3 and store.state()["updates"] == 5
    before = store.state()["parameters"]
    torch.testing.assert_close(before, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(RunError, match="in a row"):
        for _ in range(PATIENCE):
            model.gradient.fill_(float("inf"))
            store.step(GradientInfo(store.clock.updates, 1))
    assert torch.equal(store.state()["parameters"], before)


def test_multi_step_adam_adds_up_two_learners_by_hand():
    """θ̃ ← θ̃ - a_s; m̃ ← β₁ⁿm̃ + (1-β₁)a_g; ṽ ← β₂ⁿṽ + (1-β₂)a_g², one learner after the other from the same start."""
    rule = Adam(learning_rate=0.1, beta1=0.8, beta2=0.9, epsilon=1e-8)
    n, gradients = 2, {"a": [1.0, -2.0], "b": [0.5, 3.0]}
    blocks = [SharedBlock(), SharedBlock()]
    learners = {}
    for name in "ab":
        net = torch.nn.Linear(1, 1, bias=False)
        net.weight.data.fill_(1.0)
        model = flatten(net)
        learners[name] = (model, SharedStore(model, rule, TOTAL, SharedConfig(sync_updates=n), *(b.fd for b in blocks)))
    learners["a"][1].load(learners["a"][1].initial_state())
    theta, m, v = 1.0, 0.0, 0.0
    for _, store in learners.values():
        store.refresh()
    for name, (model, store) in learners.items():
        own_theta, own_m, own_v, a_s, a_g, a_g2 = 1.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for t, g in enumerate(gradients[name], 1):
            model.gradient.fill_(g)
            receipt = store.step(GradientInfo(0, 1))
            own_m, own_v = 0.8 * own_m + 0.2 * g, 0.9 * own_v + 0.1 * g * g
            step = 0.1 * (own_m / (1 - 0.8**t)) / ((own_v / (1 - 0.9**t)) ** 0.5 + 1e-8)
            own_theta, a_s = own_theta - step, a_s + step
            a_g, a_g2 = 0.8 * a_g + g, 0.9 * a_g2 + g * g
        theta, m, v = theta - a_s, 0.8**n * m + 0.2 * a_g, 0.9**n * v + 0.1 * a_g2
        assert receipt.metrics["staleness"] == (0 if name == "a" else 2)
    state = learners["a"][1].state()
    found = [float(state["parameters"][0]), float(state["optimiser"]["exp_avg"][0]), float(state["optimiser"]["exp_avg_sq"][0])]
    assert found == pytest.approx([theta, m, v], rel=1e-5)
    assert float(state["optimiser"]["step"][0]) == 4 and state["updates"] == 4


def test_local_updates_are_neither_lost_nor_counted_backwards():
    rule = Adam(learning_rate=0.05, epsilon=1e-5)
    model = make_model()
    store = shared_store(model, rule, chunks=2, sync_updates=4)
    parameters = learn(model, store, batches(6))
    assert store.clock.updates == store.refresh().updates == 6 and store.state()["updates"] == 4
    store.flush()
    assert store.state()["updates"] == 6 and store.take_staleness() == {0: 6}
    torch.testing.assert_close(store.state()["parameters"], parameters, rtol=1e-6, atol=1e-7)


def test_a_saved_shared_store_goes_on_bit_for_bit():
    rule, stream = RULES["adam"], batches()
    model = make_model()
    first = shared_store(model, rule, chunks=3)
    learn(model, first, stream[:10])
    state = first.state()
    again = make_model()
    second = shared_store(again, rule, chunks=3)
    second.load(state)
    assert torch.equal(learn(again, second, stream[10:]), local(rule))
    assert second.clock.steps == 10 * UPDATES
