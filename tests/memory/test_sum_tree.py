import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.memory.sum_tree import SumTree

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_and_draws_equal_a_plain_list(data):
    leaves = data.draw(st.integers(1, 20))
    tree, plain = SumTree(leaves, CPU), [0.0] * leaves
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


def test_never_draws_an_empty_leaf():
    tree = SumTree(1000, CPU)
    tree.set(torch.arange(0, 1000, 7), torch.rand(143, generator=torch.Generator().manual_seed(0)) + 1e-6)
    drawn = tree.draw(torch.cat([torch.rand(20_000), torch.tensor([0.0, 1 - 1e-7])]))
    assert (drawn % 7 == 0).all()


def test_saved_and_loaded():
    tree, other = SumTree(13, CPU), SumTree(13, CPU)
    tree.set(torch.arange(13), torch.arange(13).float())
    other.load(tree.state())
    u = torch.rand(100)
    assert torch.equal(tree.draw(u), other.draw(u)) and float(other.total) == 78
