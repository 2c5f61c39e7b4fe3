"""The chief of synchronous learners: decides which K of n gradients make a version, the same ones on every shard.

A learner first leaves its gradient with every server, then tells the chief. When K have done so the chief commits them on all
servers and answers those who wait; whoever comes later is told to fetch the new parameters and begin again (backup workers).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from manyhands.hosts.later import Later
from manyhands.hosts.lines import Lines
from manyhands.stores.rules import Rule
from manyhands.stores.server import APPLIED, LATE, Origin
from manyhands.types import Address


@dataclass
class Arrival:
    origin: Origin
    samples: int
    steps: int
    at: float
    answer: Later


class Chief:
    def __init__(self, servers: tuple[Address, ...], rule: Rule, total_steps: int, gather: int, here: list[int]) -> None:
        self._lines = Lines(servers)
        self._rule, self._total_steps = rule, total_steps
        self._gather, self._here = gather, set(here)
        # After a restart: shards that are behind the first count their missing updates as lost.
        self._version = max(told["version"] for told in self._lines.ask_all("report"))
        self._arrived: dict[int, Arrival] = {}
        self._late = 0
        self._waits: dict[int, float] = {}  # seconds that each learner came after the first one, all versions together

    def announce(self, origin: Origin, version: int, samples: int, steps: int) -> Later:
        """Answered when the version after this one is there."""
        answer = Later()
        if version != self._version:
            self._late += 1
            answer.settle({"outcome": LATE, "version": self._version, "latency_s": 0.0})
            return answer
        self._arrived[origin.learner] = Arrival(origin, samples, steps, time.monotonic(), answer)
        self._go_on()
        return answer

    def here(self, learners: list[int]) -> None:
        """Who takes part: a version is not kept waiting for those who never come."""
        self._here = set(learners)
        self._go_on()

    def _go_on(self) -> None:
        if len(self._arrived) < min(self._gather, max(len(self._here), 1)):
            return
        arrived, self._arrived = self._arrived, {}
        learners = sorted(arrived)
        samples = sum(arrival.samples for arrival in arrived.values())
        progress = max(arrival.steps for arrival in arrived.values()) / self._total_steps
        rate = self._rule.rate(samples, progress)
        told = self._lines.ask_all("commit", self._version, learners, rate)
        self._version += 1
        first = min(arrival.at for arrival in arrived.values())
        for learner, arrival in arrived.items():
            self._waits[learner] = self._waits.get(learner, 0.0) + arrival.at - first
        latency = max(answer["latency_s"] for answer in told)
        for arrival in arrived.values():
            arrival.answer.settle({"outcome": APPLIED, "version": self._version, "rate": rate, "latency_s": latency})

    def report(self) -> dict[str, Any]:
        return {"version": self._version, "late": self._late, "waits": dict(self._waits), "waiting_for": self._missing()}

    def _missing(self) -> list[int]:
        return sorted(self._here - set(self._arrived)) if self._arrived else []

    def close(self) -> None:
        self._lines.close()
