"""A shard of the global replay: some actors' simulators, each actor in rings of its own.

The capacity is divided among the actors, so it does not depend on how many there are. Who draws learns how much lies here, so
that draws can be in proportion to what each shard has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.maths import random
from manyhands.memory.replay import Replay, ReplayConfig
from manyhands.types import EnvSpec, Rollout

SENT = ("obs", "first", "action", "reward", "discount", "cut", "weight")  # of a rollout


class ReplayServer:
    def __init__(
        self,
        config: ReplayConfig,
        spec: EnvSpec,
        num_envs: int,
        total_steps: int,
        seed: int,
        life: int,
        before: tuple[int, int] = (0, 0),
    ) -> None:
        """config: of one actor's share; before: what was added to and drawn from those whose place this one takes."""
        torch.set_num_threads(1)
        self._config, self._spec, self._num_envs, self._total_steps = config, spec, num_envs, total_steps
        self._seed, self._life = seed, life
        self._rings: dict[int, Replay] = {}  # by actor
        self._last: dict[int, tuple[int, int]] = {}  # life and sequence number of each actor's newest rollout
        self._added, self._drawn = before
        self._draws = 0
        self._free = False  # actors need not wait for learners

    def add(self, actor: int, life: int, sequence: int, arrays: dict[str, np.ndarray], steps: int) -> dict[str, Any]:
        """A rollout; one that was sent twice is added once."""
        if (life, sequence) > self._last.get(actor, (-1, -1)):
            self._last[actor] = (life, sequence)
            tensors: dict[str, Any] = {name: torch.tensor(arrays[name]) for name in SENT}
            empty = torch.empty(0)
            self._ring(actor).add(Rollout(**tensors, extras={}, version=empty, steps=steps, stack=self._spec.stack))
            self._added += steps
        return self.report()

    def _ring(self, actor: int) -> Replay:
        if actor not in self._rings:
            cpu = torch.device("cpu")
            seed = random.key(self._seed, actor, self._life)
            self._rings[actor] = Replay(self._config, self._spec, self._num_envs, cpu, cpu, seed, self._total_steps)
        return self._rings[actor]

    def sample(self, n: int) -> dict[str, Any]:
        """n transitions, in proportion to what each actor has here; fewer than n only if there are none at all."""
        actors = [actor for actor in sorted(self._rings) if self._rings[actor].mass > 0]
        if not actors or n == 0:
            return {**self.report(), "arrays": {}}
        masses = np.array([self._rings[actor].mass for actor in actors])
        generator = np.random.default_rng([self._seed, self._life, self._draws])
        self._draws += 1
        self._drawn += n
        parts: list[dict[str, Tensor]] = []
        for actor, count in zip(actors, generator.multinomial(n, masses / masses.sum()), strict=True):
            if count:
                batch, priority, slots = self._rings[actor].draw_some(int(count))
                who = torch.full((int(count),), actor)
                parts.append({**vars(batch), "priority": priority.double(), "slots": slots, "actor": who})
        arrays = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
        return {**self.report(), "arrays": arrays}

    def feedback(self, life: int, actor: np.ndarray, keys: np.ndarray, slots: np.ndarray, priority: np.ndarray) -> None:
        if life != self._life:  # drawn from the one before us
            return
        for number in np.unique(actor):
            mine = actor == number
            if int(number) in self._rings:
                at = [torch.tensor(values[mine]) for values in (keys, slots, priority)]
                self._rings[int(number)].feedback_at(*at)

    def report(self) -> dict[str, Any]:
        mass, size = (sum(f(ring) for ring in self._rings.values()) for f in (lambda r: r.mass, len))
        counts = {"added": self._added, "drawn": self._drawn}
        return {"life": self._life, **counts, "mass": mass, "size": size, "free": self._free}

    def relax(self, free: bool) -> None:
        """Whether actors may run ahead: when learners have stopped for a while, nobody must wait for them."""
        self._free = free

    def close(self) -> None:
        pass
