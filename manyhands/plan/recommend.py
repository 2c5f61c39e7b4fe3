"""Settings for the machine at hand, by trying: one thing after the other is changed, and kept where it is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from manyhands import machine
from manyhands.build import Custom, describe, find_device
from manyhands.config import Recipe
from manyhands.memory.replay import ReplayConfig
from manyhands.plan.measure import Alone
from manyhands.types import UsageError

SECONDS = 2.0  # of each trial
BETTER = 1.05  # by less than that nothing is changed: it may be chance


@dataclass(frozen=True)
class Change:
    axis: str
    recipe: Recipe
    flags: tuple[str, ...]
    learns_the_same: bool


def changes(recipe: Recipe, axis: str) -> Iterator[Change]:
    """What could be different in one respect, from a recipe that may have been changed in others."""
    sampler, memory = recipe.sampler, recipe.memory
    if axis == "groups" and sampler.kind in ("batched", "alternating"):
        for groups in (1, 2, 4):
            kind: Any = "batched" if groups == 1 else "alternating"
            own = replace(sampler, kind=kind, groups=0 if groups <= 2 else groups)
            flags = ("--sampler.kind", kind, *(("--sampler.groups", str(groups)) if groups > 2 else ()))
            yield Change(axis, replace(recipe, sampler=own), flags, True)
    if axis == "threads" and find_device(recipe.device).type == "cpu":
        for threads in sorted({1, machine.cores()}):
            yield Change(axis, replace(recipe, threads=threads), ("--threads", str(threads)), True)
    if axis == "environments":
        for n in (max(sampler.num_envs // 2, 1), 2 * sampler.num_envs, 4 * sampler.num_envs):
            flags = ("--sampler.num-envs", str(n))
            yield Change(axis, replace(recipe, sampler=replace(sampler, num_envs=n)), flags, False)
    if axis == "batch" and isinstance(memory, ReplayConfig):
        for batch in (2 * memory.batch, 4 * memory.batch):
            yield Change(axis, replace(recipe, memory=replace(memory, batch=batch)), ("--memory.batch", str(batch)), False)
    elif axis == "batch" and not isinstance(memory, ReplayConfig) and memory.minibatches > 1:
        fewer = memory.minibatches // 2
        yield Change(
            axis, replace(recipe, memory=replace(memory, minibatches=fewer)), ("--memory.minibatches", str(fewer)), False
        )


def trial(recipe: Recipe) -> float:
    """Steps per second of one learner."""
    learner = Alone(recipe, 0, 1, 0)
    try:
        told = learner.work(SECONDS)
    finally:
        learner.close()
    return told["steps"] / (told["rollout_s"] + told["updates"] * told["learn_s"])


def recommend(recipe: Recipe, say: Callable[[str], None], measure: Callable[[Recipe], float] = trial) -> dict[str, Any]:
    about = describe(recipe, Custom())
    best, flags, same = recipe, dict[str, tuple[str, ...]](), True
    rate = first = measure(recipe)
    say(f"{first:>9,.0f} steps/s   {recipe.name} as it is, one learner")
    rows = [{"flags": [], "steps_per_s": first}]
    for axis in ("groups", "threads", "environments", "batch"):
        found: tuple[float, Change] | None = None
        options = _possible(best, axis)
        for change in options:
            if change.recipe == best:
                continue
            speed = measure(change.recipe)
            say(f"{speed:>9,.0f} steps/s   {' '.join(change.flags)}")
            rows.append({"flags": [*(word for f in flags.values() for word in f), *change.flags], "steps_per_s": speed})
            if speed > BETTER * (found[0] if found else rate):
                found = (speed, change)
        if found is not None:
            rate, chosen = found
            best, same = chosen.recipe, same and chosen.learns_the_same
            flags[axis] = chosen.flags
    return {
        "recipe": recipe.name,
        "flags": [word for f in flags.values() for word in f],
        "steps_per_s": rate,
        "times": rate / first,
        "learns_the_same": same,
        "replay_device": about.get("replay_device"),
        "replay_bytes": about.get("replay_bytes", 0),
        "tried": rows,
    }


def _possible(recipe: Recipe, axis: str) -> list[Change]:
    found, offered = [], changes(recipe, axis)
    while True:
        try:
            found.append(next(offered))
        except StopIteration:
            return found
        except UsageError:  # this one and those after it do not fit together
            return found


def show(result: dict[str, Any]) -> str:
    lines = []
    if result["flags"]:
        lines.append(f"manyhands train {result['recipe']} {' '.join(result['flags'])}")
        lines.append(f"  {result['steps_per_s']:,.0f} steps/s, {result['times']:.2f} times the recipe's own speed here")
        if not result["learns_the_same"]:
            lines.append("  more environments or larger batches also change what is learned: compare the curves")
    else:
        lines.append(f"{result['recipe']} is right as it is: nothing that was tried is faster by {BETTER - 1:.0%}")
    if result["replay_device"]:
        lines.append(f"  the replay of {result['replay_bytes'] / 2**30:.1f} GiB goes to {result['replay_device']}")
    return "\n".join(lines)
