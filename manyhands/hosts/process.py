"""Functions and components in processes of their own: bounded waits, the child's own traceback, nothing left behind.

Child runs a function (envs.workers); ProcessHost keeps an object there whose methods are called from here. The connection
is a socket pair, the shared memory an unnamed file: both vanish with the processes, however they end.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from multiprocessing import connection as connections
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from manyhands import machine
from manyhands.types import Address, Future, RunError, UsageError


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


def gave_up() -> bool:
    return time.monotonic() >= _give_up_at


class Child:
    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        name: str,
        files: tuple[int, ...] = (),
        threads: int = 1,
        waits: bool = False,
    ) -> None:
        """waits: for its callers, most of the time; then its threads must not spin on the cores that those need."""
        self.name = name
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        # One intra-op thread for a child that simulates: torch's or numpy's threads would fight the other simulators.
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        if waits:
            environment |= machine.BRIEFLY
        self._process = subprocess.Popen(
            [sys.executable, "-m", "manyhands.hosts.child", str(theirs.fileno()), str(os.getpid()), name],
            pass_fds=(theirs.fileno(), *files),
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C, or timeout's SIGTERM, is for the parent to deal with
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

    @property
    def connection(self) -> Connection:
        return self._connection

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError:
            self._lost(self._reason())

    def recv(self, timeout_s: float) -> bytes:
        """The child's next message. It is ended if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while not self._poll.poll(min(max(deadline - time.monotonic(), 0.0), 0.5) * 1000):
            if gave_up():
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

    def hang_up(self) -> None:
        """A child that waits for us ends by itself."""
        self._connection.close()

    def close(self, deadline: float) -> None:
        """Hang up, wait until the deadline (time.monotonic), then end it. May be called twice."""
        self.hang_up()
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()


OK, ERROR, USAGE, FAILED = b"K", b"E", b"U", b"R"


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...], door: tuple[str, str] | None) -> None:
    """A component's life: made, then asked until the parent hangs up. What it raises at the parent's request ends it."""
    signal.signal(signal.SIGUSR1, lambda *_: give_up_at(time.monotonic()))  # the parent is in a hurry
    component: Any = None
    try:
        component = make(*arguments)

        def ask() -> None:
            method, given = pickle.loads(connection.recv_bytes())
            connection.send_bytes(OK + pickle.dumps(getattr(component, method)(*given), protocol=5))

        if door is None:
            while True:
                ask()
        _serve_all(connection.fileno(), ask, component, *door)
    except (EOFError, ConnectionResetError):
        pass  # the parent hung up
    except BaseException as error:
        # Told before closing: what others see of our end must not be heard first.
        kind = USAGE if isinstance(error, UsageError) else FAILED if isinstance(error, RunError) else ERROR
        connection.send_bytes(kind + (traceback.format_exc() if kind == ERROR else str(error)).encode())
    finally:
        if component is not None:
            component.close()


def _serve_all(parent: int, ask: Callable[[], None], component: Any, name: str, title: str) -> None:
    """The parent and everybody who comes to the door, in turn."""
    from manyhands.hosts.door import Door, wait_for

    door = Door(name, title)
    try:
        while True:
            wait_for([parent, *door.files()], lambda fd: ask() if fd == parent else door.serve(fd, component))
    finally:
        door.close()


class ProcessFuture:
    def __init__(self, handle: ProcessHandle, deadline: float) -> None:
        self._handle = handle
        self.deadline = deadline  # time.monotonic
        self._outcome: tuple[Any, BaseException | None] | None = None

    def done(self) -> bool:
        return self._outcome is not None

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        self._outcome = (value, error)

    def result(self) -> Any:
        while self._outcome is None:
            self._handle.receive()
        value, error = self._outcome
        if error is not None:
            raise error
        return value


class ProcessHandle:
    """Calls are answered in order. When the process fails, so does every call that is open then or made later."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.name = child.name
        self._open: deque[ProcessFuture] = deque()
        self._failure: BaseException | None = None

    def call(self, method: str, *arguments: Any, timeout_s: float = math.inf) -> Future:
        future = ProcessFuture(self, time.monotonic() + timeout_s)
        try:
            if self._failure is not None:
                raise self._failure
            self.child.send(pickle.dumps((method, arguments), protocol=5))
            self._open.append(future)
        except (ChildLost, ChildError, RunError, UsageError) as failure:
            future.settle(None, failure)
            self._fail(failure)
        return future

    def receive(self) -> None:
        """One answer, however long it takes until its deadline."""
        if not self._open:
            return
        try:
            message = self.child.recv(min(self.deadline - time.monotonic(), 1e9))
        except (ChildLost, ChildError) as failure:
            self._fail(failure)
            return
        kind, body = message[:1], message[1:]
        if kind == OK:
            self._open.popleft().settle(pickle.loads(body))
        else:
            self._fail((UsageError if kind == USAGE else RunError)(body.decode()))

    def ready(self) -> bool:
        """An answer is there, or a deadline has passed."""
        return bool(self._open) and (self.deadline <= time.monotonic() or self.child.connection.poll())

    @property
    def deadline(self) -> float:
        """The first of all open calls: one that is asked to be quick also hurries those before it."""
        return min((future.deadline for future in self._open), default=math.inf)

    def _fail(self, failure: BaseException) -> None:
        self._failure = failure
        while self._open:
            self._open.popleft().settle(None, failure)

    def hurry(self) -> None:
        """Ask for a quick end of the call under way."""
        self.child.signal(signal.SIGUSR1)

    def hang_up(self) -> None:
        self._fail(ChildLost(f"{self.name} was closed"))
        self.child.hang_up()

    def close(self, deadline: float) -> None:
        self._fail(ChildLost(f"{self.name} was closed"))
        self.child.close(deadline)


class ProcessHost:
    """Components in processes of their own on this machine."""

    ahead = 2  # one call under way, one waiting: the component never waits for us

    def __init__(self, files: tuple[int, ...] = ()) -> None:
        self._files = files  # descriptors of shared memory that every component inherits

    def start(
        self, make: Callable[..., Any], *arguments: Any, name: str, threads: int = 1, door: str | None = None
    ) -> ProcessHandle:
        """door: the name under which other components find this one, see address()."""
        entrance = None if door is None else (door, name)
        child = Child(_serve, make, arguments, entrance, name=name, files=self._files, threads=threads, waits=door is not None)
        return ProcessHandle(child)

    def address(self, door: str, title: str) -> Address:
        from manyhands.hosts.door import DoorAddress

        return DoorAddress(door, title)

    def wait(self, futures: list[Any], timeout_s: float) -> None:
        """Until one of the calls is done, or the time is over."""
        handles = list({id(f._handle): f._handle for f in futures if not f.done()}.values())
        if len(handles) < len({id(f._handle) for f in futures}) or not handles:
            return
        until = min(handle.deadline for handle in handles)
        connections.wait([h.child.connection for h in handles], max(min(timeout_s, until - time.monotonic()), 0.0))
        for handle in handles:
            if handle.ready():
                handle.receive()

    def close(self) -> None:
        """Components are closed one by one."""


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
