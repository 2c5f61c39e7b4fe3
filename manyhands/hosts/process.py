"""A function in a process of its own: bounded waits, the child's own traceback, nothing left behind.

Called by envs.workers. The connection is a socket pair, the shared memory an unnamed file: both vanish with the
processes, however they end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np


class ChildError(Exception):
    """The child raised; the message is its traceback."""


class ChildLost(Exception):
    """The child was killed or missed its deadline; it does not run any more."""


class GaveUp(Exception):
    """Waiting was called off: see give_up_at."""


_give_up_at = float("inf")


def give_up_at(moment: float) -> None:
    """From this moment on (time.monotonic) no child is waited for any more; a stop in a hurry sets it."""
    global _give_up_at
    _give_up_at = moment


class Child:
    def __init__(self, function: Callable[..., None], *arguments: Any, name: str, files: tuple[int, ...] = ()) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        # One intra-op thread: a child simulates, and torch's or numpy's threads would fight the other simulators.
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.hosts.child", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(), *files),
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the first recv tells the reason
            self._connection.send_bytes(cloudpickle.dumps((function, arguments)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError:
            self._lost(self._reason())

    def recv(self, timeout_s: float) -> bytes:
        """The child's next message. It is ended if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while not self._poll.poll(min(max(deadline - time.monotonic(), 0.0), 0.5) * 1000):
            if time.monotonic() >= _give_up_at:
                raise GaveUp
            if time.monotonic() >= deadline:
                self.kill()
                self._lost(f"gave no answer for {timeout_s:g} s and was ended")
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._lost(self._reason())
        if message[:1] == b"E":
            self.kill()
            raise ChildError(message[1:].decode())
        return message

    def _reason(self) -> str:
        try:
            code = self._process.wait(2)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _lost(self, reason: str) -> None:
        raise ChildLost(f"{self.name} (process {self.pid}) {reason}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def close(self, deadline: float) -> None:
        """Hang up, wait until the deadline (time.monotonic), then end it. May be called twice."""
        self._connection.close()
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()


class SharedBlock:
    """Memory without a name, reached through a file descriptor that children inherit."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("manyhands")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def shared_arrays(fd: int, layout: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, np.ndarray]:
    """Arrays by name (shape, dtype) in the block behind fd, each beginning on a cache line of its own."""
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        size += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    return {name: np.ndarray(shape, dtype, buffer=memory, offset=offsets[name]) for name, (shape, dtype) in layout.items()}
