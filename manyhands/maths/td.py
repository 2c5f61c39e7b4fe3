"""Temporal-difference targets: of values, and of distributions over a fixed support."""

import torch
import torch.nn.functional as F
from torch import Tensor


def greedy_value(q: Tensor, chooser: Tensor) -> Tensor:
    """q at the action that chooser likes best (double DQN: chooser is the online network's), [N, A], [N, A] -> [N]"""
    return q.gather(-1, chooser.argmax(-1, keepdim=True)).squeeze(-1)


def error_loss(error: Tensor, kind: str) -> Tensor:
    """Half the square, or beyond 1 its tangent (Huber)."""
    zero = torch.zeros_like(error)
    return F.huber_loss(error, zero, reduction="none") if kind == "huber" else 0.5 * error**2


def project(probability: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """The distribution of reward + discount · z, with z on an even support, moved onto the same support.

    probability [N, Z], reward [N], discount [N], support [Z] -> [N, Z]. Each atom's mass is split between its two neighbours in
    proportion to their nearness; what falls beyond the ends is put on them (Bellemare et al. 2017).
    """
    low, high = support[0], support[-1]
    step = support[1] - support[0]
    moved = (reward.unsqueeze(1) + discount.unsqueeze(1) * support).clamp(low, high)  # [N, Z]
    # The share of atom j that lands on i falls linearly from 1 to 0 within one step.
    share = (1 - (moved.unsqueeze(1) - support.view(1, -1, 1)).abs() / step).clamp(min=0)  # [N, Z (i), Z (j)]
    return (share * probability.unsqueeze(1)).sum(-1)
