"""Components on the machines of a Ray cluster, behind the same words as processes of this one.

A component is a Ray actor with a queue for calls and a second one for signals. It is found by its name, also after it was
replaced. Ray restarts nothing by itself: whoever started a component knows what its successor needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

os.environ.setdefault("RAY_DEDUP_LOGS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
    from ray._private import ray_constants
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    from manyhands.types import UsageError

    raise UsageError("topology.host = 'ray' needs Ray: pip install 'manyhands[cluster]'") from None

from manyhands import machine
from manyhands.hosts.door import Door, DoorAddress
from manyhands.hosts.later import Later
from manyhands.hosts.process import ChildError, ChildLost, GaveUp, gave_up, give_up_at
from manyhands.types import Caller, RunError, UsageError

OBJECT_STORE_BYTES = 512 * 2**20  # of a private cluster: parameters and batches in flight
ASKED_AT_ONCE = 64  # callers of one component that may wait for their answers
MOST_PER_CORE = 8  # learners and actors, on a private cluster
SUSPECT_S = 30.0  # how long a machine on which something was lost gets nothing new, if there are others
NAME_TAKEN_S = 60.0  # how long a lost machine may take to be noticed


class Component:
    """In the actor: calls are done one at a time, in order."""

    def __init__(self) -> None:
        self._component: Any = None
        self._failure: Exception | None = None

    def make(self, make: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._component = make(*arguments)
        except Exception as error:
            self._failure = _portable(error)

    def call(self, method: str, *arguments: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        try:
            return getattr(self._component, method)(*arguments)
        except Exception as error:
            raise _portable(error) from None

    @ray.method(concurrency_group="signals")
    def hurry(self) -> None:
        give_up_at(time.monotonic())

    @ray.method(concurrency_group="signals")
    def where(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group="signals")
    def machine(self) -> str:
        return _machine()

    @ray.method(concurrency_group="signals")
    def close(self) -> None:
        if self._component is not None:
            self._component.close()


class OpenComponent(Component):
    """One that others call too. An answer that comes later lets the next call in; all of them are done in the same thread,
    so that torch keeps its own threads. Who is on the same machine comes through a door, which is twice as fast as Ray."""

    def __init__(self) -> None:
        super().__init__()
        self._made = asyncio.Event()  # calls may overtake each other on the way here

    async def make(self, make: Callable[..., Any], *arguments: Any) -> None:  # type: ignore[override]
        super().make(make, *arguments)
        self._made.set()

    async def open(self, name: str, title: str) -> None:
        await self._made.wait()
        self._door, self._watched = Door(name, title), set[int]()
        self._watch(asyncio.get_running_loop())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        files = set(self._door.files())
        for fd in self._watched - files:
            loop.remove_reader(fd)
        for fd in files - self._watched:
            loop.add_reader(fd, self._serve, loop, fd)
        self._watched = files

    def _serve(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._door.serve(fd, self._component)
        self._watch(loop)

    async def call(self, method: str, *arguments: Any) -> Any:
        await self._made.wait()
        result = super().call(method, *arguments)
        if not isinstance(result, Later):
            return _frozen(result)
        answer = asyncio.get_running_loop().create_future()
        result.then(answer.set_result)
        return await answer


def _frozen(answer: Any) -> Any:
    """Ray writes an answer down after the next call may have begun: what that one changes in place must not be in it."""
    if isinstance(answer, dict):
        return {name: _frozen(value) for name, value in answer.items()}
    return answer.copy() if isinstance(answer, np.ndarray | list) else answer


def _portable(error: Exception) -> Exception:
    """What can be told to somebody who may not have the class."""
    if isinstance(error, UsageError | RunError):
        return type(error)(str(error))
    return ChildError(traceback.format_exc())


class RayFuture:
    def __init__(self, reference: Any, name: str, timeout_s: float, lost: Callable[[], None] = lambda: None) -> None:
        self.reference, self._name, self._lost = reference, name, lost
        self.deadline = time.monotonic() + timeout_s

    def done(self) -> bool:
        return bool(ray.wait([self.reference], timeout=0)[0]) or time.monotonic() >= self.deadline

    def result(self) -> Any:
        while True:
            try:
                return ray.get(self.reference, timeout=min(max(self.deadline - time.monotonic(), 0.0), 0.5))
            except GetTimeoutError:
                if gave_up():
                    raise GaveUp from None
                if time.monotonic() >= self.deadline:
                    raise ChildLost(f"{self._name} gave no answer in time") from None
            except RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, ChildError | UsageError | RunError) else ChildError(str(error)) from None
            except RayActorError as error:
                self._lost()
                raise ChildLost(f"{self._name} {_reason(error)}") from None
            except RayError as error:
                raise ChildLost(f"{self._name} {type(error).__name__}") from None


def _reason(error: Exception) -> str:
    text = str(error)
    if "node" in text.lower() and "died" in text.lower():
        return "was lost with its machine"
    return "was ended" if "killed" in text.lower() or "SIGKILL" in text else "is not there any more"


class RayHandle:
    def __init__(self, actor: Any, name: str, forget: Callable[[], None], lost: Callable[[], None]) -> None:
        self.actor, self.name, self._forget, self._lost = actor, name, forget, lost
        self._closed = False

    def call(self, method: str, *arguments: Any, timeout_s: float = math.inf) -> RayFuture:
        return RayFuture(self.actor.call.remote(method, *arguments), self.name, timeout_s, self._lost)

    def where(self) -> tuple[str, int]:
        """Node and process."""
        return ray.get(self.actor.where.remote())

    def hurry(self) -> None:
        if not self._closed:
            self.actor.hurry.remote()

    def hang_up(self) -> None:
        """The actor may still close its simulators before it is ended."""
        if not self._closed:
            self.actor.close.remote()

    def close(self, deadline: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._forget()
        with contextlib.suppress(Exception):
            if (left := deadline - time.monotonic()) > 0:
                ray.wait([self.actor.where.remote()], timeout=left)
            ray.kill(self.actor, no_restart=True)


class RayCaller:
    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self.name = actor, name

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> RayFuture:
        return RayFuture(self._actor.call.remote(method, *arguments), self.name, timeout_s)

    def close(self) -> None:
        """The component is not ours."""


@dataclass(frozen=True)
class RayAddress:
    door: str
    title: str
    shortcut: bool

    def connect(self, timeout_s: float) -> Caller:
        deadline = time.monotonic() + timeout_s
        while True:
            if self.shortcut:
                with contextlib.suppress(ChildLost):
                    return DoorAddress(self.door, self.title).connect(0.0)
            try:
                actor = ray.get_actor(self.door)
                if time.monotonic() >= deadline or not (self.shortcut and _on_this_machine(actor)):
                    return RayCaller(actor, self.title)
                time.sleep(0.02)  # its door opens any moment
                if not gave_up():
                    continue
                raise GaveUp
            except (ValueError, RayError):
                if gave_up():
                    raise GaveUp from None
                if time.monotonic() >= deadline:
                    raise ChildLost(f"{self.title} could not be reached for {timeout_s:g} s") from None
            time.sleep(0.1)


def _on_this_machine(actor: Any) -> bool:
    """Also where it belongs to another node of Ray's, as in tests."""
    return ray.get(actor.machine.remote(), timeout=10) == _machine()


def _machine() -> str:
    """The same for all who can reach each other's doors: a boot of a kernel, and a network namespace of it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        return secrets.token_hex(8)  # like nobody else's


class RayHost:
    ahead = 2

    def __init__(self, address: str, components: int, namespace: str, shortcut: bool = True, gpus: bool = False) -> None:
        """components: how many of them compute, and want a core each; shortcut: not through Ray within a machine; gpus: those
        who compute share the cluster's, if it has any."""
        if ray.is_initialized():
            raise UsageError("topology.host = 'ray': this program is connected to a Ray cluster already; ray.shutdown() first")
        self._shortcut = shortcut and hasattr(os, "memfd_create")
        self._private = not address
        join(address, components, namespace)
        self._placed: dict[int, tuple[str, str]] = {}  # node and kind of each component
        self._number = 0
        self._suspects: dict[str, float] = {}  # nodes where something was lost, and until when they are avoided
        try:
            self._gpus = min(ray.cluster_resources().get("GPU", 0) / components, 1.0) if gpus else 0.0
            self._check_size(components)
        except BaseException:
            self.close()
            raise

    def _check_size(self, components: int) -> None:
        there = int(ray.cluster_resources().get("CPU", 0))
        if there < components:
            raise UsageError(
                f"the cluster has {there} CPUs, but {components} learners and actors want one each: "
                "add machines, or lower topology.learners or topology.actors"
            )

    def start(
        self,
        make: Callable[..., Any],
        *arguments: Any,
        name: str,
        threads: int = 1,
        door: str | None = None,
    ) -> RayHandle:
        kind = name.rstrip("0123456789 of")
        node, self._number = self._choose_node(kind), self._number + 1
        number = self._number
        options: dict[str, Any] = {
            "num_cpus": 0,  # the cores were counted at the start; what is counted twice could never be replaced
            "num_gpus": self._gpus if door is None else 0,
            "max_restarts": 0,
            "max_concurrency": 1 if door is None else ASKED_AT_ONCE,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), **machine.BRIEFLY}},
        }
        if door is not None:
            options["name"] = door
        actor = _create(_Actor if door is None else _OpenActor, options)
        actor.make.remote(make, *arguments)
        if door is not None and self._shortcut:
            actor.open.remote(door, name)
        self._placed[number] = (node, kind)
        return RayHandle(actor, name, partial(self._placed.pop, number, None), partial(self._suspect, node))  # type: ignore[arg-type]

    def _suspect(self, node: str) -> None:
        """It may be the machine: Ray notices that later than we need another one."""
        self._suspects[node] = time.monotonic() + SUSPECT_S

    def _choose_node(self, kind: str) -> str:
        """Where the fewest of its kind are, then where the most cores are left."""
        cores = {node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]}
        sound = [node for node in cores if self._suspects.get(node, 0) < time.monotonic()]
        nodes = [node for node in sound or cores if cores[node] > 0] or sound or list(cores)
        same = Counter(node for node, other in self._placed.values() if other == kind)
        placed = Counter(node for node, _ in self._placed.values())
        return min(nodes, key=lambda node: (same[node], placed[node] - cores[node], node))

    def address(self, door: str, title: str) -> RayAddress:
        return RayAddress(door, title, self._shortcut)

    def wait(self, futures: list[Any], timeout_s: float) -> None:
        if not futures:
            return
        until = min(future.deadline for future in futures) - time.monotonic()
        references = list({future.reference: None for future in futures})
        ray.wait(references, num_returns=1, timeout=max(min(timeout_s, until), 0.0))

    def close(self) -> None:
        ray.shutdown()


def _create(kind: Any, options: dict[str, Any]) -> Any:
    """The name of a lost component is free as soon as Ray has noticed the loss."""
    deadline = time.monotonic() + NAME_TAKEN_S
    while True:
        try:
            return kind.options(**options).remote()
        except ValueError as error:
            if "already taken" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.2)


_Actor, _OpenActor = (cast(Any, ray.remote)(concurrency_groups={"signals": 2})(kind) for kind in (Component, OpenComponent))


def join(address: str, components: int, namespace: str) -> None:
    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        cores = os.cpu_count() or 1
        if components > MOST_PER_CORE * cores:
            raise UsageError(
                f"{components} learners and actors are too many for the {cores} cores of this machine: give the "
                "--topology.address of a cluster, or lower topology.learners or topology.actors"
            )
        # Ray listens on every address of a machine, unless it believes that there can be no cluster.
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            ray.init(
                address="local",  # whatever cluster this machine belongs to
                num_cpus=max(components, cores),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **common,
            )
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = True
        return
    if address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).splitlines()[0]
        token = "" if address == "auto" else "; one that wants a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
        raise UsageError(f"topology.address = {address!r}: no Ray cluster answers there ({reason}){token}") from None


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"topology.address = {address!r}: give HOST:PORT of a cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"topology.address = {address!r}: no Ray cluster answers there ({reason})") from None
