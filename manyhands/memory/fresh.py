"""The on-policy memory: one rollout, used for some epochs of minibatches, then forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from manyhands.graphs import Captured
from manyhands.maths import random
from manyhands.maths.stacking import rollout_stacks
from manyhands.types import PolicyBatch, Rollout, UsageError


@dataclass(frozen=True)
class FreshConfig:
    epochs: int = 1
    """How often each sample is used."""
    minibatches: int = 1
    """Updates per epoch."""
    overlap: bool = False
    """Learn from a rollout while the next is sampled: whoever acts is then behind by the updates of one rollout, always the
    same ones. For a GPU; on a CPU both would fight for the same cores. A resume does without the rollout being learned from."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatches < 1:
            raise UsageError("memory.epochs and memory.minibatches must be at least 1")


class FreshMemory:
    """Minibatches are shuffled by keys of (seed, rollout, epoch), so there is no generator state to save.

    pauses: in how many moments between two rollouts it will be asked for batches; then it hands them out evenly over these,
    and what is left of one rollout when the next is there. 0: all at once.
    capture: prepare rollouts by one launch, where they are on a GPU.
    """

    def __init__(
        self,
        prepare: Callable[[Rollout], PolicyBatch],
        epochs: int,
        minibatches: int,
        seed: int,
        pauses: int = 0,
        capture: bool = False,
    ) -> None:
        self._prepare = prepare
        self._all_of = _OfRollout(self._samples) if capture else self._samples
        self._pick = _Picking() if capture else _picked
        self._epochs = epochs
        self._minibatches = minibatches
        self._seed = seed
        self._pauses = pauses
        self._passed = self._taken = 0  # pauses and batches, of this rollout
        self._rollouts = 0
        self._next: Rollout | None = None
        self._drained = False  # nothing is left of the one before it
        self._batches: Iterator[PolicyBatch] = iter(())

    def add(self, rollout: Rollout) -> None:
        self._next, self._drained = rollout, False
        if not self._pauses:
            self._begin()

    def next(self) -> PolicyBatch | None:
        if self._next is not None:
            if not self._drained:  # what is left of the one before
                batch = next(self._batches, None)
                self._drained = batch is None
                return batch
            self._begin()  # not before the first pause: until then the simulators have nothing to do
        if self._pauses and self._taken * self._pauses >= self._epochs * self._minibatches * (self._passed + 1):
            self._passed += 1
            return None
        self._taken += 1
        return next(self._batches, None)

    def _begin(self) -> None:
        assert self._next is not None
        rollout, self._next = self._next, None
        self._batches = self._split(self._all_of(rollout), self._rollouts)
        self._rollouts += 1
        self._passed = self._taken = 0

    def feedback(self, keys: Tensor, priority: Tensor) -> None:
        raise TypeError("a fresh memory has no priorities")

    def metrics(self) -> dict[str, float]:
        return {}

    def _samples(self, rollout: Rollout) -> PolicyBatch:
        return replace(self._prepare(rollout), obs=rollout_stacks(rollout, 0, len(rollout.action)))

    def _split(self, whole: PolicyBatch, number: int) -> Iterator[PolicyBatch]:
        n = len(whole.action)
        for epoch in range(self._epochs):
            if self._minibatches == 1:
                yield whole
                continue
            order = random.permutation(n, self._seed, random.SHUFFLE, number, epoch, device=whole.action.device)
            for rows in order.tensor_split(self._minibatches):
                yield self._pick(whole, rows)

    def state(self) -> dict:
        return {"rollouts": self._rollouts}

    def load(self, state: dict) -> None:
        self._rollouts = state["rollouts"]


class _OfRollout:
    """Calls a function of a rollout on a GPU as one launch. What a rollout holds is copied to where that reads it; the next call
    overwrites what it gave."""

    def __init__(self, function: Callable[[Rollout], PolicyBatch]) -> None:
        self._function = function
        self._static: dict[str, Tensor] = {}
        self._graph: Captured | None = None

    def __call__(self, rollout: Rollout) -> PolicyBatch:
        own: dict[str, Any] = {f.name: getattr(rollout, f.name) for f in fields(rollout) if f.name != "version"}
        tensors = {name: x for name, x in own.items() if isinstance(x, Tensor)} | rollout.extras
        if self._graph is None:
            self._static = {name: torch.empty_like(x) for name, x in tensors.items()}
            extras = {name: self._static[name] for name in rollout.extras}
            fixed: dict[str, Any] = {name: x for name, x in self._static.items() if name in own}
            rollout = replace(rollout, extras=extras, **fixed)
            self._graph = Captured(lambda: self._function(rollout), rollout.obs.device)
        torch._foreach_copy_(list(self._static.values()), [tensors[name] for name in self._static])
        return self._graph()


def _picked(whole: PolicyBatch, rows: Tensor) -> PolicyBatch:
    picked = {f.name: getattr(whole, f.name).index_select(0, rows) for f in fields(whole) if f.name != "obs"}
    return replace(whole, obs=_rows(whole.obs, rows), **picked)


class _Picking:
    """The same by one launch, of a batch that is always the same object; so is what it gives for each number of rows, and the
    next call overwrites it."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, Captured]] = {}

    def __call__(self, whole: PolicyBatch, rows: Tensor) -> PolicyBatch:
        n = len(rows)
        if n not in self._of:
            mine = rows.clone()
            self._of[n] = mine, Captured(lambda: _picked(whole, mine), rows.device)
        mine, graph = self._of[n]
        mine.copy_(rows)
        return graph()


def _rows(obs: Tensor, rows: Tensor) -> Tensor:
    if obs.dim() != 4:
        return obs.index_select(0, rows)
    # index_select copies whole rows of a contiguous tensor: go through the memory order.
    return obs.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
