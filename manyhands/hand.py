"""A hand: one learner with its simulators, made and asked by the team, here or in a process of its own."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from manyhands.build import Custom, Meeting, make_learner
from manyhands.config import Recipe
from manyhands.hosts.process import GaveUp, gave_up
from manyhands.memory.remote import RemoteReplay
from manyhands.memory.replay import ReplayConfig
from manyhands.types import Progress, Rollout, RunError, Seat

A_WHILE_S = 0.5  # how long a learner without simulators works before it says how far it is


class Hand:
    def __init__(self, recipe: Recipe, custom: Custom, seat: Seat, meeting: Meeting) -> None:
        self._recipe, self._total_steps = recipe, recipe.total_steps
        self._travels = meeting.apart  # what is told goes to another process
        self.learner = make_learner(recipe, custom, seat, meeting)
        self._stream = self.learner.run()
        self._gave_up = False
        self._acts = seat.acts

    def load(self, state: dict | None, store: dict | None) -> None:
        """What this hand had, if anything, and the parameters, if they are its own."""
        if state is not None:
            self.learner.load(state)
        if store is not None:
            self.learner.store.load(store)
        self.learner.clock = self.learner.store.clock

    def advance(self, rollouts: int, at_most_s: float = math.inf) -> Progress | None:
        """Samples and learns from so many rollouts, or until the time is over. None: stopped in the middle, in a hurry; only
        saving makes sense then."""
        learner, episodes = self.learner, []
        until = time.monotonic() + at_most_s
        try:
            if not self._acts:
                self._learn_for_a_while()
            memory = learner.memory
            if isinstance(memory, RemoteReplay):
                memory.look()
            for _ in range(rollouts if self._acts else 0):
                if isinstance(memory, RemoteReplay) and memory.paused:
                    break
                if learner.clock.steps >= self._total_steps or time.monotonic() >= until:
                    break
                episodes += self._next_rollout().episodes
        except GaveUp:
            self._gave_up = True
            return None
        except torch.cuda.OutOfMemoryError as error:
            raise RunError(_out_of_memory(self._recipe)) from error
        learner.store.flush()
        sums = self.take_sums() if self._travels else None
        return Progress(learner.clock, episodes, learner.store.refused, learner.sampler.replaced_workers, sums)

    def _next_rollout(self) -> Rollout:
        if self._gave_up:
            raise GaveUp
        for rollout in self._stream:
            if rollout is not None:
                return rollout
            if gave_up():
                raise GaveUp
        raise AssertionError("a learner's stream has no end")

    def _learn_for_a_while(self) -> None:
        """From what others did. The clock is looked at in between: they may be done while we wait for them."""
        if self._gave_up:
            raise GaveUp
        until = time.monotonic() + A_WHILE_S
        for _ in self._stream:
            if gave_up():
                raise GaveUp
            if time.monotonic() >= until:
                break
        self.learner.clock = self.learner.store.refresh()

    def take_sums(self) -> dict[str, Any]:
        """Sums of metrics since the last call, to be averaged over all hands."""
        sums = self.learner.sums.state()
        self.learner.sums.take()
        return {**sums, "staleness": self.learner.store.take_staleness()}

    def state(self) -> dict:
        """Everything but the store, which may be everybody's."""
        return self._told(self.learner.state(mid_rollout=self._gave_up))

    def store_state(self) -> dict:
        return self._told(self.learner.store.state())

    def _told(self, state: dict) -> dict:
        return _on_cpu(state) if self._travels else state

    def close(self) -> None:
        self.learner.close()


def _out_of_memory(recipe: Recipe) -> str:
    peak = torch.cuda.max_memory_allocated() / 2**30
    replay = "memory.capacity or memory.batch, or set memory.device = 'cpu'"
    fresh = "sampler.num_envs or sampler.horizon, or raise memory.minibatches"
    levers = replay if isinstance(recipe.memory, ReplayConfig) else fresh
    return f"the GPU ran out of memory (peak {peak:.1f} GiB). The last checkpoint is good; lower {levers}"


def _on_cpu(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _on_cpu(value) for name, value in tree.items()}
    return tree.cpu() if isinstance(tree, torch.Tensor) else tree
