"""Policy losses and the sampling of discrete actions, per sample; the algorithms weigh and average them."""

from typing import Any

import torch
from torch import Tensor


def sample(logits: Tensor, noise: Tensor) -> Tensor:
    """Actions by inverting the cumulative distribution at noise [N] in [0, 1)."""
    cdf = logits.softmax(-1).cumsum(-1)  # [N, A]
    # Rounding may leave the last entry below 1: the number of thresholds passed never exceeds A - 1.
    return (noise.unsqueeze(-1) >= cdf[:, :-1]).sum(-1)


def log_prob(log_probs: Tensor, action: Tensor) -> Tensor:
    """[N, A], [N] -> [N]"""
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: Any) -> Tensor:
    """PPO's objective, to be maximised. clip: a number, or a tensor that holds one."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    return (weight * x).sum() / weight.sum().clamp(min=1)
