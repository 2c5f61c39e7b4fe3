"""Times of one recipe on this machine, in well under a minute: a learner by itself, and a real parameter server."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from manyhands import machine
from manyhands.build import Custom, describe, find_device, make_learner
from manyhands.config import EvaluationConfig, Recipe, TopologyConfig
from manyhands.envs.atari import AtariEnv
from manyhands.hosts.process import ProcessHost
from manyhands.keeper import Keeper
from manyhands.memory.replay import ReplayConfig
from manyhands.nets.flat import Model
from manyhands.plan.model import Costs, Measured
from manyhands.stores.local import LocalConfig
from manyhands.stores.servers import ServersConfig, ServersStore
from manyhands.types import EnvSpec, GradientInfo, Places, Seat

SECONDS = 4.0  # of each number of threads
PUSHES = 40
WARMUP = 1000  # steps before a replay is learned from, here
BEYOND = 350 << 20  # bytes of a process beside its arrays: Python, torch


class Pusher:
    """A learner whose gradients cost nothing."""

    def __init__(self, recipe: Recipe, size: int, rank: int, places: Places) -> None:
        torch.set_num_threads(1)
        vector = torch.zeros(size)
        self._model = Model(torch.nn.Module(), vector, torch.full((size,), 1e-3))
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

    def close(self) -> None:
        self._store.close()


def served(recipe: Recipe, sizes: tuple[int, ...]) -> list[dict[str, float]]:
    """A push and pull of vectors of these sizes, with one server that has one core."""
    told = []
    for size in sizes:
        several = TopologyConfig(max(machine.cores(), 2), host="process")
        asked = replace(recipe, store=ServersConfig(), topology=several, evaluation=EvaluationConfig())
        host: Any = ProcessHost()
        model = Model(torch.nn.Module(), torch.zeros(size), torch.zeros(size))
        keeper = Keeper(host, asked, model, EnvSpec("none", (1,), "float32", 1, 1), print, None)
        try:
            pusher = host.start(Pusher, asked, size, 0, keeper.at, name="learner")
            told.append(pusher.call("push", PUSHES, timeout_s=60).result())
            pusher.close(time.monotonic())
        finally:
            keeper.close()
            host.close()
    return told


def alone(recipe: Recipe, threads: int) -> Recipe:
    """One of its learners, by itself, with that many threads."""
    memory: Any = recipe.memory
    if isinstance(memory, ReplayConfig):
        capacity = min(memory.capacity, 100_000)
        memory = replace(memory, shards=0, warmup_steps=min(memory.warmup_steps, WARMUP), capacity=capacity)
    env = replace(recipe.env, threads=threads) if isinstance(recipe.env, AtariEnv) else recipe.env
    own: dict[str, Any] = {"store": LocalConfig(), "topology": TopologyConfig(), "evaluation": EvaluationConfig()}
    return replace(recipe, env=env, memory=memory, threads=threads, **own)


def _learner(recipe: Recipe, threads: int) -> tuple[dict[str, float], list[float]]:
    """Means per rollout, and what each took."""
    learner = make_learner(alone(recipe, threads), Custom())
    try:
        rollouts = (item for item in learner.run() if item is not None)
        while learner.clock.updates == 0:
            next(rollouts)
        next(rollouts)
        learner.reset_timers()
        took: list[float] = []
        clock, begin = learner.clock, time.perf_counter()
        at = begin
        while time.perf_counter() - begin < SECONDS or len(took) < 3:
            next(rollouts)
            now = time.perf_counter()
            took.append(now - at)
            at = now
        updates, steps = learner.clock.updates - clock.updates, learner.clock.steps - clock.steps
        total = time.perf_counter() - begin
    finally:
        learner.close()
    n = len(took)
    rest = (total - learner.learn_seconds) / n
    return {"rollout_s": rest, "learn_s": learner.learn_seconds / updates, "steps": steps / n, "updates": updates / n}, took


def measure(recipe: Recipe, threads: set[int]) -> Measured:
    about = describe(recipe, Custom())
    size = about["parameters"]
    tiny, whole = served(recipe, (64, size))
    update_s, call_s = 1e-3 * whole["update_ms"], 1e-3 * tiny["push_pull_ms"]
    copy_s = max(1e-3 * whole["push_pull_ms"] - update_s - call_s, 0.0) / 2
    costs: list[Costs] = []
    told: dict[str, float] = {}
    for number in sorted(threads):
        told, took = _learner(recipe, number)
        spread = statistics.pstdev(took) / statistics.fmean(took)
        gradient_s = max(told["learn_s"] - update_s, 0.0) if find_device(recipe.device).type == "cpu" else told["learn_s"]
        costs.append(Costs(number, told["rollout_s"], gradient_s, spread))
    described = machine.describe()
    memory = sum(about.get(f"{name}_bytes", 0) for name in ("rollout", "parameter", "input", "replay"))
    return Measured(
        recipe.name, size, told["steps"], told["updates"], tuple(costs), update_s, copy_s, call_s, memory + BEYOND,
        described["cores"], described["cpu"],
    )  # fmt: skip
