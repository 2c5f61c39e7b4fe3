"""Studies of what an update is made of: do larger batches say more, how long is a step, does it matter who fills the replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from manyhands.build import Custom, make_group, make_learner, make_model
from manyhands.config import Recipe, load_recipe
from manyhands.evaluate import Player, play_episodes
from manyhands.gradient import Gradient
from manyhands.learner import Learner, Target
from manyhands.nets.flat import Model
from manyhands.protocols import PLAIN, evaluation_env
from manyhands.stores.local import LocalStore
from manyhands.studies.study import Desk, Finding, Points
from manyhands.types import GradientInfo

CPU = torch.device("cpu")


def _half(batch: Any) -> Any:
    n = len(batch.weight) // 2
    return replace(batch, **{f.name: getattr(batch, f.name)[:n] for f in fields(batch)})


def _rollouts(learner: Learner, steps: int) -> Iterator[None]:
    for rollout in learner.run():
        if rollout is not None:
            yield
            if learner.clock.steps >= steps:
                return


class Halves:
    """Computes gradients as they are, and notes the cosine between each and that of the first half of its batch."""

    def __init__(self, learner: Learner) -> None:
        self._gradient, self._model = learner._gradient, learner.model
        self.cosines: list[float] = []

    def __call__(self, batch: Any, progress: float, known: Any) -> Any:
        self._gradient(_half(batch), progress, known)
        half = self._model.gradient.clone()
        loss = self._gradient(batch, progress, known)
        self.cosines.append(float(torch.nn.functional.cosine_similarity(half, self._model.gradient, dim=0)))
        return loss


def saturation(desk: Desk) -> Finding:
    """The cosine is 1/√2 where the halves of a batch are orthogonal, 1 where they say the same."""
    series: dict[str, Points] = {}
    steps = 60_000 if desk.quick else 150_000
    for size in (64, 256, 1024):
        desk.say(f"batches of {size}")
        sampler = load_recipe("cartpole-ppo").sampler
        minibatches = sampler.num_envs * sampler.horizon // size
        recipe = load_recipe("cartpole-ppo", {"device": "cpu", "memory": {"minibatches": minibatches}})
        learner = make_learner(recipe, Custom())
        halves = Halves(learner)
        learner._gradient = halves  # type: ignore[assignment]
        points: Points = []
        try:
            for _ in _rollouts(learner, steps):
                points.append([learner.clock.steps, sum(halves.cosines) / len(halves.cosines)])
                halves.cosines.clear()
        finally:
            learner.close()
        series[f"batch {size}"] = points
    return Finding("steps", "cosine of half and whole batch", series, level=1 / math.sqrt(2), note="dashed: orthogonal halves")


def norms(desk: Desk) -> Finding:
    """L2 norms of each layer's parameters, gradient and step."""
    learner = make_learner(load_recipe("cartpole-ppo", {"device": "cpu"}), Custom())
    model, store = learner.model, learner.store
    series: dict[str, Points] = {}
    step = store.step

    def watched(info: GradientInfo) -> Any:
        before = model.parameters.clone()
        receipt = step(info)
        if receipt.clock.updates % 10 == 0:
            vectors = {"parameters": before, "gradient": model.gradient, "step": model.parameters - before}
            for name, piece in model.named_slices().items():
                if name.endswith("weight"):
                    for what, vector in vectors.items():
                        key = f"{what}, {name.removesuffix('.weight')}"
                        series.setdefault(key, []).append([receipt.clock.updates, max(float(vector[piece].norm()), 1e-12)])
        return receipt

    store.step = watched  # type: ignore[method-assign]
    try:
        for _ in _rollouts(learner, 60_000 if desk.quick else 150_000):
            pass
    finally:
        learner.close()
    return Finding("updates", "L2 norm", dict(sorted(series.items())), log="y")


class Secondary:
    """A second network with the same beginning, which learns from the first one's replay only, in batches of another size."""

    def __init__(self, recipe: Recipe, learner: Learner, batch: int) -> None:
        algorithm: Any = recipe.algorithm
        self.model = make_model(recipe, algorithm, learner.sampler.spec, CPU, Custom())
        self._store = LocalStore(self.model, recipe.rule, recipe.total_steps)
        self._target = Target(self.model, algorithm)
        self._gradient = Gradient(algorithm, self.model, self._target)
        self._memory: Any = learner.memory
        self._batch, self._total, self._owed = batch, recipe.total_steps, 0.0

    def follow(self, samples: float, steps: int) -> None:
        """As many samples as the first has learned from meanwhile."""
        self._owed += samples
        self._store.count(steps)
        while self._owed >= self._batch:
            self._owed -= self._batch
            clock = self._store.clock
            self._target.follow(clock)
            batch = self._memory.draw_some(self._batch)[0]
            loss = self._gradient(batch, min(clock.steps / self._total, 1.0), [])
            self._store.step(GradientInfo(clock.updates, self._batch, loss.value.detach()))


def _score(recipe: Recipe, model: Model, episodes: int) -> float:
    env = evaluation_env(recipe.env, PLAIN)
    group = make_group(env, episodes, CPU)
    try:
        player = Player(recipe.algorithm, model, group, "greedy", 0.0, 1_000_000)
        return sum(score for score, _, _ in play_episodes(player, episodes, 1)) / episodes
    finally:
        group.close()


def secondary(desk: Desk) -> Finding:
    """Does a large batch learn less because of what it computes, or because of what it then sees?"""
    pairs = ((32, 512), (512, 32), (128, 128)) if desk.quick else ((64, 2048), (2048, 64), (256, 256))
    steps, every = (30_000, 5_000) if desk.quick else (150_000, 10_000)
    base = load_recipe("cartpole-dqn")
    series: dict[str, Points] = {}
    for first, second in pairs:
        desk.say(f"batches of {first}, the secondary learner's of {second}")
        recipe = load_recipe("cartpole-dqn", {"device": "cpu", "memory": {"batch": first}, "total_steps": steps})
        other = replace(recipe, rule=replace(recipe.rule, learning_rate=base.rule.learning_rate))
        learner = make_learner(recipe, Custom())
        follower = Secondary(other, learner, second)
        names = (f"batch {first}", f"batch {second}, from the replay of {first}")
        points: dict[str, Points] = {name: [] for name in names}
        seen_steps = seen_updates = 0
        try:
            for _ in _rollouts(learner, steps):
                clock = learner.clock
                follower.follow((clock.updates - seen_updates) * first, clock.steps - seen_steps)
                if clock.steps // every > seen_steps // every:
                    for name, model in zip(names, (learner.model, follower.model), strict=True):
                        points[name].append([clock.steps, _score(recipe, model, 10)])
                seen_steps, seen_updates = clock.steps, clock.updates
        finally:
            learner.close()
        series.update(points)
    return Finding("steps", "greedy return (10 games)", series)
