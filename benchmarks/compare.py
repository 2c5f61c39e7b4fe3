"""One recipe in several settings, which take turns on this machine: which of them is fastest here?

    python benchmarks/compare.py RECIPE "sampler.groups=2" "sampler.groups=4 env.workers=4" [--common env.id=ALE/Breakout-v5]
                                 [--seconds 2] [--turns 5] [--json]

Each setting is a few of the recipe's options; "" is the recipe as it is. A turn is training, sampling without learning, and the
simulators alone, as in `manyhands bench`; "ready" is how long it took until it could begin, updates captured. All settings are
there at the same time, so all of them have to fit into memory.
"""

from __future__ import annotations

import manyhands  # noqa: F401 – before torch: it chooses the OpenMP runtime, as in training

# isort: split
import json
import math
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
import tyro
from script import changed, run

from manyhands import machine
from manyhands.bench import Bench
from manyhands.build import Custom, find_device
from manyhands.types import UsageError


@dataclass(frozen=True)
class Options:
    recipe: tyro.conf.Positional[str]
    """A recipe's name or file."""
    settings: tyro.conf.Positional[list[str]]
    """section.key=value, several of them separated by spaces."""
    common: list[str] = field(default_factory=list)
    """Options of all of them."""
    seconds: float = 2.0
    """Of each phase in each turn."""
    turns: int = 5
    json: bool = False
    """Print one JSON object."""


def line(setting: str, row: dict[str, Any]) -> str:
    train, sample, alone = (row[f"{what}steps_per_s"] for what in ("", "sampling_only_", "simulator_only_"))
    parts = f"| {train:,.0f} | {sample:,.0f} | {alone:,.0f} |"
    return f"| {setting or 'as it is'} {parts} {train / alone:.0%} | {sample / alone:.0%} | {row['ready_s']:.0f} s |"


HEAD = (
    "| | training, steps/s | sampling | simulators alone | training of that | sampling of that | ready |\n"
    "|---|---|---|---|---|---|---|"
)


def main(options: Options) -> int:
    if not (0 < options.seconds < math.inf and options.turns > 0):
        raise UsageError("--seconds and --turns: must be positive numbers")
    if len(set(options.settings)) < len(options.settings) or not options.settings:
        raise UsageError('give different settings, such as "" "sampler.groups=4"')
    recipes = [changed(options.recipe, [*options.common, *setting.split()]) for setting in options.settings]
    if len({(recipe.device, recipe.threads, recipe.tf32, recipe.deterministic) for recipe in recipes}) > 1:
        raise UsageError("device, threads, tf32 and deterministic are the whole process's: give them in --common")
    torch.ones(1, device=find_device(recipes[0].device))  # that a GPU wakes up is no setting's fault
    interrupted = False
    with ExitStack() as stack:
        ready, benches = [], []
        for recipe in recipes:
            begin = time.perf_counter()
            benches.append(stack.enter_context(closing(Bench(recipe, Custom()))))
            ready.append(time.perf_counter() - begin)
        turn = 0
        try:
            for turn in range(options.turns):
                print(f"turn {turn + 1} of {options.turns}", file=sys.stderr)
                for each in benches if turn % 2 == 0 else reversed(benches):
                    each.turn(options.seconds, options.seconds)
        except KeyboardInterrupt:
            if turn == 0:
                raise
            interrupted = True
            print(f"interrupted in turn {turn + 1}: this is what was measured until then", file=sys.stderr)
        rows = [{**each.result(), "ready_s": round(s, 1)} for each, s in zip(benches, ready, strict=True)]
    named = dict(zip(options.settings, rows, strict=True))
    if options.json:
        print(json.dumps({**named, "machine": machine.describe()}))
        return 130 if interrupted else 0
    print("\n".join([HEAD, *(line(setting, row) for setting, row in named.items())]))
    m = machine.describe()
    what = " ".join([options.recipe, *options.common])
    print(f"\n({what}; {m['cpu']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']})")
    return 130 if interrupted else 0


if __name__ == "__main__":
    run(main, Options, __doc__)
