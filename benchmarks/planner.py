"""The planner against this machine: predicts steps/s and updates/s for 1, 2 and 4 learners, then trains with as many.

    python benchmarks/planner.py [--json] [--recipes cartpole-ppo-sync snake-downpour ba3c-snake] [--hosts process ray]
                                 [--learners 1 2 4] [--repeats 5] [--seconds 6]

Each repeat measures, predicts and trains anew; the error that is told is the median's, over the repeats.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from script import run

from manyhands import machine
from manyhands.build import Custom, check
from manyhands.config import Recipe, load_recipe
from manyhands.plan.measure import measure
from manyhands.plan.model import Machines
from manyhands.plan.show import plan, topology_of
from manyhands.stores.allreduce import AllReduceConfig
from manyhands.stores.local import LocalConfig
from manyhands.stores.servers import ServersConfig
from manyhands.team import Team

WARM_UPDATES = 20


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    recipes: tuple[str, ...] = ("cartpole-ppo-sync", "snake-downpour", "ba3c-snake")
    """PPO, DQN with servers, BA3C with gather. On Ray, PPO's gradients are gathered by a server too."""
    hosts: tuple[Literal["process", "ray"], ...] = ("process", "ray")
    """Where the learners run."""
    learners: tuple[int, ...] = (1, 2, 4)
    """How many."""
    repeats: int = 5
    """How often each is predicted and measured."""
    seconds: float = 6.0
    """Of training that is measured."""


def with_learners(recipe: Recipe, learners: int, host: Any) -> Recipe:
    store: Any = recipe.store
    if isinstance(store, ServersConfig) and store.gather:
        store = replace(store, gather=topology_of(recipe, learners).gather)
    if isinstance(store, AllReduceConfig) and learners == 1:
        store = LocalConfig()
    return replace(recipe, store=store, topology=replace(recipe.topology, learners=learners, host=host))


def trained(recipe: Recipe, seconds: float) -> tuple[float, float]:
    """Steps and updates per second of a real team."""
    spec, _ = check(recipe, Custom())
    team = Team(recipe, Custom(), spec, print, None)
    try:
        began: tuple[int, int, float] | None = None
        for _ in team.run():
            now, clock = time.perf_counter(), team.clock
            if began is None and clock.updates > WARM_UPDATES:
                began = (clock.steps, clock.updates, now)
            elif began is not None and now - began[2] >= seconds:
                return (clock.steps - began[0]) / (now - began[2]), (clock.updates - began[1]) / (now - began[2])
    finally:
        team.close()
    raise AssertionError("a team runs until it is stopped")


def compare(name: str, host: str, options: Options) -> list[dict[str, Any]]:
    recipe, rows = load_recipe(name), []
    if host == "ray" and not isinstance(recipe.store, ServersConfig):  # all-reduce is one machine's; servers that wait for all
        recipe = replace(recipe, store=ServersConfig(gather=recipe.topology.learners))
    machines = Machines(machine.cores())
    threads = {1} if host == "ray" else {machines.threads(n) for n in options.learners}
    pairs: dict[int, list[tuple[float, float, float, float]]] = {n: [] for n in options.learners}
    for _ in range(options.repeats):
        predicted = plan(measure(recipe, threads), recipe, list(options.learners), machines, 1e6)["rows"]
        for row in predicted:
            steps, updates = trained(with_learners(recipe, row["learners"], host), options.seconds)
            pairs[row["learners"]].append((row["steps_per_s"], steps, row["updates_per_s"], updates))
    for n, told in pairs.items():
        steps, measured_steps, updates, measured_updates = (statistics.median(column) for column in zip(*told, strict=True))
        error = statistics.median(p / m - 1 for p, m, _, _ in told)
        updates_error = statistics.median(p / m - 1 for _, _, p, m in told)
        rows.append({
            "recipe": name, "host": host, "learners": n,
            "predicted_steps_per_s": round(steps), "steps_per_s": round(measured_steps), "steps_error": round(error, 3),
            "predicted_updates_per_s": round(updates, 1), "updates_per_s": round(measured_updates, 1),
            "updates_error": round(updates_error, 3),
        })  # fmt: skip
    return rows


def main(options: Options) -> None:
    rows = []
    if not options.json:
        print(f"{'recipe':<20}{'host':<9}learners   steps/s predicted   error   updates/s predicted   error")
    for name in options.recipes:
        for host in options.hosts:
            for row in compare(name, host, options):
                rows.append(row)
                if not options.json:
                    print(
                        f"{name:<20}{host:<9}{row['learners']:>8}{row['steps_per_s']:>10,}{row['predicted_steps_per_s']:>10,}"
                        f"{row['steps_error']:>8.0%}{row['updates_per_s']:>12,.1f}{row['predicted_updates_per_s']:>10,.1f}"
                        f"{row['updates_error']:>8.0%}",
                        flush=True,
                    )
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine.describe()}))


if __name__ == "__main__":
    run(main, Options, __doc__)
