"""Where a recipe's time goes, and how close it comes to the simulators alone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from manyhands import machine
from manyhands.build import Custom, make_learner
from manyhands.config import EvaluationConfig, Recipe, TopologyConfig
from manyhands.learner import Learner
from manyhands.memory.replay import ReplayConfig
from manyhands.samplers.pipelined import PipelinedSampler
from manyhands.stores.local import LocalConfig
from manyhands.types import Rollout


def _timed(learner: Learner, seconds: float) -> tuple[int, float, Rollout]:
    """Steps and seconds of training, and the last rollout. It begins with the second rollout that was learned from."""
    rollouts = (item for item in learner.run() if item is not None)
    while learner.clock.updates == 0:
        next(rollouts)
    _synchronise()
    learner.reset_timers()
    steps, begin = 0, time.perf_counter()
    for rollout in rollouts:
        steps += rollout.steps
        _synchronise()
        total = time.perf_counter() - begin
        if total >= seconds:
            break
    return steps, total, rollout


def bench(recipe: Recipe, custom: Custom, seconds: float) -> dict[str, Any]:
    """Trains for a while, then lets the same simulators replay the actions of the last rollout, resets included."""
    of = recipe.topology.learners
    memory = replace(recipe.memory, shards=0) if isinstance(recipe.memory, ReplayConfig) else recipe.memory
    # A team's time goes where one learner's goes.
    recipe = replace(recipe, store=LocalConfig(), topology=TopologyConfig(), memory=memory, evaluation=EvaluationConfig())
    learner = make_learner(recipe, custom)
    sampler = learner.sampler
    measure = _parts_alone if isinstance(sampler, PipelinedSampler) else _simulators_alone
    try:
        steps, total, last = _timed(learner, seconds)
        split = {**sampler.seconds, "learn": learner.learn_seconds}
        alone = measure(sampler, last.action.cpu(), min(seconds, 10.0))
    finally:
        learner.close()
    split["other"] = max(total - sum(split.values()), 0.0)
    rate = steps / total
    return {
        "recipe": recipe.name if of == 1 else f"{recipe.name}, one of its {of} learners alone",
        "steps_per_s": round(rate, 1),
        "simulator_only_steps_per_s": round(alone, 1),
        "fraction_of_simulator": round(rate / alone, 3),
        "time": {name: round(value / total, 3) for name, value in split.items()},
        "machine": machine.describe(),
    }


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
    lines = [
        f"{result['recipe']}: {result['steps_per_s']:,.0f} steps/s, {result['fraction_of_simulator']:.0%} of the "
        f"simulators alone ({result['simulator_only_steps_per_s']:,.0f})"
    ]
    for name, share in result["time"].items():
        lines.append(f"  {name:<9} {share:>6.1%}  {'█' * round(40 * share)}")
    m = result["machine"]
    lines.append(f"on {m['cpu']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']}")
    return "\n".join(lines)
