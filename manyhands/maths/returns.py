"""Returns and advantages of rollouts, time first. `discount` carries gamma and termination, `cut` ends every sum."""

import torch
from torch import Tensor


def advantages(reward: Tensor, discount: Tensor, cut: Tensor, value: Tensor, lam: float) -> Tensor:
    """Generalised advantage estimates (Schulman et al. 2016); lam = 1 gives n-step return - value.

    reward, discount, cut: [T, B]; value: [T+1, B], value[t+1] being that of the state the step led to,
    which at a cut is the episode's true last observation.
    """
    delta = reward + discount * value[1:] - value[:-1]
    carry = discount * lam * ~cut
    result = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = torch.addcmul(delta[t], carry[t], running, out=result[t])
    return result


def normalise(x: Tensor, weight: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Zero mean and unit deviation under the weights."""
    total = weight.sum().clamp(min=1)
    mean = (weight * x).sum() / total
    variance = (weight * (x - mean) ** 2).sum() / total
    return (x - mean) / (variance.sqrt() + epsilon)
