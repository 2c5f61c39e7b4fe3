"""What it costs learners to meet on this machine: real servers and real reductions, for learners that only pretend to learn."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from manyhands import machine
from manyhands.config import EvaluationConfig, Recipe, TopologyConfig
from manyhands.hosts.process import ProcessHost, SharedBlock
from manyhands.keeper import Keeper
from manyhands.nets.flat import Model
from manyhands.stores.allreduce import AllReduceConfig, AllReduceStore
from manyhands.stores.servers import ServersConfig, ServersStore
from manyhands.types import EnvSpec, GradientInfo, Places, Seat, Store

PUSHES = 40
TINY = 64  # parameters: what a meeting costs beside what is moved and computed
SECONDS = 1.5  # of each number of learners


class Pretender:
    """A learner whose gradients are always the same, and cost as much as it is told."""

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)
        self._model = Model(torch.nn.Module(), torch.zeros(size), torch.full((size,), 1e-3))
        self._store: Store

    def meet(self, times: int, work_s: float) -> float:
        """Seconds of each turn, of which it works so many on a core."""
        begin = time.perf_counter()
        for _ in range(times):
            until = time.thread_time() + work_s
            while time.thread_time() < until:
                pass
            self._store.step(GradientInfo(0, 1))
        return (time.perf_counter() - begin) / times

    def close(self) -> None:
        self._store.close()


class Pusher(Pretender):
    def __init__(self, recipe: Recipe, size: int, rank: int, places: Places) -> None:
        super().__init__(size)
        assert isinstance(recipe.store, ServersConfig)
        self._store = ServersStore(self._model, recipe.rule, 10**9, recipe.store, Seat(rank, recipe.topology.learners), places)
        self._store.refresh()

    def push(self, times: int) -> dict[str, Any]:
        for _ in range(3):
            self._store.step(GradientInfo(0, 1))
        begin, rows = time.perf_counter(), []
        for _ in range(times):
            at = time.perf_counter()
            receipt = self._store.step(GradientInfo(0, 1))
            rows.append((1e3 * (time.perf_counter() - at), receipt.metrics["latency_ms"]))
        seconds = time.perf_counter() - begin
        total, update = (statistics.median(column) for column in zip(*rows, strict=True))
        return {"push_pull_ms": total, "update_ms": update, "comms_ms": total - update, "rate": times / seconds}


class Reducer(Pretender):
    def __init__(self, recipe: Recipe, size: int, rank: int, ranks: int, meeting: int) -> None:
        super().__init__(size)
        self._store = AllReduceStore(self._model, recipe.rule, 10**9, AllReduceConfig(), Seat(rank, ranks), meeting)


def served(recipe: Recipe, size: int) -> dict[str, float]:
    """A push and pull of a vector of that size, nobody else asking."""
    with _Servers(recipe, size, 1) as pushers:
        return pushers[0].call("push", PUSHES, timeout_s=60).result()


def calls(recipe: Recipe, work_s: float) -> tuple[tuple[float, float], ...]:
    """Seconds to ask a server and be answered, beside what is moved: (learners for each core, seconds)."""
    cores, told = machine.cores(), []
    with _Servers(recipe, TINY, 2 * cores) as pushers:
        told.append((1 / cores, 1e-3 * pushers[0].call("push", PUSHES, timeout_s=60).result()["push_pull_ms"]))
        for n in (cores, 2 * cores):
            told.append((n / cores, _beyond(pushers[:n], work_s)))
    return tuple(told)


def reductions(recipe: Recipe, size: int, work_s: float) -> tuple[tuple[float, float], ...]:
    """Seconds to add up everybody's gradients and apply them: (learners for each core, seconds)."""
    cores, told = machine.cores(), []
    for n in (cores, 2 * cores) if cores > 1 else (2,):
        block = SharedBlock()
        host = ProcessHost((block.fd,))
        reducers = [host.start(Reducer, recipe, size, rank, n, block.fd, name=f"learner {rank}") for rank in range(n)]
        try:
            told.append((n / cores, _beyond(reducers, work_s)))
        finally:
            _close(reducers)
            block.close()
    return tuple(told)


def _beyond(pretenders: list[Any], work_s: float) -> float:
    """What a turn takes beside the work, which takes longer where the cores are not enough."""
    crowd = max(len(pretenders) / machine.cores(), 1.0)
    times = min(max(int(SECONDS / (crowd * work_s + 1e-3)), 10), 400)
    for at_first in (3, times):
        asked = [pretender.call("meet", at_first, work_s, timeout_s=60) for pretender in pretenders]
        turns = [call.result() for call in asked]
    return max(statistics.fmean(turns) - crowd * work_s, 0.0)


class _Servers:
    """One server, and so many who will ask it."""

    def __init__(self, recipe: Recipe, size: int, learners: int) -> None:
        several = TopologyConfig(max(machine.cores(), learners, 2), host="process")
        asked = replace(recipe, store=ServersConfig(), topology=several, evaluation=EvaluationConfig())
        host: Any = ProcessHost()
        model = Model(torch.nn.Module(), torch.zeros(size), torch.zeros(size))
        self._keeper = Keeper(host, asked, model, EnvSpec("none", (1,), "float32", 1, 1), print, None)
        at = self._keeper.at
        self._pushers = [host.start(Pusher, asked, size, rank, at, name=f"learner {rank}") for rank in range(learners)]

    def __enter__(self) -> list[Any]:
        return self._pushers

    def __exit__(self, *error: object) -> None:
        _close(self._pushers)
        self._keeper.close()


def _close(handles: list[Any]) -> None:
    until = time.monotonic() + 5
    for handle in handles:
        handle.hang_up()
    for handle in handles:
        handle.close(until)
