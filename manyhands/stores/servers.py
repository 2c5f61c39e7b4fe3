"""Parameters on servers of their own, on this machine or on many: the flat vector split into shards, one server each.

A push answers with the newest parameters, so that a gradient costs one round trip. A server that is lost is replaced, by the
parent, from its last snapshot; whoever needs it waits for that, and its gradients that were meant for the old one are refused.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from manyhands.hosts.lines import Lines
from manyhands.nets.flat import Model
from manyhands.stores.gate import Gate
from manyhands.stores.rules import Rule
from manyhands.stores.server import APPLIED, HELD, LATE, Base, Limits, Origin, as_tensor
from manyhands.types import Clock, GradientInfo, Places, Receipt, Seat, UsageError

TRIES = 5  # pulls, before parameters of two versions are taken
OUTLIER_MEMORY = 100  # losses that the filter remembers, and that it wants to see before it judges


@dataclass(frozen=True)
class ServersConfig:
    """Parameter servers: learners push gradients and get parameters back."""

    shards: int = 1
    """Servers, each with an equal part of the parameters."""
    gather: int = 0
    """0: a gradient is applied when it arrives (Downpour, Gorila). K: a version is made of the first K (BA3C)."""
    max_staleness: int = 0
    """Gradients from parameters that are more updates old than this are discarded; 0: none are. Asynchronous only."""
    max_age_s: float = 0.0
    """The same in seconds."""
    loss_deviations: float = 0.0
    """Gradients whose loss exceeds the mean by so many standard deviations are discarded by the learner; 0: none are."""
    snapshot_s: float = 2.0
    """How often a server's state is copied to where it survives the server: what is lost with a server is at most as old."""
    restarts: int = 20
    """How many lost servers, learners and actors are replaced."""
    ledger: bool = False
    """Write what became of every gradient to ledger.jsonl: who sent it, its number, its staleness, applied or why not."""

    def __post_init__(self) -> None:
        if self.shards < 1 or self.gather < 0 or self.max_staleness < 0 or self.restarts < 0:
            raise UsageError("store.shards must be at least 1; gather, max_staleness and restarts must not be negative")
        if self.max_age_s < 0 or self.loss_deviations < 0 or not self.snapshot_s > 0:
            raise UsageError("store.max_age_s and loss_deviations must not be negative, store.snapshot_s positive")
        if self.gather and (self.max_staleness or self.max_age_s):
            raise UsageError("store.max_staleness and max_age_s are for asynchronous servers: store.gather drops late ones")

    @property
    def limits(self) -> Limits:
        return Limits(self.max_staleness, self.max_age_s, self.ledger)

    def check(self, learners: int) -> None:
        if self.gather > learners:
            raise UsageError(
                f"store.gather = {self.gather} exceeds topology.learners = {learners}: a version would never be complete"
            )

    def pieces(self, size: int) -> list[slice]:
        """Balanced by size; each is at least one parameter."""
        if self.shards > size:
            raise UsageError(f"store.shards = {self.shards} is too many for {size} parameters: at most one each")
        edges = [size * i // self.shards for i in range(self.shards + 1)]
        if size >= 16 * self.shards:  # vectorised rules compute the same whatever the number of shards
            edges = [*(edge // 16 * 16 for edge in edges[:-1]), size]
        return [slice(a, b) for a, b in itertools.pairwise(edges)]


class ServersStore:
    """A learner's end. Afterwards the flat vector is what the servers answered."""

    def __init__(self, model: Model, rule: Rule, total_steps: int, config: ServersConfig, seat: Seat, places: Places) -> None:
        self.model, self.rule, self.total_steps, self._config, self._seat = model, rule, total_steps, config, seat
        self._pieces = config.pieces(model.parameters.numel())
        self._lines = Lines(places.servers)
        # The chief answers when the others are there, and who is too slow is the parent's business, not ours.
        self._chief = Lines([places.chief], patience_s=math.inf) if places.chief is not None else None
        self._gate = Gate(model, rule)
        self._outliers = OutlierFilter(config.loss_deviations) if config.loss_deviations else None
        self._bases = [Base()] * len(self._pieces)
        # Where it can be read as an array.
        self._gradient = torch.zeros_like(model.gradient, device="cpu") if model.gradient.is_cuda else model.gradient
        self._steps = 0  # of this life of this learner
        self._sequence = 0
        self._fresh = False  # the last push brought the newest parameters
        self._staleness = Counter[int]()
        self.clock = Clock()

    @property
    def refused(self) -> int:
        return self._gate.refused

    def count(self, steps: int) -> int:
        """Told with the next pull or push, as everything that this life of this learner did: nothing is counted twice."""
        self._steps += steps
        self.clock = Clock(self.clock.updates, self.clock.steps + steps)
        return steps

    def refresh(self) -> Clock:
        if not self._fresh:
            self._pull()
        self._fresh = False
        return self.clock

    def _pull(self) -> None:
        """Of synchronous servers all of the same version, unless one of them began anew and is behind."""
        for _ in range(TRIES if self._chief is not None else 1):
            self._take(self._lines.ask("pull", lambda number: (self._seat.number, self._seat.life, self._steps)))
            if len({base.version for base in self._bases}) == 1:
                return

    def step(self, info: GradientInfo) -> Receipt:
        norm = self._gate.admit(self.clock.updates)
        rate = self.rule.rate(info.samples, self.clock.steps / self.total_steps)
        metrics: dict[str, Any] = {"learning_rate": rate}
        if norm is None:
            return Receipt(self.clock, applied=False, metrics=metrics)
        if self._outliers is not None:
            ordinary = self._outliers.admit(abs(float(info.loss)))
            metrics["outlier_gradients"] = float(not ordinary)
            if not ordinary:
                return Receipt(self.clock, applied=False, metrics=metrics)
        if self._gradient is not self.model.gradient:
            self._gradient.copy_(self.model.gradient)
        self._sequence += 1
        begin = time.perf_counter()
        outcome, told = self._push(rate) if self._chief is None else self._offer(self._chief, info)
        seconds = time.perf_counter() - begin
        told["comms_ms"] = 1e3 * seconds - told["latency_ms"] - told.get("waiting_ms", 0.0)
        self._fresh = True
        return Receipt(self.clock, outcome == APPLIED, {**metrics, "gradient_norm": norm, **told})

    def _push(self, rate: float) -> tuple[str, dict[str, Any]]:
        origin = self._origin()
        arrays = self._arrays()
        answers = self._lines.ask("push", lambda number: (origin, self._bases[number], arrays[number], rate, self._steps))
        self._take(answers)
        outcome = answers[0]["outcome"]
        if outcome == APPLIED:
            self._staleness[answers[0]["staleness"]] += 1
        return outcome, {
            "staleness": float(answers[0]["staleness"]),
            "latency_ms": 1e3 * max(answer["latency_s"] for answer in answers),
            "discarded_gradients": float(outcome != APPLIED),
        }

    def _offer(self, chief: Lines, info: GradientInfo) -> tuple[str, dict[str, Any]]:
        """Left with every server, then announced; the answer is the version that it is part of, or that it came too late for."""
        origin, arrays = self._origin(), self._arrays()
        version = max(base.version for base in self._bases)
        bases = [Base(base.life, version) for base in self._bases]
        held = self._lines.ask("offer", lambda number: (origin, bases[number], arrays[number], self._steps))
        begin = time.perf_counter()
        refused = [answer["outcome"] for answer in held if answer["outcome"] != HELD]
        if set(refused) <= {LATE}:  # also who is late says so: the chief knows then who is slow
            (told,) = chief.ask_all("announce", origin, version, info.samples, self.clock.steps, not refused)
        else:
            told = {"outcome": refused[0], "latency_s": 0.0}
        waited = time.perf_counter() - begin
        self._pull()
        latency = 1e3 * told["latency_s"]
        late = float(told["outcome"] != APPLIED)
        return told["outcome"], {"latency_ms": latency, "waiting_ms": 1e3 * waited - latency, "late_gradients": late}

    def _origin(self) -> Origin:
        return Origin(self._seat.number, self._seat.life, self._sequence)

    def _arrays(self) -> list[np.ndarray]:
        return [self._gradient[piece].numpy() for piece in self._pieces]

    def _take(self, answers: list[dict[str, Any]]) -> None:
        for number, (answer, piece) in enumerate(zip(answers, self._pieces, strict=True)):
            self.model.parameters[piece].copy_(as_tensor(answer["parameters"]))
            self._bases[number] = answer["base"]
        self.clock = Clock(self._bases[0].version, answers[0]["steps"])

    def flush(self) -> None:
        """Everything has been pushed."""

    def take_staleness(self) -> dict[int, int]:
        counts, self._staleness = dict(self._staleness), Counter()
        return counts

    def state(self) -> dict:
        raise TypeError("the servers' state is the parent's to ask for")

    def load(self, state: dict) -> None:
        raise TypeError("the servers are loaded by the parent")

    def close(self) -> None:
        self._lines.close()
        if self._chief is not None:
            self._chief.close()


class OutlierFilter:
    """Refuses losses far above those seen lately (Gorila): more than so many standard deviations above their mean."""

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._seen: deque[float] = deque(maxlen=OUTLIER_MEMORY)

    def admit(self, loss: float) -> bool:
        ordinary = True
        if len(self._seen) == OUTLIER_MEMORY:
            values = np.asarray(self._seen)
            ordinary = bool(loss <= values.mean() + self._deviations * values.std())
        self._seen.append(loss)  # also what is refused: otherwise a loss that rises for good would be refused for ever
        return ordinary
