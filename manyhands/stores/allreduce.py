"""Synchronous learners: every rank has all parameters, gradients are averaged, all apply the same update.

Ranks meet through an inherited, unnamed file and talk over the loopback device; gloo on CPUs and where ranks share a GPU (nccl
refuses those), nccl where each has its own.
"""

from __future__ import annotations

import datetime
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from manyhands.nets.flat import Model
from manyhands.stores.local import LocalStore
from manyhands.stores.rules import Rule
from manyhands.types import Clock, GradientInfo, Receipt, RunError, Seat, UsageError


@dataclass(frozen=True)
class AllReduceConfig:
    """Synchronous learners with identical parameters; gradients are averaged over all of them."""

    timeout_s: float = 120.0
    """A rank that keeps the others waiting longer than this ends the run."""
    check_every: int = 100
    """Every so many rollouts the ranks compare a checksum of their parameters; a difference ends the run."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.check_every < 1:
            raise UsageError("store.timeout_s must be positive, store.check_every at least 1")


class AllReduceStore(LocalStore):
    def __init__(
        self,
        model: Model,
        rule: Rule,
        total_steps: int,
        config: AllReduceConfig,
        seat: Seat,
        meeting: int,
        own_gpu: bool = False,
        capture: bool = True,
    ) -> None:
        super().__init__(model, rule, total_steps, capture)
        self._ranks = seat.learners
        self._check_every = config.check_every
        self._counted = 0  # rollouts
        if sys.platform == "linux":
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if own_gpu else "gloo",
            store=dist.FileStore(f"/proc/self/fd/{meeting}", seat.learners),
            rank=seat.rank,
            world_size=seat.learners,
            timeout=datetime.timedelta(seconds=config.timeout_s),
        )
        self._side = model.parameters.device if own_gpu else torch.device("cpu")

    def count(self, steps: int) -> int:
        """Everybody's steps; a replay counts an equal share of them, so that all ranks owe the same number of updates."""
        total = torch.tensor([steps], device=self._side)
        dist.all_reduce(total)
        before = self.clock.steps // self._ranks
        self.clock = Clock(self.clock.updates, self.clock.steps + int(total))
        self._counted += 1
        if self._counted % self._check_every == 0:
            self._compare()
        return self.clock.steps // self._ranks - before

    def step(self, info: GradientInfo) -> Receipt:
        dist.all_reduce(self.model.gradient)
        self.model.gradient.div_(self._ranks)
        # The rate is scaled by what the update is made of: the samples of all ranks.
        return super().step(GradientInfo(info.version, info.samples * self._ranks))

    def _compare(self) -> None:
        """Bits, not values: NaN and -0 count too."""
        checksum = self.model.parameters.view(torch.int32).sum(dtype=torch.int64)
        extremes = torch.stack([checksum, -checksum]).to(self._side)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if int(extremes[0]) != -int(extremes[1]):
            raise RunError(
                f"the learners' parameters differ at update {self.clock.updates}: not all of them computed the same. "
                "The last checkpoint is good; is a network or an algorithm of your own random beside its given noise?"
            )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
