import pytest
import torch

from manyhands.samplers.exploration import Exploration
from manyhands.types import Clock, UsageError


def test_random_during_the_warm_up_then_annealed():
    e = Exploration(start=1.0, end=0.2, over=100)
    assert e.epsilon(2, Clock(steps=49), 50).tolist() == [1.0, 1.0]
    torch.testing.assert_close(e.epsilon(2, Clock(steps=100), 50), torch.tensor([0.6, 0.6]))
    torch.testing.assert_close(e.epsilon(1, Clock(steps=10_000), 50), torch.tensor([0.2]))


def test_over_updates():
    e = Exploration(start=1.0, end=0.0, over=10, unit="updates")
    torch.testing.assert_close(e.epsilon(1, Clock(steps=10**6, updates=5), 0), torch.tensor([0.5]))


def test_spread_as_in_ape_x():
    """ε^(1 + 7i/(n - 1))"""
    e = Exploration(start=0.4, end=0.4, spread=7.0)
    torch.testing.assert_close(e.epsilon(3, Clock(), 0), torch.tensor([0.4, 0.4**4.5, 0.4**8]))


def test_impossible_settings():
    for options in ({"end": 1.5}, {"over": 0}, {"spread": -1.0}):
        with pytest.raises(UsageError, match="exploration"):
            Exploration(**options)
