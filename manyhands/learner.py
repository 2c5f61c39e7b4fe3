"""The one loop that joins sampler, memory, algorithm and store. Every topology runs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from manyhands.actor import Actor
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
        keep_acting: bool = False,
    ) -> None:
        self._algorithm = algorithm
        self.model = model
        self.sampler = sampler
        self._memory = memory
        self.store = store
        self._total_steps = total_steps
        self.actor = Actor(algorithm, model, keep_acting)
        self.clock = Clock()
        self.sums = MetricSums()
        self.learn_seconds = 0.0

    def run(self) -> Iterator[Rollout | None]:
        """None between sends and updates, of interest to a stop in a hurry; a rollout when it has been learned from."""
        self.clock = self.store.refresh()
        self.actor.refresh(self.clock.updates)
        for rollout in self.sampler.run(self.actor):
            if rollout is not None:
                begin = time.perf_counter()
                self.clock = self.store.refresh(rollout.steps)
                self._memory.add(rollout)
                while (batch := self._memory.next()) is not None:
                    self._update(batch)
                    self.learn_seconds += time.perf_counter() - begin
                    yield None
                    begin = time.perf_counter()
                self.actor.refresh(self.clock.updates)
                self.learn_seconds += time.perf_counter() - begin
            yield rollout

    def _update(self, batch: Any) -> None:
        version = self.clock.updates
        progress = min(self.clock.steps / self._total_steps, 1.0)
        self.model.gradient.zero_()
        net: Any = self.model.net
        if kept := self.actor.take_kept():
            net = partial(net, known=kept)  # acting has done the convolutions: a tenth of A2C's time on a CPU
        loss = self._algorithm.loss(net, None, batch, progress)
        loss.value.backward()
        receipt = self.store.step(GradientInfo(version, samples=len(batch.weight)))
        self.clock = receipt.clock
        self.sums.add({**loss.metrics, **receipt.metrics})

    def state(self, mid_rollout: bool = False) -> dict:
        return {
            "sampler": self.sampler.state(mid_rollout),
            "memory": self._memory.state(),
            "store": self.store.state(),
            "sums": self.sums.state(),
        }

    def load(self, state: dict) -> None:
        self.sampler.load(state["sampler"])
        self._memory.load(state["memory"])
        self.store.load(state["store"])
        self.sums.load(state["sums"])

    def reset_timers(self) -> None:
        self.learn_seconds = 0.0
        self.sampler.seconds.update(dict.fromkeys(self.sampler.seconds, 0.0))

    def close(self) -> None:
        self.sampler.close()


class MetricSums:
    """Means over the updates since the last report, added up on the device without waiting for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: dict[str, Tensor | float]) -> None:
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means

    def state(self) -> dict:
        return {"sums": {k: float(v) for k, v in self._sums.items()}, "counts": dict(self._counts)}

    def load(self, state: dict) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
