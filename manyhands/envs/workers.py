"""An EnvGroup spread over processes: observations through shared memory, a deadline per step, lost workers replaced."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from manyhands.hosts.process import Child, ChildError, ChildLost, SharedBlock, shared_arrays
from manyhands.types import EnvGroup, EnvSpec, RunError, Step, UsageError

BUILD_TIMEOUT_S = 300.0  # imports, ROMs, 0.1 s per Atari environment
OK = b"K"
_FLAGS = ("terminated", "truncated", "life_lost", "first")


def _layout(spec: EnvSpec, num_envs: int) -> dict[str, tuple[tuple[int, ...], str]]:
    flags = dict.fromkeys(_FLAGS, ((num_envs,), "bool"))
    return {
        "obs": ((num_envs, *spec.frame), spec.dtype),
        "reward": ((num_envs,), "float32"),
        "action": ((num_envs,), "int64"),
        **flags,
    }


def _serve(connection: Connection, make: Callable[[int], EnvGroup], fd: int, low: int, high: int, total: int) -> None:
    """A worker's life: build its part of the group, then answer until the parent hangs up."""
    try:
        group = make(high - low)
    except UsageError as error:
        connection.send_bytes(b"U" + str(error).encode())
        return
    connection.send_bytes(OK + pickle.dumps(group.spec))
    memory: dict[str, np.ndarray] = {}

    def publish(step: Step) -> bytes:
        for name in ("obs", "reward", *_FLAGS):
            memory[name][low:high] = getattr(step, name)
        return OK

    try:
        while True:
            message = connection.recv_bytes()
            command, payload = message[:1], message[1:]
            reply = OK
            if command == b"s":
                group.send(memory["action"][low:high].copy())
                reply = publish(group.recv())
            elif command == b"m":
                memory.update(shared_arrays(fd, _layout(group.spec, total)))
            elif command == b"r":
                reply = publish(group.reset(pickle.loads(payload)))
            elif command == b"w":
                reply = publish(group.restart(pickle.loads(payload)))
            elif command == b"v":
                reply = OK + pickle.dumps(group.screen(pickle.loads(payload)))
            elif command == b"g":
                reply = OK + pickle.dumps(group.state())
            elif command == b"l":
                group.load(pickle.loads(payload))
            connection.send_bytes(reply)
    finally:
        group.close()


class WorkerGroup:
    """Invariant: between calls no worker owes an answer, except after send, when every one owes exactly one."""

    def __init__(
        self,
        make: Callable[[int], EnvGroup],
        num_envs: int,
        workers: int,
        step_timeout_s: float,
        restarts: int,
        name: str,
    ) -> None:
        self.num_envs = num_envs
        self._make = make
        self._name = name
        self._timeout_s = step_timeout_s
        self._restarts_left = restarts
        self.replaced = 0
        self._block = SharedBlock()
        bounds = np.linspace(0, num_envs, min(workers, num_envs) + 1).round().astype(int).tolist()
        self._parts = list(itertools.pairwise(bounds))
        self._seeds = [0] * num_envs
        self._asked_at = 0.0
        self._restart_next: set[int] = set()  # parts replaced between steps: their next slot is a reset
        self._children: list[Child] = []
        try:
            self._children = [self._start(i) for i in range(len(self._parts))]
        except BaseException:
            self.close()
            raise

    @functools.cached_property
    def spec(self) -> EnvSpec:
        """Waits until everything is built: several groups are, at the same time, until somebody asks."""
        try:
            specs = [self._ready(i) for i in range(len(self._parts))]
            return specs[0]
        except BaseException:
            self.close()
            raise

    @functools.cached_property
    def _memory(self) -> dict[str, np.ndarray]:
        memory = shared_arrays(self._block.fd, _layout(self.spec, self.num_envs))
        self._ask_all(b"m")
        return memory

    @property
    def pipe(self) -> Connection:
        """Of a group with one worker: something to read there means that it has finished."""
        return self._children[0].connection

    def _start(self, part: int) -> Child:
        low, high = self._parts[part]
        return Child(
            _serve, self._make, self._block.fd, low, high, self.num_envs,
            name=f"simulators {low}..{high - 1} of {self._name}", files=(self._block.fd,),
        )  # fmt: skip

    def _ready(self, part: int) -> EnvSpec:
        message = self._receive(part, BUILD_TIMEOUT_S, replace=False)
        if message[:1] == b"U":
            raise UsageError(message[1:].decode())
        return pickle.loads(message[1:])

    def reset(self, seeds: list[int]) -> Step:
        self._seeds = list(seeds)
        return self._ask_each(b"r", lambda low, high: pickle.dumps(seeds[low:high]))

    def restart(self, which: Any) -> Step:
        which = np.asarray(which, bool)
        return self._ask_each(b"w", lambda low, high: pickle.dumps(which[low:high]))

    def send(self, actions: Any) -> None:
        self._memory["action"][:] = actions
        self._asked_at = time.monotonic()
        for i, (low, high) in enumerate(self._parts):
            restart = i in self._restart_next
            self._post(i, b"w" + pickle.dumps(np.ones(high - low, bool)) if restart else b"s")
        self._restart_next.clear()

    def recv(self) -> Step:
        for i in range(len(self._children)):
            self._receive(i, max(self._timeout_s - (time.monotonic() - self._asked_at), 0.0))
        return self._step()

    def _step(self) -> Step:
        m = self._memory
        return Step(m["obs"], m["reward"], m["terminated"], m["truncated"], m["life_lost"], m["first"])

    def _ask_each(self, command: bytes, payload: Callable[[int, int], bytes]) -> Step:
        assert self._memory  # everybody has it
        for i, (low, high) in enumerate(self._parts):
            self._post(i, command + payload(low, high))
        for i in range(len(self._children)):
            self._receive(i, BUILD_TIMEOUT_S)
        return self._step()

    def _ask_all(self, message: bytes) -> list[Any]:
        for i in range(len(self._children)):
            self._post(i, message)
        replies = [self._receive(i, BUILD_TIMEOUT_S, replace=False)[1:] for i in range(len(self._children))]
        return [pickle.loads(reply) if reply else None for reply in replies]

    def _post(self, part: int, message: bytes) -> None:
        with contextlib.suppress(ChildLost):  # receiving will notice, and replace it
            self._children[part].send(message)

    def _receive(self, part: int, timeout_s: float, replace: bool = True) -> bytes:
        try:
            return self._children[part].recv(timeout_s)
        except ChildError as error:
            raise RunError(f"a simulator failed; its own traceback:\n{error}") from None
        except ChildLost as lost:
            low, high = self._parts[part]
            reason = f"{lost} (seeds {self._seeds[low:high]})"
            if not replace or self._restarts_left == 0:
                raise RunError(reason) from None
            self._restarts_left -= 1
            print(f"warning: {reason}; replaced, {self._restarts_left} more times allowed", file=sys.stderr)
            self._replace(part)
            return OK

    def _replace(self, part: int) -> None:
        """A new worker in the place of a lost one. Its simulators answer with a reset, so nothing spans the loss."""
        low, high = self._parts[part]
        self.replaced += 1
        # Other seeds: the old ones may lead to the same trap.
        self._seeds[low:high] = [(seed + 7919 * self.replaced) % (2**31 - 1) for seed in self._seeds[low:high]]
        self._children[part] = self._start(part)
        self._ready(part)
        for message in (b"m", b"r" + pickle.dumps(self._seeds[low:high])):
            self._post(part, message)
            self._receive(part, BUILD_TIMEOUT_S, replace=False)

    def screen(self, index: int) -> np.ndarray:
        for i, (low, high) in enumerate(self._parts):
            if low <= index < high:
                self._children[i].send(b"v" + pickle.dumps(index - low))
                return pickle.loads(self._receive(i, BUILD_TIMEOUT_S, replace=False)[1:])
        raise IndexError(index)

    def state(self) -> dict | None:
        """In the format of one group of all environments: another number of workers can load it."""
        replaced = self.replaced
        for i in range(len(self._children)):
            self._post(i, b"g")
        states: list[Any] = []
        for i in range(len(self._children)):
            reply = self._receive(i, BUILD_TIMEOUT_S)[1:]
            states.append(pickle.loads(reply) if reply else None)
            if self.replaced > replaced:
                self._restart_next.add(i)
                replaced = self.replaced
        if any(state is None for state in states):
            return None
        envs = [state["envs"][str(i)] for state in states for i in range(len(state["seeds"]))]
        return {
            "envs": {str(i): env for i, env in enumerate(envs)},
            "obs": np.concatenate([state["obs"] for state in states]),
            "ended": np.concatenate([state["ended"] for state in states]),
            "seeds": list(self._seeds),
        }

    def load(self, state: dict) -> None:
        assert self._memory
        self._seeds = list(state["seeds"])
        for i, (low, high) in enumerate(self._parts):
            part = {
                "envs": {str(k - low): state["envs"][str(k)] for k in range(low, high)},
                "obs": state["obs"][low:high],
                "ended": state["ended"][low:high],
                "seeds": self._seeds[low:high],
            }
            self._post(i, b"l" + pickle.dumps(part))
            self._receive(i, BUILD_TIMEOUT_S, replace=False)

    def close(self) -> None:
        deadline = time.monotonic() + 2.0
        for child in self._children:
            child.close(deadline)
        self._children = []
        self._block.close()
