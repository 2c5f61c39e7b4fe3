"""From a batch to the flat gradient: kernel by kernel, or on a GPU as one captured launch."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands.graphs import Captured
from manyhands.nets.flat import Model
from manyhands.types import Algorithm, Loss


class Gradient:
    """The model's gradient becomes that of the loss. `target`: something whose `net` is bootstrapped from."""

    def __init__(self, algorithm: Algorithm, model: Model, target: Any) -> None:
        self._algorithm, self._model, self._target = algorithm, model, target

    def __call__(self, batch: Any, progress: float | Tensor, known: list[Tensor]) -> Loss:
        """known: what the torso's layers gave when this batch was acted on, or nothing."""
        net: Any = self._model.net
        if known:
            net = partial(net, known=known)  # acting has done these layers: a tenth of A2C's time on a CPU
        target = self._target.net if self._target else None
        with self._model.new_gradient():
            loss = self._algorithm.loss(net, target, batch, progress)
            loss.value.backward()
        return loss


class CapturedGradient(Gradient):
    """Batches are copied to where the graph reads them, unless they are there; what it returns is overwritten by the next
    call."""

    def __init__(self, algorithm: Algorithm, model: Model, target: Any) -> None:
        super().__init__(algorithm, model, target)
        self._progress = torch.zeros((), device=model.parameters.device)
        self._graphs: dict[int, tuple[Any, Captured]] = {}  # minibatches may differ by a sample
        self._seen: dict[int, Any] = {}  # the first batch of each size, until there is a graph for it

    def __call__(self, batch: Any, progress: float | Tensor, known: list[Tensor]) -> Loss:
        n = len(batch.weight)
        if n not in self._seen:  # a size that may never come again
            self._seen[n] = batch
            return super().__call__(batch, progress, known)
        if n not in self._graphs:
            # A memory that hands out the same object again, as a captured draw does, has new contents in the same tensors.
            self._graphs[n] = self._prepared(batch, stays=self._seen[n] is batch)
            self._seen[n] = None
        static, graph = self._graphs[n]
        if batch is not static:
            for f in fields(batch):
                if f.name != "keys":  # for the replay only
                    getattr(static, f.name).copy_(getattr(batch, f.name), non_blocking=True)
        self._progress.fill_(progress)
        return graph()

    def _prepared(self, batch: Any, stays: bool) -> tuple[Any, Captured]:
        device = self._model.parameters.device
        static = batch
        if not stays:
            static = replace(batch, **{f.name: torch.empty_like(getattr(batch, f.name), device=device) for f in fields(batch)})

        def compute() -> Loss:
            loss = super(CapturedGradient, self).__call__(static, self._progress, [])
            return replace(loss, value=loss.value.detach())  # the way back to the parameters is walked

        return static, Captured(compute, device)
