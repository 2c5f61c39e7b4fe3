"""Times of one recipe on this machine, in less than a minute: learners beside each other, and what meeting costs them."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

from manyhands import machine
from manyhands.build import Custom, describe, find_device, make_learner
from manyhands.config import EvaluationConfig, Recipe, TopologyConfig
from manyhands.envs.atari import AtariEnv
from manyhands.hosts.process import ChildError, ChildLost, ProcessHost
from manyhands.memory.replay import ReplayConfig
from manyhands.plan import meetings
from manyhands.plan.model import Costs, Measured
from manyhands.stores.chunks import SharedConfig
from manyhands.stores.local import LocalConfig
from manyhands.stores.servers import ServersConfig
from manyhands.types import RunError

SECONDS = 4.0  # of each number of threads
PATIENCE_S = 180.0
STEPS, SIMULATORS = 1024, 16  # of a rollout that is measured, about
WARMUP = 1000  # steps before a replay is learned from, here
BEYOND = 350 << 20  # bytes of a process beside its arrays: Python, torch


def alone(recipe: Recipe, threads: int) -> Recipe:
    """One of its learners, by itself, on that many cores; 0: threads as the recipe has them."""
    memory: Any = recipe.memory
    if isinstance(memory, ReplayConfig):
        capacity = min(memory.capacity, 100_000)
        memory = replace(memory, shards=0, warmup_steps=min(memory.warmup_steps, WARMUP), capacity=capacity)
    env: Any = recipe.env
    if isinstance(env, AtariEnv) and threads:
        env = replace(env, threads=env.threads or threads)
    if find_device(recipe.device).type == "cuda":
        threads = 0  # torch needs one there, however many cores there are
    own: dict[str, Any] = {"store": LocalConfig(), "topology": TopologyConfig(), "evaluation": EvaluationConfig()}
    return replace(recipe, env=env, memory=memory, threads=recipe.threads or threads, **own)


def shorter(recipe: Recipe) -> tuple[Recipe, int]:
    """The same batches out of smaller rollouts, and how many make one of its own: those for a GPU take minutes on a CPU."""
    sampler, times = recipe.sampler, 1
    memory: Any = recipe.memory
    if find_device(recipe.device).type == "cuda" or sampler.kind == "pipelined":
        return recipe, 1
    while sampler.horizon * sampler.num_envs > STEPS:
        fresh = not isinstance(memory, ReplayConfig)
        if fresh and memory.minibatches % 2:
            break
        if sampler.num_envs > SIMULATORS and sampler.num_envs % 2 == 0:
            sampler = replace(sampler, num_envs=sampler.num_envs // 2)
        elif sampler.horizon > 1 and sampler.horizon % 2 == 0:
            sampler = replace(sampler, horizon=sampler.horizon // 2)
        else:
            break
        if fresh:
            memory = replace(memory, minibatches=memory.minibatches // 2)
        times *= 2
    return replace(recipe, sampler=replace(sampler, decorrelate_steps=0), memory=memory), times


class Alone:
    """A learner that shares nothing with anybody but the machine."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int, threads: int, pin: bool = False) -> None:
        if ranks > 1:
            machine.take_share(rank, ranks, pin or recipe.topology.pin)
        self._learner = make_learner(alone(recipe, threads), Custom())
        self._rollouts = (item for item in self._learner.run() if item is not None)
        while self._learner.clock.updates == 0:
            next(self._rollouts)

    def work(self, seconds: float) -> dict[str, float]:
        """Means per rollout; `spread` is of all that a rollout takes."""
        learner, took = self._learner, list[float]()
        next(self._rollouts)
        learner.reset_timers()
        clock, begin, used = learner.clock, time.perf_counter(), time.process_time()
        at = begin
        while time.perf_counter() - begin < seconds or not took:
            next(self._rollouts)
            now = time.perf_counter()
            took.append(now - at)
            at = now
        updates, steps = learner.clock.updates - clock.updates, learner.clock.steps - clock.steps
        n = len(took)
        return {
            "rollout_s": (time.perf_counter() - begin - learner.learn_seconds) / n,
            "learn_s": learner.learn_seconds / max(updates, 1),
            "steps": steps / n,
            "updates": updates / n,
            "spread": statistics.pstdev(took) / statistics.fmean(took),
            "simulate_s": learner.sampler.seconds["simulate"] / n,
            "act_s": learner.sampler.seconds["act"] / n,
            "busy": (time.process_time() - used) / (time.perf_counter() - begin),
        }

    def close(self) -> None:
        self._learner.close()


def learners(recipe: Recipe, threads: int) -> dict[str, float]:
    """Of as many learners at once as have room on the machine's cores: what one has without the others is not what it gets."""
    on_gpu = find_device(recipe.device).type == "cuda"  # which is shared in the simulation, not here
    ranks = 1 if on_gpu else max(machine.cores() // threads, 1)
    recipe, times = shorter(recipe)
    means = beside_each_other(recipe, [(rank, ranks) for rank in range(ranks)], threads)
    return {**means, **{name: times * means[name] for name in ("rollout_s", "simulate_s", "act_s", "steps", "updates")}}


def crowding(recipe: Recipe) -> float:
    """Of two learners that share a core: what each needs, over twice what it needs with that core to itself."""
    recipe, _ = shorter(recipe)
    on_a_core = [beside_each_other(recipe, [(0, machine.cores())] * n, 1, pin=True) for n in (1, 2)]
    alone_s, shared_s = (told["rollout_s"] / told["updates"] + told["learn_s"] for told in on_a_core)
    return max(shared_s / (2 * alone_s), 1.0)


def beside_each_other(recipe: Recipe, seats: list[tuple[int, int]], threads: int, pin: bool = False) -> dict[str, float]:
    """Means over learners that are measured at the same time, each on its share of the cores: (which, of how many)."""
    host = ProcessHost()
    handles = [
        host.start(Alone, recipe, rank, ranks, threads, pin, name=f"learner {number}", threads=threads)
        for number, (rank, ranks) in enumerate(seats)
    ]
    try:
        for handle in handles:  # all are there, and warm
            handle.call("work", 0.1, timeout_s=PATIENCE_S).result()
        told = [call.result() for call in [handle.call("work", SECONDS, timeout_s=PATIENCE_S) for handle in handles]]
    except (ChildError, ChildLost) as error:
        raise RunError(f"a learner of {recipe.name} could not be measured: {str(error).strip().splitlines()[-1]}") from None
    finally:
        for handle in handles:
            handle.close(time.monotonic())
    return {name: statistics.fmean(row[name] for row in told) for name in told[0]}


def _few(threads: set[int]) -> list[int]:
    """Of many numbers the least, the greatest and one in between."""
    ordered = sorted(threads)
    return ordered if len(ordered) <= 3 else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def measure(recipe: Recipe, threads: set[int]) -> Measured:
    about = describe(recipe, Custom())
    size = about["parameters"]
    whole = meetings.served(recipe, size)
    update_s = 1e-3 * whole["update_ms"]
    costs: list[Costs] = []
    told: dict[str, float] = {}
    for number in _few(threads):
        told = learners(recipe, number)
        gradient_s = max(told["learn_s"] - update_s, 0.0) if find_device(recipe.device).type == "cpu" else told["learn_s"]
        kept = {name: told[name] for name in ("rollout_s", "spread", "busy", "simulate_s", "act_s")}
        costs.append(Costs(number, gradient_s=gradient_s, **kept))
    work_s = costs[0].rollout_s / told["updates"] + costs[0].gradient_s
    central = isinstance(recipe.store, ServersConfig | SharedConfig)
    calls = meetings.calls(recipe, work_s) if isinstance(recipe.store, ServersConfig) else ()
    reductions = () if central else meetings.reductions(recipe, size, work_s)
    copy_s = max(1e-3 * whole["push_pull_ms"] - update_s - (calls[0][1] if calls else 0.0), 0.0) / 2
    described = machine.describe()
    on_gpu = find_device(recipe.device).type == "cuda"
    memory = sum(about.get(f"{name}_bytes", 0) for name in ("rollout", "parameter", "input"))
    replay = about.get("replay_bytes", 0) * recipe.actors
    return Measured(
        recipe.name, size, told["steps"], told["updates"], tuple(costs), update_s, copy_s, calls, reductions,
        memory + BEYOND, replay, described["cores"], described["cpu"],
        machine.gpus() if on_gpu else 0, 1.0 if on_gpu else crowding(recipe),
    )  # fmt: skip
