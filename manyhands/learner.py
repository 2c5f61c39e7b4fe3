"""The one loop that joins sampler, memory, algorithm and store. Every topology runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.actor import Actor
from manyhands.gradient import CapturedGradient, Gradient
from manyhands.graphs import on
from manyhands.nets.flat import Model
from manyhands.types import Algorithm, Clock, GradientInfo, Memory, Rollout, Sampler, Store


class Learner:
    """run() yields after every rollout and its updates: then nothing is in flight, and state() is exact."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: Model,
        sampler: Sampler,
        memory: Memory,
        store: Store,
        total_steps: int,
        capture: bool = True,
        keep_acting: bool = False,
        act_with_copy: bool = False,
        act_aside: bool = False,
        explore: Callable[[Clock], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.memory = memory
        self.store = store
        self._total_steps = total_steps
        behind = act_aside and explore is not None
        self.actor = Actor(algorithm, model, keep_acting, act_with_copy or model.parameters.is_cuda, act_aside, behind)
        self._target = Target(model, algorithm) if hasattr(algorithm, "target_period") else None
        captured = capture and model.parameters.is_cuda
        self._gradient = (CapturedGradient if captured else Gradient)(algorithm, model, self._target)
        # Where a rollout is learned from while the next is sampled an update is finished in the pause after the one in which it
        # was begun: by then a GPU has its gradient, and a store that waits for that does not keep simulators waiting.
        self._finish_later = act_aside and not behind
        self._begun: Callable[[], None] | None = None
        self._explore = explore if len(sampler.epsilon) else None  # who has no simulators explores nothing
        self._epsilon = 0.0  # the mean of all simulators, in this rollout
        self.clock = Clock()
        self.sums = MetricSums()
        self.learn_seconds = 0.0
        # False: rollouts are sampled and forgotten, to see how fast that alone is. What is learned afterwards is of no use.
        self.learning = True

    def run(self) -> Iterator[Rollout | None]:
        """None between sends and updates, of interest to a stop in a hurry; a rollout when it has been added."""
        self._begin_rollout()
        for rollout in self.sampler.run(self.actor):
            if not self.learning:
                self.actor.forget_kept()
                yield rollout
                continue
            begin = time.perf_counter()
            self._finish_update()
            if rollout is not None:
                paid = self.store.count(rollout.steps)
                self.clock = self.store.clock
                self.memory.add(rollout if paid == rollout.steps else replace(rollout, steps=paid))
                self._note(rollout)
            # While the simulators are busy a replay hands out its share of what is owed; a fresh memory has nothing then.
            while (batch := self.memory.next()) is not None:
                self._finish_update()
                self._begun = self._begin_update(batch)
                if rollout is not None or not self._finish_later:
                    self._finish_update()
                self.learn_seconds += time.perf_counter() - begin
                yield None
                begin = time.perf_counter()
            if rollout is not None:
                self._begin_rollout()
            self.learn_seconds += time.perf_counter() - begin
            yield rollout

    def _begin_rollout(self) -> None:
        self.clock = self.store.refresh()
        self.actor.refresh(self.clock.updates)
        if self._explore is not None:
            epsilon = self._explore(self.clock)
            self._epsilon = float(epsilon.mean())
            with on(self.actor.stream):
                self.sampler.epsilon.copy_(epsilon, non_blocking=True)

    def _note(self, rollout: Rollout) -> None:
        """What the memory holds, the mean ε, and how many updates old the policy is whose actions are about to be learned from,
        where that is not always 0."""
        self.sums.add(self.memory.metrics())
        if self._explore is not None:
            self.sums.add({"epsilon": self._epsilon})
        if rollout.queue is not None:
            self.sums.add({"policy_lag": self.clock.updates - rollout.version.float().mean(), "queue": rollout.queue})
        elif self.clock.updates > self.actor.version:  # which has acted in all of it
            self.sums.add({"policy_lag": float(self.clock.updates - self.actor.version)})

    def _begin_update(self, batch: Any) -> Callable[[], None]:
        """Returns what finishes it."""
        begin, version = time.perf_counter(), self.clock.updates
        progress = min(self.clock.steps / self._total_steps, 1.0)
        if self._target:
            self._target.follow(self.clock)
        loss = self._gradient(batch, progress, self.actor.take_kept())
        computed = time.perf_counter()

        def finish() -> None:
            receipt = self.store.step(GradientInfo(version, len(batch.weight), loss.value.detach()))
            self.clock = receipt.clock
            if loss.priority is not None:
                self.memory.feedback(batch.keys, loss.priority)
            self.sums.add({**loss.metrics, **receipt.metrics})
            if "comms_ms" in receipt.metrics:  # the third of the papers' lines
                self.sums.add({"gradient_ms": 1e3 * (computed - begin)})

        return finish

    def _finish_update(self) -> None:
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun()

    def state(self, mid_rollout: bool = False) -> dict:
        """Without the store's, which may be everybody's."""
        if mid_rollout:  # what was begun is given up: to finish it may take others, who have stopped elsewhere
            self._begun = None
        assert self._begun is None
        return {
            "sampler": self.sampler.state(mid_rollout),
            "memory": self.memory.state(),
            "sums": self.sums.state(),
            "actor": self.actor.state(),
            **({"target": self._target.state()} if self._target else {}),
        }

    def load(self, state: dict) -> None:
        self.sampler.load(state["sampler"])
        self.memory.load(state["memory"])
        self.sums.load(state["sums"])
        self.actor.load(state.get("actor", {}))
        if self._target:
            self._target.load(state["target"])

    def reset_timers(self) -> None:
        self.learn_seconds = 0.0
        self.sampler.seconds.update(dict.fromkeys(self.sampler.seconds, 0.0))

    def close(self) -> None:
        self.sampler.close()
        self.store.close()


class Target:
    """The network whose values are bootstrapped from: a copy of the online one, renewed whenever a period has passed."""

    def __init__(self, model: Model, algorithm: Any) -> None:
        self._source = model.parameters
        self._model = model.replica()
        self._period, self._unit = algorithm.target_period, algorithm.target_unit
        self._renewed = 0  # periods seen

    @property
    def net(self) -> nn.Module:
        return self._model.net

    def follow(self, clock: Clock) -> None:
        period = getattr(clock, self._unit) // self._period
        if period > self._renewed:
            self._model.parameters.copy_(self._source)
            self._renewed = period

    def state(self) -> dict:
        return {"parameters": self._model.parameters, "renewed": self._renewed}

    def load(self, state: dict) -> None:
        self._model.parameters.copy_(state["parameters"])
        self._renewed = state["renewed"]


class MetricSums:
    """Means over the updates since the last report, added up on the device without waiting for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        here, there = [], []
        for name, value in metrics.items():
            so_far = self._sums.get(name, 0.0)
            if isinstance(so_far, Tensor) and isinstance(value, Tensor):
                here.append(so_far)
                there.append(value)
            else:
                self._sums[name] = so_far + value
            self._counts[name] = self._counts.get(name, 0) + 1
        if here:  # one launch for all of them
            torch._foreach_add_(here, there)

    def take(self) -> dict[str, float]:
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means

    def merge(self, other: dict) -> None:
        """Another's state()."""
        for name, total in other["sums"].items():
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0) + other["counts"][name]

    def state(self) -> dict:
        return {"sums": {k: float(v) for k, v in self._sums.items()}, "counts": dict(self._counts)}

    def load(self, state: dict) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
