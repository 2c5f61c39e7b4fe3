"""The on-policy memory: one rollout, used for some epochs of minibatches, then forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from torch import Tensor

from manyhands.maths import random
from manyhands.maths.stacking import rollout_stacks
from manyhands.types import PolicyBatch, Rollout, UsageError


@dataclass(frozen=True)
class FreshConfig:
    epochs: int = 1
    """How often each sample is used."""
    minibatches: int = 1
    """Updates per epoch."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatches < 1:
            raise UsageError("memory.epochs and memory.minibatches must be at least 1")


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

    def feedback(self, keys: Tensor, priority: Tensor) -> None:
        raise TypeError("a fresh memory has no priorities")

    def _split(self, rollout: Rollout, whole: PolicyBatch, number: int) -> Iterator[PolicyBatch]:
        whole = replace(whole, obs=rollout_stacks(rollout, 0, len(rollout.action)))
        n = len(whole.action)
        for epoch in range(self._epochs):
            if self._minibatches == 1:
                yield whole
                continue
            order = random.permutation(n, self._seed, random.SHUFFLE, number, epoch, device=whole.action.device)
            for rows in order.tensor_split(self._minibatches):
                picked = {f.name: getattr(whole, f.name).index_select(0, rows) for f in fields(whole) if f.name != "obs"}
                yield replace(whole, obs=_rows(whole.obs, rows), **picked)

    def state(self) -> dict:
        return {"rollouts": self._rollouts}

    def load(self, state: dict) -> None:
        self._rollouts = state["rollouts"]


def _rows(obs: Tensor, rows: Tensor) -> Tensor:
    if obs.dim() != 4:
        return obs.index_select(0, rows)
    # index_select copies whole rows of a contiguous tensor: go through the memory order.
    return obs.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
