"""The random numbers by which policies choose: a function of seed, simulator and slot."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.maths import random

AT_ONCE = 128  # slots; one by one they would cost as much as the network


class Noise:
    def __init__(self, seed: int, simulators: Tensor) -> None:
        self._seed, self._simulators = seed, simulators
        self._begin = 0
        self._drawn = torch.empty(0)

    def of(self, begin: int, end: int) -> Tensor:
        """Of all simulators in the slots from begin to end, [T, B, 2], where `simulators` is."""
        if begin < self._begin or end > self._begin + len(self._drawn):
            slots = torch.arange(begin, max(end, begin + AT_ONCE), device=self._simulators.device)
            self._begin = begin
            self._drawn = random.uniform(self._seed, random.ACT, self._simulators, slots.unsqueeze(1), 2)
        return self._drawn[begin - self._begin : end - self._begin]
