"""The store of a single learner: the model's own flat vector and an optimiser over it."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.nets.flat import Model
from manyhands.stores.gate import Gate
from manyhands.stores.rules import Rule
from manyhands.stores.shard import Shard
from manyhands.types import Clock, GradientInfo, Receipt


@dataclass(frozen=True)
class LocalConfig:
    """One learner, its own parameters."""


class LocalStore:
    def __init__(self, model: Model, rule: Rule, total_steps: int) -> None:
        self.model = model
        self.rule = rule
        self.total_steps = total_steps
        self.clock = Clock()
        self._gate = Gate(model, rule)
        self._shard = Shard(model.parameters, model.gradient, rule)

    @property
    def refused(self) -> int:
        return self._gate.refused

    def count(self, steps: int) -> int:
        self.clock = Clock(self.clock.updates, self.clock.steps + steps)
        return steps

    def refresh(self) -> Clock:
        return self.clock

    def step(self, info: GradientInfo) -> Receipt:
        norm = self._gate.admit(self.clock.updates)
        rate = self.rule.rate(info.samples, self.clock.steps / self.total_steps)
        if norm is None:
            return Receipt(self.clock, applied=False, metrics={"learning_rate": rate})
        self._shard.apply(rate)
        self.clock = Clock(self.clock.updates + 1, self.clock.steps)
        return Receipt(self.clock, applied=True, metrics={"gradient_norm": norm, "learning_rate": rate})

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
