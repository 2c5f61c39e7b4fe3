"""The store of a single learner: the model's own flat vector and an optimiser over it."""

from __future__ import annotations

import torch

from manyhands.nets.flat import Model
from manyhands.stores.rules import Rule, load_optimiser_state, optimiser_state
from manyhands.types import Clock, GradientInfo, Receipt, RunError

PATIENCE = 10  # refused gradients in a row before the run is called broken


class LocalStore:
    def __init__(self, model: Model, rule: Rule, total_steps: int) -> None:
        self.model = model
        self.rule = rule
        self.total_steps = total_steps
        self.clock = Clock()
        self.refused = 0  # gradients that were not finite
        self._refused_in_a_row = 0
        self._flat = model.parameters.requires_grad_(False)
        self._flat.grad = model.gradient
        self._optimiser = rule.optimiser(self._flat)

    @property
    def progress(self) -> float:
        return self.clock.steps / self.total_steps

    def refresh(self, new_steps: int = 0) -> Clock:
        self.clock = Clock(self.clock.updates, self.clock.steps + new_steps)
        return self.clock

    def step(self, info: GradientInfo) -> Receipt:
        norm = torch.linalg.vector_norm(self.model.gradient)
        rate = self.rule.rate(info.samples, self.progress)
        metrics = {"gradient_norm": norm, "learning_rate": rate}
        if not torch.isfinite(norm):
            self._refuse()
            return Receipt(self.clock, applied=False, metrics={"learning_rate": rate})
        self._refused_in_a_row = 0
        if self.rule.max_grad_norm:
            self.model.gradient.mul_((self.rule.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self._optimiser.param_groups[0]["lr"] = rate
        self._optimiser.step()
        self.clock = Clock(self.clock.updates + 1, self.clock.steps)
        return Receipt(self.clock, applied=True, metrics=metrics)

    def _refuse(self) -> None:
        self.refused += 1
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= PATIENCE:
            raise RunError(
                f"{PATIENCE} gradients in a row were not finite (at update {self.clock.updates}). None was "
                "applied; the last checkpoint is good. Check the rewards for NaN or infinity, or lower rule.learning_rate"
            )

    def state(self) -> dict:
        return {
            "parameters": self._flat,
            "optimiser": optimiser_state(self._optimiser),
            "updates": self.clock.updates,
            "steps": self.clock.steps,
            "refused": self.refused,
        }

    def load(self, state: dict) -> None:
        self._flat.copy_(state["parameters"])
        load_optimiser_state(self._optimiser, state["optimiser"])
        self.clock = Clock(state["updates"], state["steps"])
        self.refused = state["refused"]
