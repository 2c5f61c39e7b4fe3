"""Where a recipe's time goes, and how close it comes to the simulators alone."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch

from manyhands.build import Custom, cores, make_learner
from manyhands.config import Recipe
from manyhands.samplers.lockstep import LockstepSampler


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": model, "cores": cores(), "gpu": gpu, "torch": torch.__version__, "python": platform.python_version()}


def bench(recipe: Recipe, custom: Custom, seconds: float) -> dict[str, Any]:
    """Trains for a while, then lets the same simulators replay the actions of the last rollout, resets included."""
    learner = make_learner(recipe, custom)
    sampler = learner.sampler
    assert isinstance(sampler, LockstepSampler)
    try:
        rollouts = learner.run()
        for item in rollouts:  # the first rollout warms caches and allocators up
            if item is not None:
                break
        _synchronise()
        for name in sampler.seconds:
            sampler.seconds[name] = 0.0
        learner.learn_seconds = 0.0
        steps, last = 0, None
        begin = time.perf_counter()
        for item in rollouts:
            if item is None:
                continue
            steps, last = steps + item.steps, item
            _synchronise()
            if time.perf_counter() - begin >= seconds:
                break
        total = time.perf_counter() - begin
        assert last is not None
        alone = _simulators_alone(sampler, last.action.cpu(), min(seconds, 10.0))
    finally:
        learner.close()
    split = {**sampler.seconds, "learn": learner.learn_seconds}
    split["other"] = max(total - sum(split.values()), 0.0)
    rate = steps / total
    return {
        "recipe": recipe.name,
        "steps_per_s": round(rate, 1),
        "simulator_only_steps_per_s": round(alone, 1),
        "fraction_of_simulator": round(rate / alone, 3),
        "time": {name: round(value / total, 3) for name, value in split.items()},
        "machine": machine(),
    }


def _simulators_alone(sampler: LockstepSampler, actions: torch.Tensor, seconds: float) -> float:
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
