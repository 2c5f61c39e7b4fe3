"""Where a recipe's time goes, and how close it comes to the simulators alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from manyhands import machine
from manyhands.build import Custom, check, make_learner
from manyhands.config import EvaluationConfig, Recipe, TopologyConfig
from manyhands.memory.replay import ReplayConfig
from manyhands.samplers.pipelined import PipelinedSampler
from manyhands.stores.local import LocalConfig
from manyhands.team import Team
from manyhands.types import Rollout

WARM_UPDATES = 5  # of a team, before it is measured


def _timed(rollouts: Iterator[Rollout], seconds: float) -> tuple[float, float, Rollout]:
    """Steps per second, seconds, and the last rollout. Nobody waits for the GPU but at both ends."""
    _synchronise()
    steps, begin = 0, time.perf_counter()
    for rollout in rollouts:
        steps += rollout.steps
        if time.perf_counter() - begin >= seconds:
            break
    _synchronise()
    total = time.perf_counter() - begin
    return steps / total, total, rollout


def bench(recipe: Recipe, custom: Custom, seconds: float) -> dict[str, Any]:
    """Trains for a while, then only samples, then lets the same simulators replay the actions of the last rollout, resets
    included: all in one run, on a machine that may be noisy. Of several learners: they train together; the rest is measured in
    one process with the simulators of all."""
    learners = recipe.topology.learners
    together = team_rate(recipe, custom, seconds) if recipe.in_processes else None
    learner = make_learner(_alone(recipe), custom)
    sampler = learner.sampler
    measure = _parts_alone if isinstance(sampler, PipelinedSampler) else _simulators_alone
    try:
        rollouts = (item for item in learner.run() if item is not None)
        while learner.clock.updates == 0:  # what is captured is captured then
            next(rollouts)
        next(rollouts)
        learner.reset_timers()
        rate, total, _ = _timed(rollouts, seconds)
        split = {**sampler.seconds, "learn": learner.learn_seconds}
        learner.learning = False
        sampling, _, last = _timed(rollouts, min(seconds, 10.0) / 2)
        alone = measure(sampler, last.action.cpu(), min(seconds, 10.0))
    finally:
        learner.close()
    split["other"] = max(total - sum(split.values()), 0.0)
    trained = rate if together is None else together
    return {
        "recipe": recipe.name,
        "learners": learners,
        "steps_per_s": round(trained, 1),
        **({} if together is None else {"one_process_steps_per_s": round(rate, 1)}),
        "sampling_only_steps_per_s": round(sampling, 1),
        "simulator_only_steps_per_s": round(alone, 1),
        "fraction_of_simulator": round(trained / alone, 3),
        "sampling_fraction_of_simulator": round(sampling / alone, 3),
        "time": {name: round(value / total, 3) for name, value in split.items()},
        "machine": machine.describe(),
    }


def _alone(recipe: Recipe) -> Recipe:
    """One learner with everybody's simulators."""
    memory = replace(recipe.memory, shards=0) if isinstance(recipe.memory, ReplayConfig) else recipe.memory
    sampler = replace(recipe.sampler, num_envs=recipe.sampler.num_envs * recipe.actors)
    own = {"store": LocalConfig(), "topology": TopologyConfig(), "evaluation": EvaluationConfig()}
    return replace(recipe, sampler=sampler, memory=memory, **own)  # type: ignore[arg-type]


def team_rate(recipe: Recipe, custom: Custom, seconds: float) -> float:
    """Steps per second of all learners, from when they have learned something."""
    spec, _ = check(recipe, custom)
    team = Team(recipe, custom, spec, print, None)
    try:
        began: tuple[int, float] | None = None
        for _ in team.run():
            now = time.perf_counter()
            if began is None and team.clock.updates > WARM_UPDATES:
                began = (team.clock.steps, now)
            elif began is not None and now - began[1] >= seconds:
                return (team.clock.steps - began[0]) / (now - began[1])
    finally:
        team.close()
    raise AssertionError("a team runs until it is stopped")


def _parts_alone(sampler: Any, actions: torch.Tensor, seconds: float) -> float:
    """The same for simulators that are served in parts: whoever is ready gets one of the last rollout's actions."""
    plan = actions.flatten().numpy()
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        ids, step = sampler.group.serve()
        steps += len(ids) - int(np.asarray(step.first).sum())
        sampler.group.answer(np.resize(np.roll(plan, -steps), len(ids)))
    return steps / (time.perf_counter() - begin)


def _simulators_alone(sampler: Any, actions: torch.Tensor, seconds: float) -> float:
    """Steps per second of the same groups, kept as busy as they can be."""
    columns = actions.split([group.num_envs for group in sampler.groups], dim=1)
    plans = [[row.numpy().copy() for row in part] for part in columns]
    for group, plan in zip(sampler.groups, plans, strict=True):
        group.send(plan[0])
    slots, resets = 0, 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        slots += 1
        for group, plan in zip(sampler.groups, plans, strict=True):
            resets += int(torch.as_tensor(group.recv().first).sum())
            group.send(plan[slots % len(plan)])
    total = time.perf_counter() - begin
    for group in sampler.groups:
        group.recv()
    return (slots * sampler.num_envs - resets) / total


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show(result: dict[str, Any]) -> str:
    who = f" with {result['learners']} learners" if result["learners"] > 1 else ""
    lines = [
        f"{result['recipe']}{who}: {result['steps_per_s']:,.0f} steps/s, {result['fraction_of_simulator']:.0%} of the "
        f"simulators alone ({result['simulator_only_steps_per_s']:,.0f}); sampling without learning "
        f"{result['sampling_only_steps_per_s']:,.0f}, {result['sampling_fraction_of_simulator']:.0%}"
    ]
    if "one_process_steps_per_s" in result:
        lines.append(f"one learner with all simulators: {result['one_process_steps_per_s']:,.0f} steps/s, of which")
    for name, share in result["time"].items():
        lines.append(f"  {name:<9} {share:>6.1%}  {'█' * round(40 * share)}")
    m = result["machine"]
    lines.append(f"on {m['cpu']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']}")
    return "\n".join(lines)
