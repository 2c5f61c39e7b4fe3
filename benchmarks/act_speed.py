"""Serving simulators once: from their frames here to their actions here, as training does it. This is how long they wait.

    python benchmarks/act_speed.py [--json] [--networks nips nature impala] [--simulators 8 32 128]

frames: keeping what they show; act: choosing, until the actions are here; both in microseconds, medians. On a GPU also what of
it the GPU works ("gpu"): the rest of `act` is launching and waiting.
"""

from __future__ import annotations

import manyhands  # noqa: F401 – before torch: it chooses the OpenMP runtime, as in training

# isort: split
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from script import run

from manyhands import machine
from manyhands.actor import Actor
from manyhands.build import Custom, find_device, make_model, place_threads
from manyhands.config import load_recipe
from manyhands.graphs import on
from manyhands.maths.stacking import room_for_frames
from manyhands.samplers.serving import Serving
from manyhands.samplers.slots import ANSWER
from manyhands.types import EnvSpec, UsageError

SPEC = EnvSpec("ALE/Pong-v5", (1, 84, 84), "uint8", 4, 6, 4)
SLOTS = 16


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    networks: list[str] = field(default_factory=lambda: ["nips", "nature", "impala"])
    """Which torsos."""
    simulators: list[int] = field(default_factory=lambda: [8, 32, 64, 128])
    """How many are served at once."""
    repeats: int = 200
    """Of which the median is taken."""
    device: str = "auto"
    """cpu, cuda or auto."""


def measure(torso: str, n: int, repeats: int, device: torch.device) -> dict[str, float]:
    recipe = load_recipe("pong-a2c", {"network": {"torso": torso}})
    place_threads(recipe, device)
    model = make_model(recipe, recipe.algorithm, SPEC, device, Custom())
    actor = Actor(recipe.algorithm, model, copy=True, aside=device.type == "cuda")
    rows = SLOTS + SPEC.stack
    memory = {
        "obs": room_for_frames(rows, n, SPEC.frame, torch.uint8, device),
        "first": torch.zeros(rows, n, dtype=torch.bool, device=device),
        **{name: torch.zeros(SLOTS, n, dtype=torch.int64, device=device) for name in ("action", "answers")},
    }
    who, answers, noise = np.arange(n), np.zeros(n, ANSWER), np.zeros((n, 2), np.float32)
    frames = np.random.default_rng(0).integers(0, 256, (n, *SPEC.frame), np.uint8)
    with on(actor.stream):
        serving = Serving(actor, memory, n, SPEC, torch.zeros(n, device=device), np.zeros(n, np.int64))
        spent: dict[str, list[float]] = {"frames": [], "act": []}
        for i in range(repeats + 10):
            begin = time.perf_counter()
            serving.put(SPEC.stack + i % SLOTS, who, frames, answers)
            kept = time.perf_counter()
            serving.act(i % SLOTS, who, noise)
            spent["frames"].append(kept - begin)
            spent["act"].append(time.perf_counter() - kept)
        found = {name: 1e6 * statistics.median(times[10:]) for name, times in spent.items()}
        if device.type == "cuda":
            found["gpu"] = _on_the_gpu(serving._put, repeats) + _on_the_gpu(serving._act, repeats)
    return {name: round(value, 1) for name, value in found.items()}


def _on_the_gpu(launch: Callable[[], object], repeats: int) -> float:
    """Microseconds of one of many that follow each other at once."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        launch()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


def main(options: Options) -> None:
    if options.repeats < 1 or not options.simulators or min(options.simulators) < 1:
        raise UsageError("--repeats and --simulators must be at least 1")
    results: dict[str, dict[str, dict[str, float]]] = {}
    device = find_device(options.device)
    for torso in options.networks:
        for n in options.simulators:
            results.setdefault(torso, {})[str(n)] = row = measure(torso, n, options.repeats, device)
            if not options.json:
                told = ", ".join(f"{name} {value:,.0f}" for name, value in row.items())
                print(f"{torso}, {n} simulators: {told} µs", flush=True)
    m = machine.describe()
    print(json.dumps({**results, "machine": m}) if options.json else f"on {m['gpu'] or m['cpu']}, torch {m['torch']}")


if __name__ == "__main__":
    run(main, Options, __doc__)
