"""The acting policy: an algorithm and parameters that change at fixed points only.

On a GPU it owns a copy of the flat vector, so that acting and updating may overlap on two streams. On a CPU they take
turns, and it shares the learner's vector: a copy would cost memory traffic and change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.nets.flat import Model
from manyhands.types import Algorithm


class Actor:
    def __init__(self, algorithm: Algorithm, learner_model: Model) -> None:
        self._algorithm = algorithm
        self._source = learner_model.parameters
        self._model = learner_model.replica() if learner_model.parameters.is_cuda else learner_model
        self.version = 0

    def refresh(self, version: int) -> None:
        if self._model.parameters is not self._source:
            self._model.parameters.copy_(self._source)
        self.version = version

    @torch.inference_mode()
    def act(self, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._algorithm.act(self._model.net, obs, epsilon, noise)
