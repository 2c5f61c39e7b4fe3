"""Update rules against independent calculations in plain Python floats; the local store's clipping, schedules, refusals."""

import math

import pytest
import torch

from manyhands.nets.flat import Model, flatten
from manyhands.stores.gate import PATIENCE
from manyhands.stores.local import LocalStore
from manyhands.stores.rules import Adam, RMSProp
from manyhands.types import GradientInfo, RunError, UsageError
from tests.gpu import GPU


def model(values):
    net = torch.nn.Linear(len(values), 1, bias=False)
    net.weight.data[:] = torch.tensor([values])
    return flatten(net)


def steps(rule, values, gradients):
    m = model(values)
    store = LocalStore(m, rule, total_steps=100)
    for g in gradients:
        m.gradient.copy_(torch.tensor(g))
        store.step(GradientInfo(0, samples=1))
    return m.parameters.tolist()


GRADIENTS = [[1.0, -2.0], [0.5, 0.0], [-3.0, 4.0]]


@pytest.mark.parametrize("initial", [0.0, 1.0])
def test_rmsprop_with_epsilon_inside_the_root(initial):
    rule = RMSProp(learning_rate=0.1, decay=0.9, epsilon=0.05, epsilon_inside=True, initial_square=initial)
    x, r = [1.0, 2.0], [initial, initial]
    for g in GRADIENTS:
        for i in range(2):
            r[i] = 0.9 * r[i] + 0.1 * g[i] ** 2
            x[i] -= 0.1 * g[i] / math.sqrt(r[i] + 0.05)
    assert steps(rule, [1.0, 2.0], GRADIENTS) == pytest.approx(x, rel=1e-6)


def test_rmsprop_with_epsilon_outside():
    x, r = [1.0, 2.0], [0.0, 0.0]
    for g in GRADIENTS:
        for i in range(2):
            r[i] = 0.9 * r[i] + 0.1 * g[i] ** 2
            x[i] -= 0.1 * g[i] / (math.sqrt(r[i]) + 0.05)
    assert steps(RMSProp(learning_rate=0.1, decay=0.9, epsilon=0.05), [1.0, 2.0], GRADIENTS) == pytest.approx(x, rel=1e-6)


def test_adam():
    x, m, v = [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]
    for t, g in enumerate(GRADIENTS, 1):
        for i in range(2):
            m[i] = 0.8 * m[i] + 0.2 * g[i]
            v[i] = 0.75 * v[i] + 0.25 * g[i] ** 2
            x[i] -= 0.1 * (m[i] / (1 - 0.8**t)) / (math.sqrt(v[i] / (1 - 0.75**t)) + 1e-3)
    rule = Adam(learning_rate=0.1, beta1=0.8, beta2=0.75, epsilon=1e-3)
    assert steps(rule, [1.0, 2.0], GRADIENTS) == pytest.approx(x, rel=1e-6)


def test_clipping_by_global_norm():
    m = model([0.0, 0.0])
    store = LocalStore(m, RMSProp(learning_rate=1.0, decay=0.0, epsilon=1.0, epsilon_inside=True, max_grad_norm=1.0), 100)
    m.gradient.copy_(torch.tensor([3.0, 4.0]))
    receipt = store.step(GradientInfo(0, 1))
    assert float(receipt.metrics["gradient_norm"]) == pytest.approx(5.0)
    # the gradient becomes (0.6, 0.8): steps of g / sqrt(g² + 1)
    expected = [-0.6 / math.sqrt(1.36), -0.8 / math.sqrt(1.64)]
    assert m.parameters.tolist() == pytest.approx(expected, rel=1e-5)


def test_rates_anneal_and_scale():
    rule = Adam(learning_rate=7e-4, anneal="linear", scaling="sqrt", reference_batch=80)
    assert rule.rate(320, 0.25) == pytest.approx(14e-4 * 0.75)
    assert rule.rate(320, 1.5) == 0.0
    with pytest.raises(UsageError, match="reference_batch"):
        Adam(scaling="linear")


def test_a_gradient_that_is_not_finite_is_never_applied():
    m = model([1.0, 2.0])
    store = LocalStore(m, Adam(learning_rate=0.1), 100)
    for bad in (math.nan, math.inf):
        m.gradient.copy_(torch.tensor([bad, 1.0]))
        assert not store.step(GradientInfo(0, 1)).applied
    assert m.parameters.tolist() == [1.0, 2.0] and store.refused == 2 and store.clock.updates == 0
    m.gradient.copy_(torch.tensor([1.0, 1.0]))
    assert store.step(GradientInfo(0, 1)).applied and store.clock.updates == 1
    with pytest.raises(RunError, match="not finite"):
        for _ in range(PATIENCE):
            m.gradient.fill_(math.nan)
            store.step(GradientInfo(0, 1))


@pytest.mark.parametrize("rule", [Adam(), RMSProp(), RMSProp(epsilon_inside=True, initial_square=1.0)])
def test_a_saved_store_goes_on_bit_for_bit(rule):
    torch.manual_seed(0)
    gradients = torch.randn(8, 50)

    def fresh() -> tuple[Model, LocalStore]:
        net = torch.nn.Linear(50, 1, bias=False)
        net.weight.data.fill_(0.5)
        m = flatten(net)
        return m, LocalStore(m, rule, 100)

    m1, one = fresh()
    m2, two = fresh()
    for i, g in enumerate(gradients):
        if i == 4:
            two.load({k: (v.clone() if isinstance(v, torch.Tensor) else v) for k, v in one.state().items()})
        for m, store in ((m1, one), (m2, two))[: 1 if i < 4 else 2]:
            m.gradient.copy_(g)
            store.count(3)
            store.step(GradientInfo(0, 1))
    assert torch.equal(m1.parameters, m2.parameters) and one.clock == two.clock


@GPU
@pytest.mark.parametrize("rule", [Adam(), RMSProp()])
def test_a_store_saved_on_the_cpu_goes_on_on_a_gpu(rule):
    m = model([1.0, 2.0])
    store = LocalStore(m, rule, 100)
    m.gradient.fill_(0.5)
    store.step(GradientInfo(0, 1))
    net = torch.nn.Linear(2, 1, bias=False).cuda()
    other = flatten(net)
    moved = LocalStore(other, rule, 100)
    moved.load(store.state())
    for one in (m, other):
        one.gradient.fill_(-0.25)
    store.step(GradientInfo(0, 1)), moved.step(GradientInfo(0, 1))
    torch.testing.assert_close(other.parameters.cpu(), m.parameters)


def test_impossible_settings():
    with pytest.raises(UsageError, match="epsilon_inside"):
        RMSProp(initial_square=1.0)
    with pytest.raises(UsageError, match="learning_rate"):
        Adam(learning_rate=-1.0)
