"""The replay of one million Atari transitions: bytes, time to draw a batch, and that against the update it feeds.

    python benchmarks/replay.py [--json] [--capacity 1_000_000] [--device cpu|cuda] [--batches 32 512]

The ring is filled with noise by the same add() that training uses. The update is that of the recipe which such draws feed:
uniform ones pong-dqn-512, prioritized ones pong-rainbow-512 (and their new priorities are part of it).
"""

from __future__ import annotations

import manyhands  # noqa: F401 – before torch: it chooses the OpenMP runtime, as in training

# isort: split
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from script import run

from manyhands import machine
from manyhands.build import Custom, make_model, place_threads
from manyhands.config import Recipe, load_recipe
from manyhands.learner import Learner
from manyhands.memory.replay import Replay, ReplayConfig, replay_bytes
from manyhands.stores.local import LocalStore
from manyhands.types import EnvSpec, Rollout

ENVS, SLOTS = 128, 64
RECIPES = {"uniform": "pong-dqn-512", "prioritized": "pong-rainbow-512"}
SPEC = EnvSpec("ALE/Pong-v5", (1, 84, 84), "uint8", 4, 6)


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    capacity: int = 1_000_000
    """Transitions."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the replay and the network lie; auto: cuda if there is one."""
    batches: tuple[int, ...] = (32, 512)
    """Sizes to draw."""
    repeats: int = 20
    """Draws and updates of each size; the median counts."""


def noise(device: torch.device, seed: int) -> Rollout:
    generator = torch.Generator(device).manual_seed(seed)
    rows = SLOTS + SPEC.stack
    ended = torch.rand(SLOTS, ENVS, device=device, generator=generator) < 0.002
    zeros = torch.zeros(SLOTS, ENVS, device=device)
    return Rollout(
        obs=torch.randint(0, 256, (rows, ENVS, 1, 84, 84), dtype=torch.uint8, device=device, generator=generator),
        first=torch.zeros(rows, ENVS, dtype=torch.bool, device=device),
        action=zeros.long(),
        reward=zeros,
        discount=0.99 * (~ended).float(),
        cut=ended,
        weight=torch.ones_like(zeros),
        extras={},
        version=zeros.long(),
        steps=SLOTS * ENVS,
        stack=SPEC.stack,
    )


def median_ms(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[3:])


class Nobody:
    """A sampler for a learner that only updates."""

    epsilon = torch.zeros(0)


def measure(replay: Replay, recipe: Recipe, batch: int, repeats: int, device: torch.device) -> dict[str, Any]:
    algorithm = recipe.algorithm
    model = make_model(recipe, algorithm, SPEC, device, Custom())
    learner = Learner(algorithm, model, Nobody(), replay, LocalStore(model, recipe.rule, 10**9), 10**9)  # type: ignore[arg-type]
    data = replay.draw()
    draw_ms = median_ms(replay.draw, repeats, device)
    update_ms = median_ms(lambda: learner._begin_update(data)(), repeats, device)
    return {
        "draw_ms": round(draw_ms, 3),
        "samples_per_s": round(batch / draw_ms * 1e3),
        "update_ms": round(update_ms, 3),
        "draw_to_update": round(draw_ms / update_ms, 3),
    }


def main(options: Options) -> None:
    change = {} if options.device == "auto" else {"device": options.device}
    recipes = {kind: load_recipe(name, change) for kind, name in RECIPES.items()}
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    place_threads(recipes["uniform"], device)
    rollouts = [noise(device, seed) for seed in range(2)]
    result: dict[str, Any] = {
        "capacity": options.capacity,
        "device": device.type,
        "naive_bytes": options.capacity * 2 * 4 * 84 * 84,
    }
    for kind, recipe in recipes.items():
        row: dict[str, Any] = {}
        for batch in options.batches:
            config = ReplayConfig(options.capacity, batch, 1.0, warmup_steps=1, n_step=3, prioritized=kind == "prioritized")
            replay = Replay(config, SPEC, ENVS, device, device, 0, 10**9)
            begin = time.perf_counter()
            adds = -(-config.slots(ENVS) // SLOTS) + 1
            for i in range(adds):
                replay.add(rollouts[i % 2])
            row["bytes"] = replay_bytes(config, SPEC, ENVS)
            row["add_steps_per_s"] = round(adds * SLOTS * ENVS / (time.perf_counter() - begin))
            row[str(batch)] = measure(replay, recipe, batch, options.repeats, device)
            del replay
        result[kind] = row
        if not options.json:
            sizes = f"{row['bytes'] / 1e9:.2f} GB (naive {result['naive_bytes'] / 1e9:.0f})"
            print(f"{kind}: {sizes}, {row['add_steps_per_s']:,} steps/s added")
            for batch in options.batches:
                r = row[str(batch)]
                print(
                    f"  batch {batch}: {r['draw_ms']} ms, {r['samples_per_s']:,} samples/s, "
                    f"{r['draw_to_update']:.0%} of the update's {r['update_ms']} ms"
                )
    m = machine.describe()
    print(json.dumps({**result, "machine": m})) if options.json else print(f"on {m['gpu'] or m['cpu']}, torch {m['torch']}")


if __name__ == "__main__":
    run(main, Options, __doc__)
