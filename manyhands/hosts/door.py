"""Components of one machine that call each other directly, without their parent.

A component with a door listens on an abstract Unix socket: it has no file, no port, and is gone with the process. Only
processes of the same user are let in. Messages are packets, so that nobody who stops in the middle of one can keep the
component waiting. What is large travels through two pieces of shared memory, one for each direction: it is written once and
used where it lies.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import secrets
import select
import socket
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from manyhands.hosts.later import Later
from manyhands.hosts.process import ChildError, ChildLost, GaveUp, gave_up

INLINE = 16_000  # bytes that go with the packet itself
PACKET = 60_000
ALIGN = 64
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
NUMBER = struct.Struct("<Q")  # of a call, before its packet


class Mailbox:
    """Shared memory that one side writes and the other reads: what arrived stays valid until the next one is written."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory: mmap.mmap | None = None

    def put(self, message: Any) -> bytes:
        """The packet that announces a message."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        if not views and len(body) <= INLINE:
            return pickle.dumps((body, 0, ()))
        spans, size = [], _aligned(len(body))
        for view in views:
            spans.append((size, view.nbytes))
            size += _aligned(view.nbytes)
        memory = self._at_least(size)
        memory[: len(body)] = body
        target = memoryview(memory)
        for (start, length), view in zip(spans, views, strict=True):
            target[start : start + length] = view
        return pickle.dumps((None, len(body), tuple(spans)))

    def take(self, packet: bytes) -> Any:
        body, length, spans = pickle.loads(packet)
        if body is not None:
            return pickle.loads(body)
        end = max((start + size for start, size in spans), default=length)
        memory = memoryview(self._at_least(end))
        return pickle.loads(memory[:length], buffers=[memory[start : start + size] for start, size in spans])

    def _at_least(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            if os.fstat(self.fd).st_size < size:
                os.ftruncate(self.fd, size)
            self._memory = mmap.mmap(self.fd, os.fstat(self.fd).st_size)  # what was taken from the old one keeps it alive
        return self._memory

    def close(self) -> None:
        os.close(self.fd)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def new_name() -> str:
    return f"manyhands-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class DoorAddress:
    """Where a component is to be found, now and after it was replaced. Travels between processes."""

    name: str
    title: str  # for people

    def connect(self, timeout_s: float) -> Visitor:
        return Visitor(self, timeout_s)


class Visitor:
    """The caller's end of a connection to a component with a door."""

    def __init__(self, address: DoorAddress, timeout_s: float) -> None:
        self.name = address.title
        self._socket = _dial(address, timeout_s)
        self._up, self._down = (Mailbox(os.memfd_create("manyhands")) for _ in range(2))
        socket.send_fds(self._socket, [b"hello"], [self._up.fd, self._down.fd])
        self._open: dict[int, VisitorFuture] = {}
        self._number = 0
        self._failure: ChildLost | None = None

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> VisitorFuture:
        """One at a time: the mailbox has room for one message in each direction."""
        for other in list(self._open.values()):
            with contextlib.suppress(ChildError, ChildLost):
                other.result()
        self._number += 1
        future = VisitorFuture(self, time.monotonic() + timeout_s)
        if self._failure is not None:
            future.settle(None, self._failure)
            return future
        self._open[self._number] = future
        try:
            self._socket.send(NUMBER.pack(self._number) + self._up.put((method, arguments)))
        except OSError:
            self._fail("hung up")
        return future

    def receive(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        while not poll.poll(min(max(deadline - time.monotonic(), 0.0), 0.5) * 1000):
            if gave_up():
                raise GaveUp
            if time.monotonic() >= deadline:
                self._fail("gave no answer in time")
                return
        try:
            packet = self._socket.recv(PACKET)
        except OSError:
            packet = b""
        if not packet:
            self._fail("hung up")
            return
        number, body = _numbered(packet)
        answered, value = self._down.take(body)
        future = self._open.pop(number)
        future.settle(value if answered else None, None if answered else ChildError(value))

    def _fail(self, reason: str) -> None:
        self._failure = ChildLost(f"{self.name} {reason}")
        for future in self._open.values():
            future.settle(None, self._failure)
        self._open.clear()

    def close(self) -> None:
        self._fail("was left")
        self._socket.close()
        self._up.close()
        self._down.close()


class VisitorFuture:
    def __init__(self, visitor: Visitor, deadline: float) -> None:
        self._visitor, self._deadline = visitor, deadline
        self._outcome: tuple[Any, Exception | None] | None = None

    def settle(self, value: Any, error: Exception | None) -> None:
        self._outcome = (value, error)

    def done(self) -> bool:
        return self._outcome is not None

    def result(self) -> Any:
        while self._outcome is None:
            self._visitor.receive(self._deadline)
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def _dial(address: DoorAddress, timeout_s: float) -> socket.socket:
    """The component may just be being replaced: try until the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.connect("\0" + address.name)
            if _user_of(line) != os.geteuid():  # somebody else took the name
                raise OSError(errno.EACCES, "another user listens there")
            return line
        except OSError as error:
            line.close()
            if gave_up():
                raise GaveUp from None
            if time.monotonic() >= deadline:
                raise ChildLost(f"{address.title} could not be reached for {timeout_s:g} s ({error.strerror})") from None
        time.sleep(0.02)


def _user_of(line: socket.socket) -> int:
    """Who is at the other end."""
    return CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]


def _numbered(packet: bytes) -> tuple[int, bytes]:
    return NUMBER.unpack_from(packet)[0], packet[NUMBER.size :]


class Door:
    """The component's end: whoever calls is served in turn; what a method raises is the caller's trouble, not ours."""

    def __init__(self, name: str, title: str) -> None:
        self.address = DoorAddress(name, title)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + 10.0
        while True:
            try:
                self._listener.bind("\0" + name)
                break
            except OSError as error:  # the one before us is still going
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        self._listener.listen(128)
        self._guests: dict[int, Guest] = {}

    def files(self) -> list[int]:
        """What to wait for."""
        return [self._listener.fileno(), *self._guests]

    def serve(self, fd: int, component: Any) -> None:
        if fd == self._listener.fileno():
            self._let_in()
        elif fd in self._guests and not self._guests[fd].serve(component):
            self._guests.pop(fd).close()

    def _let_in(self) -> None:
        line, _ = self._listener.accept()
        if _user_of(line) == os.geteuid():
            self._guests[line.fileno()] = Guest(line)
        else:
            line.close()

    def close(self) -> None:
        self._listener.close()
        for guest in self._guests.values():
            guest.close()


class Guest:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        line.setblocking(False)
        self._boxes: list[Mailbox] = []

    def serve(self, component: Any) -> bool:
        """One packet. False: there will be no more."""
        try:
            if not self._boxes:
                packet, fds, _, _ = socket.recv_fds(self._line, 16, 2)
                self._boxes = [Mailbox(fd) for fd in fds]
                return len(fds) == 2
            packet = self._line.recv(PACKET)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not packet:
            return False
        number, body = _numbered(packet)
        try:
            method, arguments = self._boxes[0].take(body)
            result = getattr(component, method)(*arguments)
        except Exception:
            return self._answer(number, (False, traceback.format_exc()))
        if isinstance(result, Later):
            result.then(lambda value: self._answer(number, (True, value)))
            return True
        return self._answer(number, (True, result))

    def _answer(self, number: int, message: tuple[bool, Any]) -> bool:
        try:
            self._line.send(NUMBER.pack(number) + self._boxes[1].put(message))
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._line.close()
        for box in self._boxes:
            box.close()


def wait_for(fds: list[int], act: Callable[[int], None]) -> None:
    """Serves every descriptor that has something, once."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll():
        act(fd)
