"""Which share of its actions each simulator takes at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from manyhands.maths import schedules
from manyhands.types import Clock, UsageError


@dataclass(frozen=True)
class Exploration:
    """ε of ε-greedy. Policies that are random by themselves need none of it."""

    start: float = 1.0
    """ε at the end of the warm-up, which is random play."""
    end: float = 0.1
    """ε once it is annealed. start = end: constant."""
    over: int = 1_000_000
    """How long it falls from start to end."""
    unit: Literal["steps", "updates"] = "steps"
    """What `over` counts: steps of all simulators after the warm-up, or updates of the store."""
    spread: float = 0.0
    """Simulator i of n keeps ε to the power of 1 + spread·i/(n - 1): some explore, some exploit (Ape-X: 7)."""

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"exploration.{name} = {getattr(self, name)}: must lie between 0 and 1")
        if self.over < 1:
            raise UsageError(f"exploration.over = {self.over}: must be at least 1")
        if self.spread < 0:
            raise UsageError(f"exploration.spread = {self.spread:g}: must not be negative")

    def epsilon(self, num_envs: int, clock: Clock, warmup_steps: int) -> Tensor:
        """[num_envs]"""
        if clock.steps < warmup_steps:
            return torch.ones(num_envs)
        passed = clock.updates if self.unit == "updates" else clock.steps - warmup_steps
        epsilon = schedules.linear(self.start, self.end, passed / self.over)
        exponent = 1 + self.spread * torch.arange(num_envs) / max(num_envs - 1, 1)
        return epsilon**exponent
