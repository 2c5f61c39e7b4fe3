"""The acting policy: an algorithm and its own copy of the parameters, refreshed at fixed points."""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.nets.flat import Model
from manyhands.types import Algorithm


class Actor:
    def __init__(self, algorithm: Algorithm, learner_model: Model) -> None:
        self._algorithm = algorithm
        self._source = learner_model.parameters
        self._model = learner_model.replica()
        self.version = 0

    def refresh(self, version: int) -> None:
        self._model.parameters.copy_(self._source)
        self.version = version

    @torch.inference_mode()
    def act(self, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self._algorithm.act(self._model.net, obs, epsilon, noise)
