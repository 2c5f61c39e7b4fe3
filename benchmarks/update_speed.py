"""One update, from a batch that is there to new parameters, in every way it could be computed: kernel by kernel, captured as a
CUDA graph, compiled by torch, compiled and captured; in float32, with tf32, with bf16. Milliseconds, medians.

    python benchmarks/update_speed.py [--json] [--rows PPO-256 …] [--ways captured compiled …]

On a CPU there are neither graphs nor other precisions; what is left is compared there.
"""

from __future__ import annotations

import manyhands  # noqa: F401 – before torch: it chooses the OpenMP runtime, as in training

# isort: split
import json
import sys
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from replay import median_ms
from script import run

from manyhands import machine
from manyhands.build import Custom, find_device, make_model, place_threads
from manyhands.config import Recipe, load_recipe
from manyhands.gradient import CapturedGradient, Gradient
from manyhands.learner import Target
from manyhands.stores.local import LocalStore
from manyhands.types import EnvSpec, GradientInfo, PolicyBatch, TransitionBatch, UsageError

SPEC = EnvSpec("ALE/Pong-v5", (1, 84, 84), "uint8", 4, 6, 4)
Row = Literal["PPO-256", "PPO-1024", "PPO-impala-512", "A2C-320", "DQN-32", "DQN-512", "Rainbow-512", "Categorical-2048"]
Way = Literal["kernels", "captured", "compiled", "compiled+captured"]
Precision = Literal["float32", "tf32", "bf16"]

# name -> (recipe, its network, samples an update)
ROWS: dict[Row, tuple[str, str, int]] = {
    "PPO-256": ("pong-fast", "nature", 256),
    "PPO-1024": ("pong-ppo", "nips", 1024),
    "PPO-impala-512": ("breakout-fast", "impala", 512),
    "A2C-320": ("pong-a2c", "nips", 320),
    "DQN-32": ("pong-dqn", "nature", 32),
    "DQN-512": ("pong-dqn-512", "nature", 512),
    "Rainbow-512": ("pong-rainbow-512", "nature", 512),
    "Categorical-2048": ("pong-categorical-2048", "nature", 2048),
}
PRECISIONS: dict[Precision, dict[str, bool]] = {
    "float32": {"tf32": False, "bf16": False},
    "tf32": {"tf32": True, "bf16": False},
    "bf16": {"tf32": True, "bf16": True},
}


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    rows: list[Row] = field(default_factory=lambda: list(ROWS))
    """Which updates."""
    ways: list[Way] = field(default_factory=lambda: list(get_args(Way)))
    """Ways to compute them."""
    precisions: list[Precision] = field(default_factory=lambda: list(PRECISIONS))
    """Of products and convolutions."""
    deterministic: bool = True
    """Only convolutions that add in the same order each time."""
    repeats: int = 60
    """Updates of which the median is taken."""
    device: str = "auto"
    """cpu, cuda or auto."""


def some_batch(recipe: Recipe, n: int, device: torch.device) -> PolicyBatch | TransitionBatch:
    make = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, n, 84, 84, 4), dtype=torch.uint8, generator=make).to(device).permute(0, 1, 4, 2, 3)
    numbers = torch.rand(5, n, generator=make).to(device)
    action = torch.randint(0, SPEC.actions, (n,), generator=make).to(device)
    ones = torch.ones(n, device=device)
    if hasattr(recipe.algorithm, "target_period"):
        return TransitionBatch(images[0], action, numbers[0], 0.99 * ones, images[1], ones, action)
    return PolicyBatch(images[0], action, numbers[0].log(), numbers[1], numbers[2], numbers[3], ones)


def measure(name: Row, precision: Precision, way: Way, options: Options, device: torch.device) -> float:
    recipe_name, torso, n = ROWS[name]
    changes = {"network": {"torso": torso}, "deterministic": options.deterministic, **PRECISIONS[precision]}
    recipe = load_recipe(recipe_name, changes)
    place_threads(recipe, device)
    model = make_model(recipe, recipe.algorithm, SPEC, device, Custom())
    target = Target(model, recipe.algorithm) if hasattr(recipe.algorithm, "target_period") else None
    store = LocalStore(model, recipe.rule, 10**9, capture="captured" in way)
    if "compiled" in way:
        torch.compiler.reset()  # it stops compiling a function after some variants
        model = replace(model, net=torch.compile(model.net))  # type: ignore[arg-type]
    gradient = (CapturedGradient if "captured" in way else Gradient)(recipe.algorithm, model, target)
    batch = some_batch(recipe, n, device)

    def update() -> None:
        loss = gradient(batch, 0.5, [])
        store.step(GradientInfo(0, n, loss.value.detach()))

    return round(median_ms(update, options.repeats, device), 3)


def main(options: Options) -> None:
    device = find_device(options.device)
    if options.repeats < 1:
        raise UsageError(f"--repeats {options.repeats}: must be at least 1")
    on_gpu = device.type == "cuda"
    ways = [way for way in options.ways if on_gpu or "captured" not in way]
    precisions = [name for name in options.precisions if on_gpu or name == "float32"]
    left_out = sorted({*options.ways, *options.precisions} - {*ways, *precisions})
    if left_out:
        print(f"on {device} there is no {', '.join(left_out)}", file=sys.stderr)
    if not ways or not precisions or not options.rows:
        raise UsageError("nothing is left to measure")
    results: dict[str, dict[str, dict[str, float]]] = {}
    if not options.json:
        print(f"{'ms an update':<18} {'':<9}" + "".join(f"{way:>19}" for way in ways))
    for name in options.rows:
        for precision in precisions:
            row = results.setdefault(name, {}).setdefault(precision, {})
            told = f"{name:<18} {precision:<9}"
            for way in ways:
                row[way] = measure(name, precision, way, options, device)
                if not options.json:
                    print(f"{told}{row[way]:>19.3f}", end="", flush=True)
                    told = ""
            if not options.json:
                print()
    m = machine.describe()
    print(json.dumps({**results, "machine": m}) if options.json else f"on {m['gpu'] or m['cpu']}, torch {m['torch']}")


if __name__ == "__main__":
    run(main, Options, __doc__)
