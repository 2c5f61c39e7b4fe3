"""One recipe in several settings, which take turns on this machine: which of them is fastest here?

    python benchmarks/compare.py RECIPE "sampler.groups=2" "sampler.groups=4 env.workers=4" [--common env.id=ALE/Breakout-v5]
                                 [--seconds 2] [--turns 5] [--json]

Each setting is a few of the recipe's options; "" is the recipe as it is. A turn is training, sampling without learning, and the
simulators alone, as in `manyhands bench`; "ready" is how long it took until it could begin, updates captured. All settings are
there at the same time, so all of them have to fit into memory.
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
import tyro

from manyhands import machine
from manyhands.bench import Bench
from manyhands.build import Custom, find_device
from manyhands.config import Recipe, load_recipe
from manyhands.flags import override
from manyhands.types import RunError, UsageError


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


def read(recipe: str, setting: str) -> Recipe:
    pairs = [option.partition("=") for option in setting.split()]
    words = [word for name, _, value in pairs for word in (f"--{name}", value)]
    return override(load_recipe(recipe), words, f"compare.py {recipe}")


def line(setting: str, row: dict[str, Any]) -> str:
    train, sample, alone = (row[f"{what}steps_per_s"] for what in ("", "sampling_only_", "simulator_only_"))
    parts = f"| {train:,.0f} | {sample:,.0f} | {alone:,.0f} |"
    return f"| {setting or 'as it is'} {parts} {train / alone:.0%} | {sample / alone:.0%} | {row['ready_s']:.0f} s |"


HEAD = "| | training, steps/s | sampling | simulators alone | training | sampling | ready |\n|---|---|---|---|---|---|---|"


def main(options: Options) -> int:
    if not (0 < options.seconds < math.inf and options.turns > 0):
        sys.exit("--seconds and --turns: must be positive numbers")
    if len(set(options.settings)) < len(options.settings) or not options.settings:
        sys.exit('give different settings, such as "" "sampler.groups=4"')
    try:
        recipes = [read(options.recipe, " ".join([*options.common, setting])) for setting in options.settings]
        if len({(recipe.device, recipe.threads, recipe.tf32, recipe.deterministic) for recipe in recipes}) > 1:
            sys.exit("device, threads, tf32 and deterministic are the whole process's: give them in --common")
        torch.ones(1, device=find_device(recipes[0].device))  # that a GPU wakes up is no setting's fault
        with ExitStack() as stack:
            ready, benches = [], []
            for recipe in recipes:
                begin = time.perf_counter()
                benches.append(stack.enter_context(closing(Bench(recipe, Custom()))))
                ready.append(time.perf_counter() - begin)
            for turn in range(options.turns):
                print(f"turn {turn + 1} of {options.turns}", file=sys.stderr)
                for each in benches if turn % 2 == 0 else reversed(benches):
                    each.turn(options.seconds, options.seconds)
            rows = [{**each.result(), "ready_s": round(s, 1)} for each, s in zip(benches, ready, strict=True)]
    except (UsageError, RunError) as error:
        sys.exit(str(error))
    named = dict(zip(options.settings, rows, strict=True))
    if options.json:
        print(json.dumps({**named, "machine": machine.describe()}))
        return 0
    print("\n".join([HEAD, *(line(setting, row) for setting, row in named.items())]))
    m = machine.describe()
    what = " ".join([options.recipe, *options.common])
    print(f"\n({what}; {m['cpu']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']})")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,), description=__doc__)))
    except KeyboardInterrupt:
        sys.exit(130)
