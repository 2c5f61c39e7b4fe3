"""The acting policy: an algorithm and parameters that change at fixed points only.

On a GPU it owns a copy of the flat vector, so that acting and updating may overlap on two streams. On a CPU they take
turns, and it shares the learner's vector: a copy would cost memory traffic and change nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands.nets.flat import Model
from manyhands.types import Algorithm


class Actor:
    """With `keep`, what the convolutions made of each slot is kept: whoever learns from these slots once, before the
    parameters change, need not compute it again."""

    def __init__(self, algorithm: Algorithm, learner_model: Model, keep: bool = False) -> None:
        self._algorithm = algorithm
        self._source = learner_model.parameters
        self._model = learner_model.replica() if learner_model.parameters.is_cuda else learner_model
        self._keep = keep and self._model is learner_model
        self._kept: list[list[Tensor]] = []
        self.version = 0

    def refresh(self, version: int) -> None:
        if self._model.parameters is not self._source:
            self._model.parameters.copy_(self._source)
        self.version = version

    @torch.inference_mode()
    def act(self, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        net: Any = self._model.net
        if self._keep:
            self._kept.append([])
            net = partial(net, results=self._kept[-1])
        return self._algorithm.act(net, obs, epsilon, noise)

    def take_kept(self) -> list[Tensor]:
        """The results of each convolution for all slots since the last call, in the order of acting."""
        kept, self._kept = self._kept, []
        return [torch.cat(results) for results in zip(*kept, strict=True)]
