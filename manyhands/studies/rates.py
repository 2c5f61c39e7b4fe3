"""Studies of speed: where the time goes, and what more width, shards, workers or simulators do to it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from manyhands import machine
from manyhands.bench import bench, team_rate
from manyhands.build import Custom
from manyhands.config import Recipe, load_recipe
from manyhands.nets.flat import flatten
from manyhands.plan.measure import measure
from manyhands.plan.meetings import served
from manyhands.plan.model import Machines
from manyhands.plan.show import plan
from manyhands.studies.study import Desk, Finding, Points


def gradient_s(size: int, times: int = 5) -> float:
    """A batch of 32 through three square layers of about that many parameters: forward and backward."""
    width = max(int((size / 3) ** 0.5), 1)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(3)]
    model = flatten(torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]))
    x, seconds = torch.randn(32, width), []
    for _ in range(times + 1):
        begin = time.perf_counter()
        model.gradient.zero_()
        (model.net(x) ** 2).mean().backward()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def timing(desk: Desk) -> Finding:
    """Moving the model, computing a gradient, applying it."""
    sizes = (100_000, 400_000, 1_687_719) if desk.quick else (100_000, 400_000, 1_687_719, 5_000_000, 15_000_000, 30_000_000)
    told = [served(load_recipe("snake-downpour"), size) for size in sizes]
    series: dict[str, Points] = {"comms": [], "gradient (batch of 32)": [], "latency (the server's update)": []}
    for size, row in zip(sizes, told, strict=True):
        series["comms"].append([size, row["comms_ms"]])
        series["gradient (batch of 32)"].append([size, 1e3 * gradient_s(size)])
        series["latency (the server's update)"].append([size, row["update_ms"]])
    return Finding("parameters", "milliseconds", series, log="xy")


def time_usage(desk: Desk) -> Finding:
    """On Pong; quick: 8 simulators, a few seconds."""
    small: dict[str, Any] = {"sampler": {"num_envs": 8}} if desk.quick else {}
    named = {"nips": "paac-pong", "nature": "paac-nature-pong"}
    series: dict[str, Points] = {}
    for number, (network, recipe) in enumerate(named.items()):
        desk.say(f"{network} network")
        told = bench(load_recipe(recipe, small), Custom(), 4.0 if desk.quick else 20.0)
        for part, share in told["time"].items():
            series.setdefault(part, []).append([number, share])
    return Finding("network", "share of the time", series, kind="bars", labels=list(named))


def _rates(desk: Desk, recipes: dict[float, Recipe]) -> Points:
    points = []
    for x, recipe in recipes.items():
        desk.say(f"{x:g}")
        points.append([x, team_rate(recipe, Custom(), 4.0 if desk.quick else 20.0)])
    return points


def widths(desk: Desk) -> Finding:
    recipes = {float(h): load_recipe("ba3c-snake", {"network": {"hidden": [h]}}) for h in (16, 32, 64, 128, 256)}
    return Finding("units of the fully connected layer", "steps per second", {"ba3c-snake": _rates(desk, recipes)}, log="x")


def shards(desk: Desk) -> Finding:
    recipes = {float(n): load_recipe("ba3c-snake", {"store": {"shards": n}}) for n in (1, 2, 4)}
    return Finding("parameter servers", "steps per second", {"ba3c-snake": _rates(desk, recipes)})


def speedup(desk: Desk) -> Finding:
    """Measured here, where learners share the cores; and predicted for a machine each."""
    recipes = {}
    for n in (1, 2, 4):
        changes = {"topology": {"learners": n}, "store": {"gather": max(round(0.67 * n), 1)}}
        recipes[float(n)] = load_recipe("ba3c-snake", changes)
    series = {f"measured, {machine.cores()} cores together": _rates(desk, recipes)}
    recipe = load_recipe("ba3c-snake")
    measured = measure(recipe, {1})
    far = plan(measured, recipe, [1, 2, 4, 8, 16, 32, 64], Machines(1, 1, 1.25e9, 1e-4), 1e6)
    series["predicted, a core and a machine each"] = [[row["learners"], row["steps_per_s"]] for row in far["rows"]]
    return Finding("learners", "steps per second", series, log="xy")


def simulators(desk: Desk) -> Finding:
    """Sampling without learning, on Pong."""
    series: dict[str, Points] = {"with inference": [], "simulators alone": []}
    for each in (1, 2, 4, 8) if desk.quick else (1, 2, 4, 8, 16, 32):
        desk.say(f"{each} for each core")
        changes = {"sampler": {"num_envs": each * machine.cores(), "horizon": 16, "kind": "batched", "decorrelate_steps": 0}}
        recipe = load_recipe("pong-ppo", {"network": {"torso": "nips"}, "memory": {"minibatches": 1, "epochs": 1}, **changes})
        told = bench(recipe, Custom(), 3.0 if desk.quick else 15.0)
        series["with inference"].append([each, told["sampling_only_steps_per_s"]])
        series["simulators alone"].append([each, told["simulator_only_steps_per_s"]])
    return Finding("simulators for each core", "steps per second", series, log="x")
