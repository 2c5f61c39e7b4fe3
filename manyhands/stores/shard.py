"""A slice of the flat vector, its update rule's memory, and nothing else: what a local store has one of, what a chunk of the
shared store is while it is being worked on, and what a parameter server serves."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.stores.rules import Rule


class Shard:
    """`memory` holds the rule's own tensors, alive: copying into them is loading."""

    def __init__(self, parameters: Tensor, gradient: Tensor, rule: Rule, memory: dict[str, Tensor] | None = None) -> None:
        self.parameters, self.gradient = parameters.requires_grad_(False), gradient
        self.memory = rule.initial_state(parameters) if memory is None else memory
        self._rule = rule

    @torch.no_grad()
    def apply(self, rate: float | Tensor, admitted: Tensor | None = None) -> None:
        """One step of the rule with the gradient; where `admitted` says so, if it was looked at on the device only."""
        if admitted is None:
            self._rule.apply(self.parameters, self.gradient, self.memory, rate)
            return
        mine = [self.parameters, *self.memory.values()]
        before = [x.clone() for x in mine]
        self._rule.apply(self.parameters, self.gradient, self.memory, rate)
        for x, old in zip(mine, before, strict=True):
            torch.where(admitted, x, old, out=x)

    def state(self) -> dict:
        return {"parameters": self.parameters, "optimiser": self.memory}

    def load(self, state: dict) -> None:
        self.parameters.copy_(state["parameters"], non_blocking=True)
        for name, tensor in self.memory.items():
            tensor.copy_(state["optimiser"][name], non_blocking=True)
