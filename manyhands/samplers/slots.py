"""From what simulators answered to what can be learned from: one definition for every sampler."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from manyhands.types import Step

# What a simulator answers in a slot, its frame aside, is one word: it takes one copy to a GPU, and stays one until it is learned.
ANSWER = np.dtype([("first", "?"), ("terminated", "?"), ("truncated", "?"), ("life_lost", "?"), ("reward", "f4")])
NAMES = ("first", "terminated", "truncated", "life_lost", "reward")


def write_down(step: Step, answers: np.ndarray) -> None:
    for name in NAMES:
        answers[name] = getattr(step, name)


def parts(words: Tensor) -> dict[str, Tensor]:
    """Views of answers [..., B] of int64, by their names."""
    flags = words.view(torch.bool).unflatten(-1, (-1, ANSWER.itemsize)).unbind(-1)
    rewards = words.view(torch.float32).unflatten(-1, (-1, 2)).select(-1, 1)
    return dict(zip(NAMES, (*flags[:4], rewards), strict=True))


def learnable(words: Tensor, life_loss: bool, gamma: float, clip: float) -> dict[str, Tensor]:
    """From answers [T, B], all [T, B]. life_loss: a lost life ends the return."""
    answer = parts(words)
    reward, terminated = answer["reward"], answer["terminated"]
    reset = answer["first"]  # a slot that only reset
    over = terminated | answer["life_lost"] if life_loss else terminated
    cut = terminated | answer["truncated"] | over | reset
    cut[:-1] |= reset[1:]  # whatever came before a reset ended there, also where a simulator was lost
    return {
        "reward": reward.clamp(-clip, clip) if clip else reward.clone(),
        "discount": gamma * (~(over | reset)).float(),
        "cut": cut,
        "weight": (~reset).float(),
    }
