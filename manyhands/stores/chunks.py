"""What asynchronous learners of one machine share: parameters and the rule's memory, split into chunks, and locks for these.

A chunk has two places; the new one becomes valid by one counter after it is complete, so neither a reader nor a learner's death
in between ever leaves half a chunk. Locks are byte-range locks of an unnamed file: the kernel frees those of the dead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.hosts.process import shared_arrays
from manyhands.stores.rules import Adam, Rule
from manyhands.types import RunError, UsageError

LINE = 16  # numbers in a cache line
LOCK_TIMEOUT_S = 60.0  # somebody hangs while holding a lock
STOPPED_S = 5  # somebody was stopped (SIGSTOP) while holding one: others end it after so long


@dataclass(frozen=True)
class SharedConfig:
    """Asynchronous learners around one copy of the parameters in shared memory."""

    lock: bool = True
    """false: lock-free updates in place, as in A3C."""
    chunks: int = 1
    """Parts with a lock each: learners work on different ones at the same time."""
    sync_updates: int = 1
    """Local updates between two synchronisations; above 1 needs adam (multi-step asynchronous Adam)."""
    restarts: int = 3
    """How many lost learners are replaced; after that the others go on without them."""

    def __post_init__(self) -> None:
        if self.chunks < 1 or self.sync_updates < 1 or self.restarts < 0:
            raise UsageError("store.chunks and store.sync_updates must be at least 1, store.restarts not negative")
        if not self.lock and (self.chunks > 1 or self.sync_updates > 1):
            raise UsageError(
                "store.lock = false needs store.chunks = 1 and store.sync_updates = 1: without locks they mean nothing"
            )

    def check(self, rule: Rule) -> None:
        if self.sync_updates > 1 and not isinstance(rule, Adam):
            raise UsageError(f"store.sync_updates = {self.sync_updates} is multi-step asynchronous Adam: set rule.name = 'adam'")

    def pieces(self, size: int) -> list[slice]:
        """Chunks of so many parameters. Whole cache lines: no two chunks share one, and vectorised rules compute the same
        whatever the number of chunks."""
        most = max(size // LINE, 1)
        if self.chunks > most:
            raise UsageError(f"store.chunks = {self.chunks} is too many for {size} parameters: at most {most}")
        edges = [*(np.linspace(0, size, self.chunks + 1)[:-1] / LINE).round().astype(int) * LINE, size]
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(edges)]


class ByteLocks:
    """Locks by number on a file that all learners have inherited; a process that dies lets go. One that is stopped while it holds
    a lock is ended by whoever waits for it; its parent is not, for which they wait."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seconds = 0.0  # spent waiting

    @contextlib.contextmanager
    def hold(self, number: int) -> Iterator[None]:
        begin = looked = time.perf_counter()
        stopped = waited = 0  # seconds in which we looked: time in which we were stopped ourselves does not count
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            if time.perf_counter() - looked > 1.0:
                looked = time.perf_counter()
                owner = self._owner(number)
                stopped = stopped + 1 if is_stopped(owner) else 0
                waited = 0 if stopped and owner == os.getppid() else waited + 1
                if stopped >= STOPPED_S and owner != os.getppid():
                    print(f"warning: process {owner} was stopped while it held a lock of the store: it is ended", file=sys.stderr)
                    os.kill(owner, signal.SIGKILL)
                if waited >= LOCK_TIMEOUT_S:
                    raise RunError(f"lock {number} of the shared store was held for {waited} s by process {owner}")
            time.sleep(2e-5)
        self.seconds += time.perf_counter() - begin
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, number)

    def _owner(self, number: int) -> int:
        question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        return struct.unpack("hhqqi4x", fcntl.fcntl(self._fd, fcntl.F_GETLK, question))[4]


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


class SharedMemoryOf:
    """The block that learners and their parent map: everything a chunk consists of, twice with locks, and the counters."""

    def __init__(self, fd: int, size: int, rule: Rule, config: SharedConfig) -> None:
        places = 2 if config.lock else 1
        memory = rule.initial_state(torch.zeros(1))
        self.vectors = ["parameters", *(name for name, x in memory.items() if x.dim())]
        self.scalars = [name for name, x in memory.items() if not x.dim()]
        layout: dict[str, tuple[tuple[int, ...], str]] = {
            **dict.fromkeys(self.vectors, ((places, size), "float32")),
            **dict.fromkeys(self.scalars, ((places, config.chunks), "float32")),
            "updates": ((places, config.chunks), "int64"),
            "flips": ((config.chunks,), "int64"),  # which place is valid
            "steps": ((1,), "int64"),
        }
        arrays = shared_arrays(fd, layout)
        self.updates, self.flips, self.steps = arrays["updates"], arrays["flips"], arrays["steps"]
        self._tensors = {name: torch.from_numpy(arrays[name]) for name in (*self.vectors, *self.scalars)}
        self.pieces = config.pieces(size)
        self._places = places
        self._begins_at = arrays["parameters"].ctypes.data
        self._bytes = os.fstat(fd).st_size
        self._unlock: Callable[[], Any] = lambda: None

    def page_lock(self) -> bool:
        """So that a GPU reads and writes it by itself, several times as fast. Where the system allows no more of it, without."""
        cuda = torch.cuda.cudart()
        if int(cuda.cudaHostRegister(self._begins_at, self._bytes, 0)) == 0:
            # Before the memory goes, also where nobody closes: a GPU would go on with the old pages of whatever lies there next.
            self._unlock = weakref.finalize(self, cuda.cudaHostUnregister, self._begins_at)
            return True
        with contextlib.suppress(RuntimeError):  # the next launch is told of the error, whatever it is
            torch.zeros((), device="cuda")
        return False

    def close(self) -> None:
        self._unlock()

    def chunk(self, number: int, ahead: int = 0) -> dict[str, Tensor]:
        """Views of a chunk's tensors in the valid place, or (ahead = 1) in the one to be written."""
        place = self.place(number, ahead)
        vectors = {name: self._tensors[name][place, self.pieces[number]] for name in self.vectors}
        return {**vectors, **{name: self._tensors[name][place, number] for name in self.scalars}}

    def place(self, number: int, ahead: int = 0) -> int:
        return int(self.flips[number] + ahead) % self._places
