"""The on-policy memory: one rollout, used for some epochs of minibatches, then forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from manyhands.maths import random
from manyhands.maths.stacking import stacked
from manyhands.types import PolicyBatch, Rollout


class FreshMemory:
    """Minibatches are shuffled by keys of (seed, rollout, epoch), so there is no generator state to save."""

    def __init__(self, prepare: Callable[[Rollout], PolicyBatch], epochs: int, minibatches: int, seed: int) -> None:
        self._prepare = prepare
        self._epochs = epochs
        self._minibatches = minibatches
        self._seed = seed
        self._rollouts = 0
        self._batches: Iterator[PolicyBatch] = iter(())

    def add(self, rollout: Rollout) -> None:
        self._batches = self._split(rollout, self._prepare(rollout), self._rollouts)
        self._rollouts += 1

    def next(self) -> PolicyBatch | None:
        return next(self._batches, None)

    def _split(self, rollout: Rollout, whole: PolicyBatch, number: int) -> Iterator[PolicyBatch]:
        n = len(whole.action)
        device = whole.action.device
        for epoch in range(self._epochs):
            if self._minibatches == 1:
                yield _take(rollout, whole, torch.arange(n, device=device))
                continue
            order = random.permutation(n, self._seed, random.SHUFFLE, number, epoch, device=device)
            for rows in order.tensor_split(self._minibatches):
                yield _take(rollout, whole, rows)

    def state(self) -> dict:
        return {"rollouts": self._rollouts}

    def load(self, state: dict) -> None:
        self._rollouts = state["rollouts"]


def _take(rollout: Rollout, whole: PolicyBatch, rows: Tensor) -> PolicyBatch:
    columns = rollout.action.shape[1]
    slots = rows + (rollout.stack - 1) * columns  # obs begins stack - 1 slots earlier
    picked = {
        name: getattr(whole, name)[rows]
        for name in ("action", "log_prob", "value", "advantage", "value_target", "weight")
    }
    return replace(whole, obs=stacked(rollout.obs, rollout.first, slots, rollout.stack), **picked)
