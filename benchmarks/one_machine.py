"""One machine, more learners: what scales and what does not.

Pong with the same number of simulators in all, divided among 1, 2, … learners; on a machine with a GPU they share it. Each row
trains for some seconds with the real team of processes: steps and updates per second, time blocked on locks, staleness.

    python benchmarks/one_machine.py [--json] [--seconds 20] [--learners 1 2] [--simulators 32] [--only appo a3c]
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from script import run

# Who learns (recipe), where its parameters are with one learner, and with several if that differs.
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ppo": ("pong-ppo", {"name": "local"}, {"name": "allreduce"}),
    "appo": ("pong-appo", {"name": "shared", "chunks": 3, "sync_updates": 4}, {}),
    "a2c": ("pong-a2c", {"name": "local"}, {"name": "allreduce"}),
    "a3c": ("pong-a3c-units", {"name": "shared", "chunks": 3}, {}),
    "a3c lock-free": ("pong-a3c-units", {"name": "shared", "lock": False, "chunks": 1}, {}),
    "ga3c": ("pong-ga3c", {"name": "local"}, {"name": "shared", "chunks": 3}),
    "ba3c": ("pong-ba3c", {"name": "local"}, {"name": "allreduce"}),
    "dqn": ("pong-async-dqn", {"name": "shared", "chunks": 3}, {}),
}


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    seconds: float = 20.0
    """Measured time of each row, after a start that is not measured."""
    learners: tuple[int, ...] = (1, 2)
    """Numbers of learners."""
    simulators: int = 32
    """Of all learners together."""
    device: str = "auto"
    """cpu, cuda or auto."""
    pin: bool = False
    """Each learner keeps to its own cores."""
    only: tuple[str, ...] = ()
    """These rows only."""


def changes(row: str, learners: int, options: Options) -> dict[str, Any]:
    _, alone, several = ROWS[row]
    each = options.simulators // learners
    result: dict[str, Any] = {
        "device": options.device,
        "sampler": {"num_envs": each, "decorrelate_steps": 0},
        "store": several if several and learners > 1 else alone,
        "topology": {"learners": learners, "pin": options.pin and learners > 1},
        "total_steps": 10**9,
    }
    if row in ("ga3c", "ba3c"):
        result["sampler"]["serve"] = each // 2
    if row in ("ppo", "appo"):
        result["memory"] = {"minibatches": 4}
        result["network"] = {"torso": "nips"}  # the paper's
    if row == "dqn":
        result["memory"] = {"capacity": 40_000, "warmup_steps": 2_000, "batch": 256}
    return result


def measure(row: str, learners: int, options: Options) -> dict[str, Any]:
    from manyhands import build
    from manyhands.config import load_recipe
    from manyhands.team import Team

    recipe = load_recipe(ROWS[row][0], changes(row, learners, options))
    spec, _ = build.check(recipe, build.Custom())
    team = Team(recipe, build.Custom(), spec, print)
    try:
        progress = team.run()
        while team.clock.updates < 20 * learners:
            next(progress)
        team.settle()
        team.take_metrics()
        steps, updates, begin = team.clock.steps, team.clock.updates, time.perf_counter()
        while time.perf_counter() - begin < options.seconds:
            next(progress)
        team.settle()
        seconds = time.perf_counter() - begin
        metrics = team.take_metrics()
        rate = (team.clock.updates - updates) / seconds
    finally:
        team.close()
    counts = {int(k): n for k, n in metrics.get("staleness_counts", {}).items()}
    return {
        "steps_per_s": round((team.clock.steps - steps) / seconds, 1),
        "updates_per_s": round(rate, 1),
        "lock_wait_ms": round(metrics.get("lock_wait_ms", 0.0), 3),
        "staleness_mean": round(metrics.get("staleness", 0.0), 2),
        "staleness_max": max(counts, default=0),
    }


def main(options: Options) -> None:
    from manyhands import machine

    rows = options.only or tuple(ROWS)
    if unknown := set(rows) - set(ROWS):
        raise SystemExit(f"no row {', '.join(sorted(unknown))} (there are: {', '.join(ROWS)})")
    result: dict[str, Any] = {}
    if not options.json:
        print(f"{'':<14} learners   steps/s  updates/s  lock wait (ms/update)  staleness mean (max)")
    for row in rows:
        for learners in options.learners:
            result.setdefault(row, {})[str(learners)] = r = measure(row, learners, options)
            if not options.json:
                stale = f"{r['staleness_mean']:.2f} ({r['staleness_max']})"
                print(
                    f"{row:<14} {learners:>8} {r['steps_per_s']:>9,.0f} {r['updates_per_s']:>10,.1f} {r['lock_wait_ms']:>22.3f}"
                    f" {stale:>21}",
                    flush=True,
                )
    m = machine.describe()
    if options.json:
        print(json.dumps({**result, "simulators": options.simulators, "machine": m}))
    else:
        print(f"{options.simulators} simulators on {m['cpu']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']}")


if __name__ == "__main__":
    run(main, Options, __doc__)
