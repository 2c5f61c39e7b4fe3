"""CUDA graphs: a sequence of small kernels launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Captured:
    """Calls a function of tensors that stay where they are; on a GPU it is captured the first time and replayed afterwards.

    The function reads and writes the same tensors every time, waits for nothing, and returns the same tensors, which the next
    call overwrites.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        self._function = function
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self) -> Any:
        if self._device.type != "cuda":
            return self._function()
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._result

    def _capture(self) -> None:
        with torch.cuda.device(self._device):  # a learner's GPU need not be the current one
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries make their own preparations during the first calls
                for _ in range(2):
                    self._function()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=side):
                self._result = self._function()
