"""What every store asks of a gradient before it is applied: that it is finite, and no longer than the rule allows."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.nets.flat import Model
from manyhands.stores.rules import Rule
from manyhands.types import RunError

PATIENCE = 10  # refused gradients in a row before the run is called broken


class Gate:
    def __init__(self, model: Model, rule: Rule) -> None:
        self._gradient = model.gradient
        self._rule = rule
        self._tensors = [model.gradient[piece] for piece in model.named_slices().values()]
        self.refused = 0  # gradients that were not finite
        self._in_a_row = 0

    def admit(self, updates: int) -> Tensor | None:
        """The gradient's norm before it was clipped, or None: it must not be applied."""
        norm = torch.linalg.vector_norm(self._gradient)
        if not torch.isfinite(norm):
            self._refuse(updates)
            return None
        self._in_a_row = 0
        if self._rule.max_average_norm:
            for tensor in self._tensors:
                average = torch.linalg.vector_norm(tensor) / tensor.numel()
                tensor.mul_((self._rule.max_average_norm / (average + 1e-12)).clamp(max=1.0))
        if self._rule.max_grad_norm:
            left = torch.linalg.vector_norm(self._gradient) if self._rule.max_average_norm else norm
            self._gradient.mul_((self._rule.max_grad_norm / (left + 1e-6)).clamp(max=1.0))
        return norm

    def _refuse(self, updates: int) -> None:
        self.refused += 1
        self._in_a_row += 1
        if self._in_a_row >= PATIENCE:
            raise RunError(
                f"{PATIENCE} gradients in a row were not finite (at update {updates}). None was "
                "applied; the last checkpoint is good. Check the rewards for NaN or infinity, or lower rule.learning_rate"
            )
