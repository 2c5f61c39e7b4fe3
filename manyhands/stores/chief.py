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

REMEMBERED = 1000  # versions that a late learner may be behind and still be told how late it is


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
        self._version = max(told["base"].version for told in self._lines.ask_all("catch_up", 0))
        self._arrived: dict[int, Arrival] = {}
        self._first_at: dict[int, float] = {}  # when the first gradient of each of the last versions came
        self._told: dict[int, tuple[Origin, dict[str, Any]]] = {}  # the last answer to each learner
        self._paused = False
        self._late = 0
        self._waits: dict[int, float] = {}  # seconds that each learner came after the first one, all versions together

    def announce(self, origin: Origin, version: int, samples: int, steps: int, held: bool = True) -> Later:
        """Answered when the version after this one is there. held: by every server, none of them said that it was late."""
        answer = Later()
        known, told = self._told.get(origin.learner, (None, {}))
        if known == origin:  # the answer was lost
            answer.settle(told)
            return answer
        before = self._arrived.get(origin.learner)
        at = before.at if before is not None and before.origin == origin else time.monotonic()
        self._first_at.setdefault(version, at)
        arrival = Arrival(origin, samples, steps, at, answer)
        if version != self._version or self._paused:
            if held and version < self._version:  # it asked servers that began anew from a snapshot: none stays behind
                self._lines.ask_all("catch_up", self._version)
            self._wait(arrival, version)
            self._answer(arrival, LATE)
            return answer
        self._arrived[origin.learner] = arrival
        self._go_on()
        return answer

    def pause(self, paused: bool) -> None:
        """Nobody waits for the others any more: some may have stopped."""
        self._paused = paused
        arrived, self._arrived = self._arrived, {}
        for arrival in arrived.values():
            self._answer(arrival, LATE)

    def _wait(self, arrival: Arrival, version: int) -> None:
        wait = arrival.at - self._first_at.get(version, arrival.at)
        self._waits[arrival.origin.learner] = self._waits.get(arrival.origin.learner, 0.0) + wait

    def _answer(self, arrival: Arrival, outcome: str, **more: Any) -> None:
        self._late += outcome == LATE
        told = {"outcome": outcome, "version": self._version, "latency_s": 0.0, **more}
        self._told[arrival.origin.learner] = (arrival.origin, told)
        arrival.answer.settle(told)

    def here(self, learners: list[int]) -> None:
        """Who takes part: a version is not kept waiting for those who never come."""
        self._here = set(learners)
        self._go_on()

    def _go_on(self) -> None:
        if not self._arrived or len(self._arrived) < min(self._gather, max(len(self._here), 1)):
            return
        arrived, self._arrived = self._arrived, {}
        learners = sorted(arrived)
        samples = sum(arrival.samples for arrival in arrived.values())
        progress = max(arrival.steps for arrival in arrived.values()) / self._total_steps
        rate = self._rule.rate(samples, progress)
        told = self._lines.ask_all("commit", self._version, learners, rate)
        latency = max(answer["latency_s"] for answer in told)
        for arrival in arrived.values():
            self._wait(arrival, self._version)
        self._version += 1
        self._first_at = {version: at for version, at in self._first_at.items() if version > self._version - REMEMBERED}
        for arrival in arrived.values():
            self._answer(arrival, APPLIED, latency_s=latency)

    def report(self) -> dict[str, Any]:
        return {"version": self._version, "late": self._late, "waits": dict(self._waits), "waiting_for": self._missing()}

    def _missing(self) -> list[int]:
        return sorted(self._here - set(self._arrived)) if self._arrived else []

    def close(self) -> None:
        self._lines.close()
