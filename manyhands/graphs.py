"""CUDA graphs: a sequence of small kernels launched as one."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """What is launched inside goes to that stream. (torch.cuda.stream(None) would wake CUDA up also where nobody uses it.)"""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@functools.cache
def _side_stream(device: int, priority: int) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for each stream they have seen. Kernels keep its priority."""
    return torch.cuda.Stream(device, priority)


class Captured:
    """Calls a function of tensors that stay where they are; on a GPU it is captured the first time and replayed afterwards.

    The function reads and writes the same tensors every time, waits for nothing, and returns the same tensors, which the next
    call overwrites. It is called some times before it is captured; `changes` are tensors on which that may leave no trace.
    """

    def __init__(
        self, function: Callable[[], Any], device: torch.device, capture: bool = True, changes: Sequence[torch.Tensor] = ()
    ) -> None:
        self._function = function
        self._changes = changes
        self._device = device
        self._eager = device.type != "cuda" or not capture
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    def __call__(self) -> Any:
        if self._eager:
            return self._function()
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        if self._device.index in (None, torch.cuda.current_device()):  # entering it costs as much as the launch
            self._graph.replay()
        else:
            with torch.cuda.device(self._device):
                self._graph.replay()
        return self._result

    def _capture(self) -> None:
        with torch.cuda.device(self._device):  # a learner's GPU need not be the current one
            side = _side_stream(torch.cuda.current_device(), torch.cuda.current_stream().priority)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries make their own preparations during the first calls
                before = [x.clone() for x in self._changes]
                for _ in range(2):
                    self._function()
                for x, old in zip(self._changes, before, strict=True):
                    x.copy_(old)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads, such as a watchdog of the communication, may go on with what they do.
            with no_collection(), torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                self._result = self._function()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """An older graph that is found to be garbage and destroyed while another is captured would end the process."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
