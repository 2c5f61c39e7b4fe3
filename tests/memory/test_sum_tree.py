import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.memory.sum_tree import SumTree
from tests.gpu import DEVICES

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_and_draws_equal_a_plain_list(data):
    leaves = data.draw(st.integers(1, 70))
    tree, plain = SumTree(leaves, CPU, fan=data.draw(st.sampled_from([2, 4, 128]))), [0.0] * leaves
    for _ in range(data.draw(st.integers(1, 5))):
        change = data.draw(st.dictionaries(st.integers(0, leaves - 1), st.integers(0, 9), min_size=1))
        tree.set(torch.tensor(list(change)), torch.tensor(list(change.values())).float())
        for i, value in change.items():
            plain[i] = float(value)
    assert float(tree.total) == sum(plain)
    assert tree.get(torch.arange(leaves)).tolist() == plain
    if sum(plain) > 0:
        u = (torch.arange(50) + 0.5) / 50
        expected = np.searchsorted(np.cumsum(plain), u.double().numpy() * sum(plain), side="right")
        assert tree.draw(u).tolist() == expected.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_never_draws_an_empty_leaf(device):
    tree = SumTree(100_000, torch.device(device))
    some = torch.arange(0, 100_000, 7, device=device)
    tree.set(some, torch.rand(len(some), device=device) ** 9 + 1e-9)
    drawn = tree.draw(torch.cat([torch.rand(20_000, device=device), torch.tensor([0.0, 1 - 1e-7, 1.0], device=device)]))
    assert (drawn % 7 == 0).all() and drawn.max() < 100_000
    tree.set(some, torch.zeros(len(some), device=device))
    assert tree.total == 0 and tree.draw(torch.rand(9, device=device)).max() < 100_000  # nothing to draw: a leaf all the same


def test_saved_and_loaded():
    tree, other = SumTree(13, CPU), SumTree(13, CPU)
    tree.set(torch.arange(13), torch.arange(13).float())
    other.load(tree.state())
    u = torch.rand(100)
    assert torch.equal(tree.draw(u), other.draw(u)) and float(other.total) == 78
