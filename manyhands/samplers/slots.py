"""From what simulators answered to what can be learned from: one definition for every sampler."""

from __future__ import annotations

from torch import Tensor


def learnable(
    reward: Tensor, terminated: Tensor, truncated: Tensor, life_lost: Tensor | None, reset: Tensor, gamma: float, clip: float
) -> dict[str, Tensor]:
    """All [T, B]; reset marks slots that only reset. life_lost: None where a lost life ends nothing."""
    over = terminated if life_lost is None else terminated | life_lost
    cut = terminated | truncated | over | reset
    cut[:-1] |= reset[1:]  # whatever came before a reset ended there, also where a simulator was lost
    return {
        "reward": reward.clamp(-clip, clip) if clip else reward.clone(),
        "discount": gamma * (~(over | reset)).float(),
        "cut": cut,
        "weight": (~reset).float(),
    }
