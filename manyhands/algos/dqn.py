"""Q-learning on a replay: DQN (Mnih et al. 2015), double (van Hasselt et al. 2016), dueling (Wang et al. 2016).

n-step targets and priorities are the memory's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from manyhands.maths import td
from manyhands.nets.heads import DuelingQ, Q
from manyhands.types import Loss, PolicyBatch, Rollout, TransitionBatch, UsageError


@dataclass(frozen=True)
class QLearning:
    """What DQN and Categorical DQN share: everything but the head and the loss."""

    gamma: float = 0.99
    """Discount of future rewards."""
    double: bool = False
    """The online network chooses the next action, the target network values it."""
    dueling: bool = False
    """A head that adds a state's value and the actions' advantages."""
    target_period: int = 10_000
    """How often the target network becomes a copy of the online one."""
    target_unit: Literal["steps", "updates"] = "steps"
    """What target_period counts: steps of all simulators, or updates of the store."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise UsageError(f"algorithm.gamma = {self.gamma}: must lie between 0 and 1")
        if self.target_period < 1:
            raise UsageError(f"algorithm.target_period = {self.target_period}: must be at least 1")

    def act(self, net: nn.Module, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q = self.values(net(obs))  # [B, A]
        anything = (noise[:, 1] * q.shape[1]).long()
        return torch.where(noise[:, 0] < epsilon, anything, q.argmax(-1)), {}

    def greedy(self, net: nn.Module, obs: Tensor) -> Tensor:
        return self.values(net(obs)).argmax(-1)

    def values(self, output: Tensor) -> Tensor:
        """[N, A] from what the head gives."""
        return output

    def prepare(self, net: nn.Module, rollout: Rollout) -> PolicyBatch:
        raise TypeError("value learning draws its batches from a replay")


@dataclass(frozen=True)
class DQN(QLearning):
    """L = w·ℓ(y - Q(s, a; θ)),  y = r + γⁿ·maxₐ Q(s′, a; θ⁻), or Q(s′, argmaxₐ Q(s′, a; θ); θ⁻) if double"""

    loss_kind: Literal["huber", "squared"] = "huber"
    """ℓ: errors beyond 1 count linearly, or all of them squared."""

    def head(self, features: int, actions: int) -> nn.Module:
        return (DuelingQ if self.dueling else Q)(features, actions)

    def loss(self, net: nn.Module, target: nn.Module | None, batch: TransitionBatch, progress: float | Tensor) -> Loss:
        assert target is not None
        with torch.no_grad():
            next_q = target(batch.next_obs)
            chooser = net(batch.next_obs) if self.double else next_q
            y = batch.reward + batch.discount * td.greedy_value(next_q, chooser)
        q = net(batch.obs).gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
        error = y - q
        value = (batch.weight * td.error_loss(error, self.loss_kind)).mean()
        return Loss(value, {"loss": value.detach(), "q": q.detach().mean()}, error.detach().abs())
