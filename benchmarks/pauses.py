"""When simulators have nothing to do: while they are served, and between two rollouts, when all of them wait.

    python benchmarks/pauses.py RECIPE [--more sampler.num-envs=128] [--seconds 3]

Training, sampling without learning, and the simulators alone follow each other. Milliseconds each time, and the share of all the
time: "between": from the last answer of a rollout to the first actions of the next; "serving": from a group's answer to its next
actions, while other groups simulate (of a single group both are "serving"); "sending" the actions; "waiting" for simulators.
For lock-step sampling in one process.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

import tyro
from script import changed, run

from manyhands import machine
from manyhands.bench import Part, Phase
from manyhands.build import Custom
from manyhands.samplers.lockstep import LockstepSampler
from manyhands.types import UsageError


@dataclass(frozen=True)
class Options:
    recipe: tyro.conf.Positional[str]
    """A recipe's name or file."""
    more: list[str] = field(default_factory=list)
    """Its options, section.key=value."""
    seconds: float = 3.0
    """Of each phase."""


Event = tuple[float, str, int]  # when, what begins or ends, which group


def listen(sampler: LockstepSampler) -> list[Event]:
    """Whatever the groups are asked from now on."""
    heard: list[Event] = []

    def around(function: Any, name: str, group: int) -> Any:
        def call(*arguments: Any) -> Any:
            heard.append((time.perf_counter(), name, group))
            result = function(*arguments)
            heard.append((time.perf_counter(), f"{name} done", group))
            return result

        return call

    for i, group in enumerate(sampler.groups):
        for name in ("send", "recv"):
            setattr(group, name, around(getattr(group, name), name, i))
    return heard


def spent(heard: list[Event]) -> dict[str, list[float]]:
    """Seconds between what follows each other, by what they were spent on."""
    found: dict[str, list[float]] = {"between": [], "serving": [], "sending": [], "waiting": []}
    for (begin, before, who), (end, after, whose) in pairwise(heard):
        if before == "recv done" and after == "send":
            found["serving" if who == whose else "between"].append(end - begin)
        elif after.endswith(" done"):
            found["sending" if before == "send" else "waiting"].append(end - begin)
    return found


def main(options: Options) -> None:
    if not 0 < options.seconds < math.inf:
        raise UsageError(f"--seconds {options.seconds:g}: must be a positive number")
    recipe = changed(options.recipe, options.more)
    if recipe.in_processes:
        raise UsageError(f"{options.recipe} samples in several processes")
    with closing(Part(recipe, Custom(), 0, 1)) as part:
        if not isinstance(part.sampler, LockstepSampler):
            raise UsageError(f"{options.recipe} does not sample in lock-step")
        heard = listen(part.sampler)
        for phase in get_args(Phase):
            heard.clear()
            measured = part.turn(phase, options.seconds)
            total = heard[-1][0] - heard[0][0]
            print(f"{phase}: {measured.rate:,.0f} steps/s")
            for name, times in spent(heard).items():
                if times:
                    print(f"  {name:<8} {1e3 * statistics.median(times):8.3f} ms, {sum(times) / total:6.1%}")
    m = machine.describe()
    print(f"on {m['cpu']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']}")


if __name__ == "__main__":
    run(main, Options, __doc__)
