"""Proximal policy optimisation (Schulman et al. 2017): actor-critic whose policy term is clipped, so that a rollout can be
used for several epochs. APPO is the same maths on an asynchronous store."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyhands.algos.actor_critic import ActorCritic
from manyhands.maths import policy
from manyhands.types import PolicyBatch


@dataclass(frozen=True)
class PPO(ActorCritic):
    """L = -min(ρ·Â, clip(ρ, 1 ± clip)·Â) - β·H(π) + c·(R - V)²"""

    gae_lambda: float = 0.95
    """1: n-step returns over the rollout; lower: generalised advantage estimation."""
    normalise_advantage: bool = True
    """Advantages of an update scaled to zero mean and unit deviation."""
    clip: float = 0.2
    """How far the probability ratio ρ may move before its gradient stops."""
    clip_anneal: bool = False
    """Lower the clip linearly to zero over the run."""

    def _policy_gain(
        self, log_prob: Tensor, batch: PolicyBatch, advantage: Tensor, progress: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = log_prob - batch.log_prob
        ratio = log_ratio.exp()
        clip = self.clip * (1 - progress) if self.clip_anneal else self.clip
        metrics = {
            "kl": policy.weighted_mean(ratio - 1 - log_ratio, batch.weight),
            "clipped": policy.weighted_mean(((ratio - 1).abs() > clip).float(), batch.weight),
        }
        return policy.clipped_surrogate(ratio, advantage, clip), metrics
