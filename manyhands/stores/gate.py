"""What every store asks of a gradient before it is applied: that it is finite, and no longer than the rule allows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from manyhands.nets.flat import Model
from manyhands.stores.rules import Rule
from manyhands.types import RunError

PATIENCE = 10  # refused gradients in a row before the run is called broken


def length(vector: Tensor) -> Tensor:
    """On a CPU torch's own norm takes twice as long as a product."""
    return torch.linalg.vector_norm(vector) if vector.is_cuda else torch.dot(vector, vector).sqrt()


class Gate:
    def __init__(self, model: Model, rule: Rule) -> None:
        self._gradient = model.gradient
        self._rule = rule
        self._tensors = [model.gradient[piece] for piece in model.named_slices().values()]
        # Gradients that were not finite, so far and in a row: there for graphs, which also tell here, without anybody waiting.
        self.counts = torch.zeros(2, dtype=torch.int64, device=model.gradient.device)
        self._told = torch.zeros(2, dtype=torch.int64, pin_memory=model.gradient.is_cuda)

    @property
    def refused(self) -> int:
        return int(self._told[0])

    def admit(self, updates: int) -> Tensor | None:
        """The gradient's norm before it was clipped, or None: it must not be applied."""
        norm = length(self._gradient)
        finite = bool(norm.isfinite())
        if not finite:
            self._told += 1
        elif self._told[1]:
            self._told[1] = 0
        self.check(updates)
        if finite:
            self._clip(norm)
        return norm if finite else None

    def judge(self) -> tuple[Tensor, Tensor]:
        """The same without waiting for the device: the norm, and whether the gradient may be applied. check() has to follow
        now and then; after the device was waited for, `passed` says it too."""
        norm = length(self._gradient)
        finite = norm < math.inf  # nor is it NaN: one kernel instead of four
        failed = ~finite
        self.counts += failed
        self.counts[1].mul_(failed)
        self._told.copy_(self.counts, non_blocking=True)
        self._clip(norm)
        return norm, finite

    @property
    def passed(self) -> bool:
        return not self._told[1]

    def check(self, updates: int) -> None:
        if self._told[1] >= PATIENCE:
            raise RunError(
                f"{PATIENCE} gradients in a row were not finite (at update {updates}). None was "
                "applied; the last checkpoint is good. Check the rewards for NaN or infinity, or lower rule.learning_rate"
            )

    def _clip(self, norm: Tensor) -> None:
        if self._rule.max_average_norm:
            for tensor in self._tensors:
                average = length(tensor) / tensor.numel()
                tensor.mul_((self._rule.max_average_norm / (average + 1e-12)).clamp(max=1.0))
        if self._rule.max_grad_norm:
            left = length(self._gradient) if self._rule.max_average_norm else norm
            self._gradient.mul_((self._rule.max_grad_norm / (left + 1e-6)).clamp(max=1.0))
