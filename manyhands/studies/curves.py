"""Studies that train variants of a recipe and compare their curves. Interrupted, they go on where they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from manyhands import run as runs
from manyhands.checkpoint import newest_step
from manyhands.config import load_recipe
from manyhands.run import Run
from manyhands.studies.study import Desk, Finding, Points
from manyhands.types import RunError

Variant = tuple[str, dict[str, Any]]  # a recipe, and what is different


def trained(desk: Desk, label: str, recipe: str, changes: Mapping[str, Any], steps: int) -> Run:
    """Into a folder of its own; what is there already is kept, what was begun is finished."""
    directory = desk.folder / label.replace(" ", "-").replace("/", "-")
    report = {"every_steps": max(steps // 40, 200), "tensorboard": False}
    wanted = load_recipe(recipe, {"report": report, **changes, "total_steps": steps})
    if not (directory / "recipe.toml").exists():
        desk.say(f"{label}: {steps:,} steps of {recipe}")
        run = runs.start(wanted, directory, quiet=True)
    else:
        run = Run.open(directory)
        done = newest_step(run.checkpoints)
        if done < steps:
            desk.say(f"{label}: going on from {done:,} steps")
            run = runs.resume(run, steps, quiet=True)
    if run.interrupted:
        raise KeyboardInterrupt
    return run


def curves(desk: Desk, variants: Mapping[str, Variant], quick_steps: int, steps: int, x: str = "step", note: str = "") -> Finding:
    series: dict[str, Points] = {}
    for label, (recipe, changes) in variants.items():
        run = trained(desk, label, recipe, changes, quick_steps if desk.quick else steps)
        rows = [row for row in run.metrics() if row["return_mean"] is not None]
        if not rows:
            raise RunError(f"{label}: no game ended within {run.steps:,} steps")
        series[label] = [[row[x], row["return_mean"]] for row in rows]
    names = {"step": "steps", "time_s": "seconds"}
    return Finding(names[x], "return (mean of the last episodes)", series, note=note)


def serial_or_workers(desk: Desk) -> Finding:
    small: dict[str, Any] = {"memory": {"warmup_steps": 1000}}
    variants: dict[str, Variant] = {"serial": ("snake-dqn", small)}
    for k in (2,) if desk.quick else (2, 4):
        variants[f"{k} workers"] = ("snake-downpour", {**small, "topology": {"learners": k}})
    return curves(desk, variants, 24_000, 100_000, x="time_s")


def environments(desk: Desk) -> Finding:
    """PAAC: the rate grows with the number of environments."""
    numbers = (4, 8, 16, 32, 64)
    each = load_recipe("cartpole-a2c").rule.learning_rate / 16
    variants: dict[str, Variant] = {
        f"{n} environments": ("cartpole-a2c", {"sampler": {"num_envs": n}, "rule": {"learning_rate": each * n}}) for n in numbers
    }
    return curves(desk, variants, 60_000, 500_000)


def synchronous_or_not(desk: Desk) -> Finding:
    variants: dict[str, Variant] = {"first 2 of 3 gradients": ("ba3c-snake", {}), "each on arrival": ("ba3c-async-snake", {})}
    return curves(desk, variants, 40_000, 300_000)


def batch_sizes(desk: Desk) -> Finding:
    """The rate grows with the square root of the batch; each transition is used equally often."""
    base = load_recipe("cartpole-dqn")
    rate, batch = base.rule.learning_rate, base.memory.batch  # type: ignore[union-attr]
    variants: dict[str, Variant] = {}
    for times in (0.5, 1, 4, 16):
        size = int(batch * times)
        changes = {"memory": {"batch": size}, "rule": {"learning_rate": rate * times**0.5}}
        variants[f"batch {size}"] = ("cartpole-dqn", changes)
    return curves(desk, variants, 24_000, 150_000)


def adam_epsilon(desk: Desk) -> Finding:
    variants: dict[str, Variant] = {
        f"ε = {value:g}": ("cartpole-ba3c", {"rule": {"epsilon": value}}) for value in (1e-8, 1e-5, 1e-3, 1e-1)
    }
    return curves(desk, variants, 60_000, 250_000)


def learning_rate(desk: Desk) -> Finding:
    rate = load_recipe("cartpole-ba3c").rule.learning_rate
    variants: dict[str, Variant] = {
        f"rate {rate * times:g}": ("cartpole-ba3c", {"rule": {"learning_rate": rate * times}}) for times in (0.5, 1, 2, 8)
    }
    return curves(desk, variants, 60_000, 250_000)


def sync_period(desk: Desk) -> Finding:
    variants: dict[str, Variant] = {
        f"every {n} update{'s' * (n > 1)}": ("cartpole-appo", {"store": {"sync_updates": n}}) for n in (1, 2, 4)
    }
    return curves(desk, variants, 60_000, 150_000)


def staleness(desk: Desk) -> Finding:
    """How many updates of others a gradient has not seen, by the number of learners."""
    series: dict[str, Points] = {}
    for learners in (1, 2, 4):
        label = f"{learners} learner{'s' * (learners > 1)}"
        run = trained(desk, label, "cartpole-a3c-units", {"topology": {"learners": learners}}, 40_000 if desk.quick else 300_000)
        counts: Counter[int] = Counter()
        for row in run.metrics():
            counts.update({int(k): n for k, n in row.get("staleness_counts", {}).items()})
        total = max(sum(counts.values()), 1)
        series[label] = [[k, counts[k] / total] for k in sorted(counts)] or [[0, 1.0]]
    return Finding("updates of others since the parameters were read", "share of gradients", series)
