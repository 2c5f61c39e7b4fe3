"""Advantage actor-critic: A2C, A3C, PAAC, GA3C and BA3C, which differ in who samples and where gradients go, not here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.maths import policy, returns
from manyhands.maths.stacking import rollout_stacks
from manyhands.nets.heads import PolicyValue
from manyhands.types import Loss, PolicyBatch, Rollout, UsageError


@dataclass(frozen=True)
class ActorCritic:
    """L = -log π(a|s)·Â - β·H(π) + c·(R - V)²"""

    gamma: float = 0.99
    """Discount of future rewards."""
    gae_lambda: float = 1.0
    """1: n-step returns over the rollout; lower: generalised advantage estimation."""
    entropy_coef: float = 0.01
    """β, the bonus on the policy's entropy."""
    entropy_anneal: bool = False
    """Lower the bonus linearly to zero over the run."""
    value_coef: float = 0.5
    """c, the weight of the value loss."""
    normalise_advantage: bool = False
    """Advantages of an update scaled to zero mean and unit deviation."""
    log_epsilon: float = 0.0
    """Added to π inside the logarithm (BA3C: 1e-6)."""
    loss_scale: float = 1.0
    """Multiplies the loss, a mean over samples (PAAC: 5, its rate was found for sums over five slots)."""

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"algorithm.{name} = {getattr(self, name)}: must lie between 0 and 1")
        for name in ("entropy_coef", "value_coef", "log_epsilon", "loss_scale", "clip"):
            if not getattr(self, name, 0.0) >= 0:
                raise UsageError(f"algorithm.{name} = {getattr(self, name)}: must not be negative")

    def head(self, features: int, actions: int) -> nn.Module:
        return PolicyValue(features, actions)

    def act(self, net: nn.Module, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logits, value = net(obs)  # [B, A], [B]
        action = policy.sample(logits, noise[:, 0])
        return action, {"log_prob": policy.log_prob(self._log_probs(logits), action), "value": value}

    def greedy(self, net: nn.Module, obs: Tensor) -> Tensor:
        return net(obs)[0].argmax(-1)

    @torch.no_grad()
    def prepare(self, net: nn.Module, rollout: Rollout) -> PolicyBatch:
        T = len(rollout.action)
        _, bootstrap = net(rollout_stacks(rollout, T, T + 1))
        # The slot after an end acts on the episode's true last observation: its value is there already.
        value = torch.cat([rollout.extras["value"], bootstrap.unsqueeze(0)])  # [T+1, B]
        advantage = returns.advantages(rollout.reward, rollout.discount, rollout.cut, value, self.gae_lambda)
        return PolicyBatch(
            obs=torch.empty(0),
            action=rollout.action.flatten(),
            log_prob=rollout.extras["log_prob"].flatten(),
            value=value[:T].flatten(),
            advantage=advantage.flatten(),
            value_target=(advantage + value[:T]).flatten(),
            weight=rollout.weight.flatten(),
        )

    def loss(self, net: nn.Module, target: nn.Module | None, batch: PolicyBatch, progress: float | Tensor) -> Loss:
        logits, value = net(batch.obs)  # [N, A], [N]
        log_probs = self._log_probs(logits)
        advantage = returns.normalise(batch.advantage, batch.weight) if self.normalise_advantage else batch.advantage
        policy_gain, extra = self._policy_gain(policy.log_prob(log_probs, batch.action), batch, advantage, progress)
        entropy = policy.weighted_mean(policy.entropy(log_probs), batch.weight)
        policy_loss = -policy.weighted_mean(policy_gain, batch.weight)
        value_loss = policy.weighted_mean((batch.value_target - value) ** 2, batch.weight)
        beta = self.entropy_coef * (1 - progress) if self.entropy_anneal else self.entropy_coef
        total = self.loss_scale * (policy_loss - beta * entropy + self.value_coef * value_loss)
        metrics = {"loss": total, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, **extra}
        return Loss(total, {name: x.detach() for name, x in metrics.items()})

    def _policy_gain(
        self, log_prob: Tensor, batch: PolicyBatch, advantage: Tensor, progress: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return log_prob * advantage, {}

    def _log_probs(self, logits: Tensor) -> Tensor:
        if self.log_epsilon:
            return (logits.softmax(-1) + self.log_epsilon).log()
        return logits.log_softmax(-1)
