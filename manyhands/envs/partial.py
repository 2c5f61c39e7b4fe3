"""Simulators that are served as soon as a few of them are ready, in whatever order they finish.

Two kinds: ale-py's own partial batches, and several groups of which any ready one is next.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any

import numpy as np

from manyhands.envs.atari import AtariEnv, AtariGroup
from manyhands.types import EnvGroup, Step


class AtariPart(AtariGroup):
    """serve() gives the next `batch` emulators that are ready; answer() must follow before the next serve() (ale-py would
    lose them otherwise)."""

    def __init__(self, config: AtariEnv, num_envs: int, batch: int) -> None:
        super().__init__(config.resolved(), num_envs, batch=batch)
        self._seen = np.zeros(num_envs, bool)
        self._waiting: tuple[np.ndarray, Step] | None = None
        self._ids = np.zeros(0, np.int64)

    def begin(self, seeds: list[int]) -> None:
        """Every simulator's first answer is its reset."""
        obs, info = self._env.reset(seed=np.array(seeds))
        none = np.zeros(len(obs), bool)
        self._waiting = self._arrived(obs, np.zeros(len(obs), np.float32), none, none, info)

    def serve(self) -> tuple[np.ndarray, Step]:
        if self._waiting is not None:
            arrived, self._waiting = self._waiting, None
            return arrived
        self._pending = False
        return self._arrived(*self._env.recv())

    def _arrived(self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> tuple[np.ndarray, Step]:
        ids = self._ids = np.asarray(info["env_id"])
        first = self._ended[ids] | ~self._seen[ids]
        self._seen[ids] = True
        self._ended[ids] = terminated | truncated
        life_lost = (info["lives"] < self._lives[ids]) & ~first
        self._lives[ids] = info["lives"]
        return ids, Step(self._see(obs), reward.astype(np.float32), terminated, truncated, life_lost, first)

    def answer(self, actions: Any) -> None:
        self.send(actions)

    def close(self) -> None:
        """Emulators that are still stepping finish by themselves; nobody waits for the answer."""
        self._pending = False
        super().close()


class AnyOf:
    """Groups in processes of their own (or here, then in turn): whichever has finished is served next."""

    def __init__(self, groups: Sequence[EnvGroup]) -> None:
        self.groups = list(groups)
        self.spec = groups[0].spec
        self.num_envs = sum(group.num_envs for group in groups)
        edges = np.cumsum([0, *(group.num_envs for group in groups)])
        self._ids = [np.arange(a, b) for a, b in itertools.pairwise(edges)]
        self._busy: deque[int] = deque()  # since when, oldest first
        self._begun: deque[tuple[int, Step]] = deque()
        self._served = 0

    @property
    def replaced(self) -> int:
        return sum(getattr(group, "replaced", 0) for group in self.groups)

    def begin(self, seeds: list[int]) -> None:
        for i, group in enumerate(self.groups):
            step = group.reset([seeds[k] for k in self._ids[i]])
            self._begun.append((i, step))

    def serve(self) -> tuple[np.ndarray, Step]:
        if self._begun:
            self._served, step = self._begun.popleft()
            return self._ids[self._served], step
        self._served = self._next_ready()
        self._busy.remove(self._served)
        return self._ids[self._served], self.groups[self._served].recv()

    def _next_ready(self) -> int:
        """A finished group, or the one that has been busy longest: waiting for it has its deadline."""
        pipes = {group.pipe: i for i in self._busy if (group := self.groups[i]) and hasattr(group, "pipe")}
        if len(pipes) == len(self._busy):
            for pipe in connection.wait(list(pipes), 0.5):
                return pipes[pipe]
        return self._busy[0]

    def answer(self, actions: Any) -> None:
        self.groups[self._served].send(actions)
        self._busy.append(self._served)

    def close(self) -> None:
        for group in self.groups:
            group.close()
