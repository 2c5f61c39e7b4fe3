"""The store of a single learner: the model's own flat vector and an optimiser over it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.graphs import Captured
from manyhands.nets.flat import Model
from manyhands.stores.gate import Gate
from manyhands.stores.rules import Rule
from manyhands.stores.shard import Shard
from manyhands.types import Clock, GradientInfo, Receipt


@dataclass(frozen=True)
class LocalConfig:
    """One learner, its own parameters."""


class LocalStore:
    """Captured, an update is launched and not waited for. A gradient that is not finite is then left out on the GPU itself: it is
    counted among the refused as soon as that is known, and among the updates."""

    def __init__(self, model: Model, rule: Rule, total_steps: int, capture: bool = True) -> None:
        self.model = model
        self.rule = rule
        self.total_steps = total_steps
        self.clock = Clock()
        self._gate = Gate(model, rule)
        self._shard = Shard(model.parameters, model.gradient, rule)
        device = model.parameters.device
        self._rate = torch.zeros((), device=device)
        self._captured: Captured | None = None
        if capture and rule.capturable and device.type == "cuda":
            changes = (model.gradient, model.parameters, self._gate.counts, *self._shard.memory.values())
            self._captured = Captured(self._apply, device, changes=changes)

    @property
    def refused(self) -> int:
        return self._gate.refused

    def count(self, steps: int) -> int:
        self.clock = Clock(self.clock.updates, self.clock.steps + steps)
        return steps

    def refresh(self) -> Clock:
        return self.clock

    def step(self, info: GradientInfo) -> Receipt:
        rate = self.rule.rate(info.samples, self.clock.steps / self.total_steps)
        norm: Tensor | None
        if self._captured is not None:
            self._rate.fill_(rate)
            norm = self._captured()
            self._gate.check(self.clock.updates)
        else:
            norm = self._gate.admit(self.clock.updates)
            if norm is None:
                return Receipt(self.clock, applied=False, metrics={"learning_rate": rate})
            self._shard.apply(rate)
        self.clock = Clock(self.clock.updates + 1, self.clock.steps)
        return Receipt(self.clock, applied=True, metrics={"gradient_norm": norm, "learning_rate": rate})

    def _apply(self) -> Tensor:
        norm, finite = self._gate.judge()
        self._shard.apply(self._rate, finite)
        return torch.where(finite, norm, 0.0)  # a mean over updates is to stay a number

    def flush(self) -> None:
        pass  # nobody else is there

    def take_staleness(self) -> dict[int, int]:
        return {}  # nobody else updates

    def state(self) -> dict:
        return {**self._shard.state(), "updates": self.clock.updates, "steps": self.clock.steps}

    def load(self, state: dict) -> None:
        self._shard.load(state)
        self.clock = Clock(state["updates"], state["steps"])

    def close(self) -> None:
        pass
