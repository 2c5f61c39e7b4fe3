"""Losses by hand on a network that says what it is told."""

import math

import pytest
import torch

from manyhands.algos.actor_critic import ActorCritic
from manyhands.algos.ppo import PPO
from manyhands.types import PolicyBatch


class Says(torch.nn.Module):
    def __init__(self, probabilities, values):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(probabilities).log())
        self.values = torch.nn.Parameter(torch.tensor(values))

    def forward(self, obs):
        return self.logits, self.values


NET = ([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]], [1.0, 2.0, 50.0])


def batch(**changes):
    fields = {
        "obs": torch.zeros(3, 1),
        "action": torch.tensor([1, 0, 1]),
        "log_prob": torch.tensor([0.5, 0.5, 0.5]).log(),
        "value": torch.zeros(3),
        "advantage": torch.tensor([2.0, -1.0, 1000.0]),
        "value_target": torch.tensor([2.0, 0.0, 0.0]),
        "weight": torch.tensor([1.0, 1.0, 0.0]),  # the last slot only reset: it must not matter
    }
    return PolicyBatch(**{**fields, **changes})


def entropy(p):
    return -sum(x * math.log(x) for x in p)


def test_actor_critic_by_hand():
    algorithm = ActorCritic(entropy_coef=0.1, value_coef=0.25, loss_scale=5.0)
    loss = algorithm.loss(Says(*NET), None, batch(), 0.0)
    policy = -(2 * math.log(0.75) - math.log(0.5)) / 2
    h = (entropy([0.25, 0.75]) + entropy([0.5, 0.5])) / 2
    value = ((2 - 1) ** 2 + (0 - 2) ** 2) / 2
    assert loss.value.item() == pytest.approx(5 * (policy - 0.1 * h + 0.25 * value), rel=1e-5)
    assert loss.metrics["value_loss"].item() == pytest.approx(value)


@pytest.mark.parametrize(("progress", "left"), [(0.0, 1.0), (0.75, 0.25), (1.0, 0.0)])
def test_the_bonus_on_entropy_anneals(progress, left):
    h = (entropy([0.25, 0.75]) + entropy([0.5, 0.5])) / 2
    bonus = [
        algorithm.loss(Says(*NET), None, batch(), progress).value.item()
        for algorithm in (ActorCritic(entropy_coef=0.1, entropy_anneal=True), ActorCritic(entropy_coef=0.0))
    ]
    assert bonus[0] - bonus[1] == pytest.approx(-0.1 * left * h, abs=1e-6)


def test_epsilon_inside_the_logarithm():
    algorithm = ActorCritic(entropy_coef=0.0, value_coef=0.0, log_epsilon=0.1)
    loss = algorithm.loss(Says(*NET), None, batch(), 0.0)
    assert loss.value.item() == pytest.approx(-(2 * math.log(0.85) - math.log(0.6)) / 2, rel=1e-5)


def test_ppo_by_hand():
    algorithm = PPO(entropy_coef=0.0, value_coef=0.0, clip=0.2, normalise_advantage=False)
    loss = algorithm.loss(Says(*NET), None, batch(), 0.0)
    # ratios 1.5 and 1.0: min(1.5 * 2, 1.2 * 2) = 2.4 and -1
    assert loss.value.item() == pytest.approx(-(2.4 - 1.0) / 2, rel=1e-5)
    assert loss.metrics["clipped"].item() == pytest.approx(0.5)


def test_ppo_clip_anneals():
    algorithm = PPO(entropy_coef=0.0, value_coef=0.0, clip=0.2, clip_anneal=True, normalise_advantage=False)
    loss = algorithm.loss(Says(*NET), None, batch(), 0.5)
    assert loss.value.item() == pytest.approx(-(2.2 - 1.0) / 2, rel=1e-5)


def test_normalised_advantages_ignore_resets():
    algorithm = PPO(entropy_coef=0.0, value_coef=0.0, clip=10.0)
    loss = algorithm.loss(Says(*NET), None, batch(), 0.0)
    # advantages 2, -1 become +1, -1
    assert loss.value.item() == pytest.approx(-(1.5 - 1.0) / 2, rel=1e-4)


def test_the_gradient_of_actor_critic_is_the_policy_gradient():
    """d/dlogits of -log π(a)·A is (π - onehot)·A, over the two samples that count."""
    net = Says(*NET)
    ActorCritic(entropy_coef=0.0, value_coef=0.0).loss(net, None, batch(), 0.0).value.backward()
    expected = torch.tensor([[0.25 * 2, (0.75 - 1) * 2], [-(0.5 - 1), -0.5], [0.0, 0.0]]) / 2
    torch.testing.assert_close(net.logits.grad, expected)


def test_acting_follows_the_noise_and_greedy_does_not():
    net = Says(*NET)
    noise = torch.tensor([[0.1, 0.0], [0.9, 0.0], [0.95, 0.0]])
    action, extras = ActorCritic().act(net, torch.zeros(3, 1), torch.zeros(3), noise)
    assert action.tolist() == [0, 1, 1]
    assert extras["log_prob"].tolist() == pytest.approx([math.log(0.25), math.log(0.5), math.log(0.1)], rel=1e-5)
    assert extras["value"].tolist() == [1.0, 2.0, 50.0]
    assert ActorCritic().greedy(net, torch.zeros(3, 1)).tolist()[::2] == [1, 0]
