"""Categorical DQN (Bellemare et al. 2017): Q-learning of whole return distributions on a fixed support."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.algos.dqn import QLearning
from manyhands.maths import td
from manyhands.nets.heads import CategoricalQ
from manyhands.types import Loss, TransitionBatch, UsageError


@dataclass(frozen=True)
class CategoricalDQN(QLearning):
    """L = -w·Σ m·log p(s, a; θ),  m = r + γⁿ·Z(s′, a*; θ⁻) projected onto the support"""

    atoms: int = 51
    """Points of the support."""
    v_min: float = -10.0
    """The lowest return it can represent."""
    v_max: float = 10.0
    """The highest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.atoms < 2:
            raise UsageError(f"algorithm.atoms = {self.atoms}: must be at least 2")
        if not self.v_min < self.v_max:
            raise UsageError(f"algorithm.v_min = {self.v_min:g} must lie below algorithm.v_max = {self.v_max:g}")

    def head(self, features: int, actions: int) -> nn.Module:
        return CategoricalQ(features, actions, self.atoms, self.dueling)

    def values(self, output: Tensor) -> Tensor:
        return output.softmax(-1) @ self._support(output)

    def _support(self, like: Tensor) -> Tensor:
        return torch.linspace(self.v_min, self.v_max, self.atoms, device=like.device)

    def loss(self, net: nn.Module, target: nn.Module | None, batch: TransitionBatch, progress: float | Tensor) -> Loss:
        assert target is not None
        rows = torch.arange(len(batch.action), device=batch.action.device)
        with torch.no_grad():
            after = target(batch.next_obs)  # [N, A, Z]
            chosen = self.values(net(batch.next_obs) if self.double else after).argmax(-1)
            y = td.project(after[rows, chosen].softmax(-1), batch.reward, batch.discount, self._support(after))
        output = net(batch.obs)[rows, batch.action]  # [N, Z]
        cross_entropy = -(y * output.log_softmax(-1)).sum(-1)
        value = (batch.weight * cross_entropy).mean()
        q = self.values(output.detach()).mean()
        # What is left above the target's own entropy is the surprise: a perfect prediction has none.
        surprise = cross_entropy.detach() + torch.special.xlogy(y, y).sum(-1)
        return Loss(value, {"loss": value.detach(), "q": q}, surprise.clamp(min=0))
