import pytest
import torch

from manyhands.maths import td

SUPPORT = torch.tensor([0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("reward", "discount", "expected"),
    [
        (0.0, 1.0, [0.1, 0.2, 0.3, 0.4]),  # nothing moves
        (1.0, 0.0, [0.0, 1.0, 0.0, 0.0]),  # a termination puts all on its reward
        (0.25, 0.0, [0.75, 0.25, 0.0, 0.0]),  # between two atoms: by nearness
        (1.0, 1.0, [0.0, 0.1, 0.2, 0.7]),  # the top takes what falls beyond it
        (-9.0, 1.0, [1.0, 0.0, 0.0, 0.0]),
        # 0.5 + 0.5 z = 0.5, 1, 1.5, 2
        (0.5, 0.5, [0.05, 0.05 + 0.2 + 0.15, 0.15 + 0.4, 0.0]),
    ],
)
def test_projection_by_hand(reward, discount, expected):
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    result = td.project(p, torch.tensor([reward]), torch.tensor([discount]), SUPPORT)
    torch.testing.assert_close(result, torch.tensor([expected]))


def test_projection_keeps_mass_and_mean():
    generator = torch.Generator().manual_seed(0)
    support = torch.linspace(-10, 10, 51)
    p = torch.rand(200, 51, generator=generator).softmax(-1)
    reward, discount = torch.rand(200, generator=generator) - 0.5, torch.rand(200, generator=generator) * 0.9
    result = td.project(p, reward, discount, support)
    torch.testing.assert_close(result.sum(-1), torch.ones(200))
    torch.testing.assert_close(result @ support, reward + discount * (p @ support), rtol=1e-3, atol=1e-3)


def test_huber_and_squared_by_hand():
    error = torch.tensor([0.5, -0.5, 3.0])
    assert td.error_loss(error, "huber").tolist() == [0.125, 0.125, 2.5]
    assert td.error_loss(error, "squared").tolist() == [0.125, 0.125, 4.5]


def test_double_values_by_hand():
    q, chooser = torch.tensor([[1.0, 5.0], [2.0, 3.0]]), torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    assert td.greedy_value(q, chooser).tolist() == [1.0, 3.0] and td.greedy_value(q, q).tolist() == [5.0, 3.0]
