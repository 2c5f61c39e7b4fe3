"""The acting policy: an algorithm and parameters that change at fixed points only.

On a GPU it owns a copy of the flat vector, so that acting and updating may overlap on two streams: where the learner may be
behind, acting has one of its own and never waits for updates that were launched before it. On a CPU it shares the learner's
vector unless updates fall between the slots of a rollout: a copy would cost memory traffic and change nothing.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from manyhands.nets.flat import Model
from manyhands.types import Algorithm, Rollout, Step, UsageError

TAKEN = frozenset(f.name for cls in (Rollout, Step) for f in fields(cls)) | {"answers", "reset"}  # in what samplers write down


class Actor:
    """With `keep`, what the torso's layers made of each slot is kept: whoever learns from these slots once, before the
    parameters change, need not compute it again. With `copy` it has parameters of its own.

    With `aside` it acts on a stream of its own, which overtakes the learner's. With `behind` as well, a rollout is acted with
    the parameters that were there when the rollout before it began: then it does not even wait for the updates between them,
    and nobody launches more than a rollout's updates ahead of the GPU.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        learner_model: Model,
        keep: bool = False,
        copy: bool = False,
        aside: bool = False,
        behind: bool = False,
    ) -> None:
        self._algorithm = algorithm
        self._source = learner_model.parameters
        self._model = learner_model.replica() if copy else learner_model
        self._keep = keep and self._model is learner_model
        self._kept: list[list[Tensor]] = []
        self.version = 0
        self.stream = torch.cuda.Stream(self._source.device, priority=-1) if aside else None
        self._next = self._source.clone() if behind else None  # what the next rollout is acted with
        self._next_version: int | None = None
        self._copied = torch.cuda.Event() if behind else None

    def refresh(self, version: int) -> None:
        """Between two rollouts, when everything that reads the last one has been launched."""
        if self._next is not None:
            version = self._refresh_behind(version)
        elif self._model.parameters is not self._source:
            self._model.parameters.copy_(self._source)
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream())
        self.version = version

    def _refresh_behind(self, version: int) -> int:
        assert self._next is not None and self._copied is not None and self.stream is not None
        here = torch.cuda.current_stream()
        if self._next_version is None:  # nothing was copied yet
            self._next_version = version
            self._next.copy_(self._source)
            self._copied.record()
        # Also: the rollout before the last has been read, and its memory may be filled again.
        self.stream.wait_event(self._copied)
        with torch.cuda.stream(self.stream):
            self._model.parameters.copy_(self._next)
        here.wait_stream(self.stream)
        self._next.copy_(self._source)
        self._copied.record()
        acting, self._next_version = self._next_version, version
        return acting

    @torch.inference_mode()
    def act(self, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        net: Any = self._model.net
        if self._keep:
            self._kept.append([])
            net = partial(net, results=self._kept[-1])
        action, extras = self._algorithm.act(net, obs, epsilon, noise)
        if not TAKEN.isdisjoint(extras):
            names = ", ".join(sorted(TAKEN & extras.keys()))
            raise UsageError(f"act() of {type(self._algorithm).__name__} gives {names} beside the action: choose other names")
        return action, extras

    def take_kept(self) -> list[Tensor]:
        """The results of each layer for all slots since the last call, in the order of acting."""
        kept, self._kept = self._kept, []
        return [torch.cat(results) for results in zip(*kept, strict=True)]

    def forget_kept(self) -> None:
        self._kept = []

    def state(self) -> dict:
        return {} if self._next is None else {"parameters": self._model.parameters, "version": self.version}

    def load(self, state: dict) -> None:
        """The parameters that the next rollout is acted with, where they are not the newest."""
        if state and self._next is not None and self._copied is not None:
            self._next.copy_(state["parameters"])
            self._model.parameters.copy_(state["parameters"])
            self.version = self._next_version = state["version"]
            self._copied.record()
