"""A parameter server: one shard of the flat vector, and the table that tells whose gradients are in it.

Asynchronous (Downpour, Gorila): a gradient is applied when it arrives. Synchronous (distributed BA3C): gradients are held
until the chief says which of them make the next version. A server is asked by many, one at a time, and so needs no locks.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from manyhands.machine import keep_memory
from manyhands.stores.rules import Rule
from manyhands.stores.shard import Shard

APPLIED, REPEATED, STALE, LATE, OLD_LIFE, HELD = "applied", "repeated", "stale", "late", "old life", "held"


@dataclass(frozen=True)
class Origin:
    """Who pushes: the same sequence number again is the same gradient again. A learner that was replaced has an older life."""

    learner: int
    life: int
    sequence: int


@dataclass(frozen=True)
class Base:
    """What a gradient was computed from, as the server itself said."""

    life: int = -1  # of the server
    version: int = 0
    served_at: float = 0.0  # on the server's own clock


@dataclass(frozen=True)
class Limits:
    """What a server refuses; 0: nothing. And whether it writes everything down."""

    staleness: int = 0  # updates since the parameters were read
    age_s: float = 0.0
    ledger: bool = False  # every decision is told in reports


@dataclass
class Entry:
    """One learner in the table of a server."""

    life: int = 0
    sequence: int = -1  # the last one that was decided about
    outcome: str = ""
    outcomes: dict[str, int] = field(default_factory=dict)  # of all its lives
    steps: dict[int, int] = field(default_factory=dict)  # by life: what it told last is everything it did


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Without a copy, also of memory that we may only read: nobody writes to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


class Server:
    def __init__(self, rule: Rule, size: int, limits: Limits, life: int, snapshot: dict[str, Any], threads: int = 1) -> None:
        torch.set_num_threads(threads)
        keep_memory()
        self._shard = Shard(torch.zeros(size), torch.zeros(0), rule)
        self._limits, self._life = limits, life
        self.version = 0
        self._table: dict[int, Entry] = {}
        self._held: dict[tuple[int, int], tuple[Origin, np.ndarray]] = {}  # by version and learner
        self._lost = 0  # updates of the other shards that this one could not make
        self._staleness: dict[int, int] = {}
        self._ledger: list[dict[str, Any]] = []
        self._rows = 0  # of the ledger, told or not
        self._load(snapshot)

    # -- asked by learners and actors -----------------------------------------------------------------------------------

    def pull(self, learner: int, life: int, steps: int) -> dict[str, Any]:
        """The newest parameters. steps: all that this life of the learner has taken."""
        self._count(learner, life, steps)
        return self._answer("", parameters=True)

    def push(self, origin: Origin, base: Base, gradient: np.ndarray, rate: float, steps: int) -> dict[str, Any]:
        """Applies a gradient, or says why not; either way the newest parameters come back."""
        begin = time.perf_counter()
        entry = self._count(origin.learner, origin.life, steps)
        staleness = self.version - base.version
        outcome = self._judge(entry, origin, base)
        if outcome == APPLIED:
            self._apply(gradient, rate)
            self._staleness[staleness] = self._staleness.get(staleness, 0) + 1
        if outcome != REPEATED:
            self._decide(entry, origin, outcome, staleness)
        elif entry.life == origin.life and entry.sequence == origin.sequence:
            outcome = entry.outcome  # the answer was lost, not the gradient
        took = time.perf_counter() - begin
        return self._answer(outcome, parameters=True, staleness=staleness, latency_s=took)

    def _judge(self, entry: Entry, origin: Origin, base: Base) -> str:
        if (origin.life, origin.sequence) <= (entry.life, entry.sequence):
            return REPEATED
        if base.life != self._life:
            self._note_loss(base)
            return OLD_LIFE
        if self._limits.staleness and self.version - base.version > self._limits.staleness:
            return STALE
        if self._limits.age_s and time.monotonic() - base.served_at > self._limits.age_s:
            return STALE
        return APPLIED  # that it is finite was seen to where it was made (stores.gate): here it would cost a third of the update

    def _note_loss(self, base: Base) -> None:
        """A learner has seen a newer version of our predecessor than the snapshot that we began with."""
        if base.life == self._life - 1:
            self._lost = max(self._lost, self._lost_before + base.version - self._began_at)

    def _apply(self, gradient: np.ndarray, rate: float) -> None:
        self._shard.gradient = as_tensor(gradient)
        self._shard.apply(rate)
        self.version += 1

    def _count(self, learner: int, life: int, steps: int) -> Entry:
        entry = self._table.setdefault(learner, Entry())
        entry.steps[life] = max(entry.steps.get(life, 0), steps)
        return entry

    def _decide(self, entry: Entry, origin: Origin, outcome: str, staleness: int = 0) -> None:
        entry.life, entry.sequence, entry.outcome = origin.life, origin.sequence, outcome
        entry.outcomes[outcome] = entry.outcomes.get(outcome, 0) + 1
        self._write(**vars(origin), outcome=outcome, staleness=staleness)

    def _write(self, **what: Any) -> None:
        if self._limits.ledger:
            self._ledger.append({"row": self._rows, **what, "version": self.version})
            self._rows += 1

    def _answer(self, outcome: str, parameters: bool = False, **more: Any) -> dict[str, Any]:
        return {
            "outcome": outcome,
            "base": Base(self._life, self.version, time.monotonic()),
            "steps": sum(sum(entry.steps.values()) for entry in self._table.values()),
            "parameters": self._shard.parameters.numpy() if parameters else None,
            **more,
        }

    # -- synchronous: learners offer, the chief commits -----------------------------------------------------------------

    def offer(self, origin: Origin, base: Base, gradient: np.ndarray, steps: int) -> dict[str, Any]:
        """Holds a gradient for the version after the one it was computed from."""
        entry = self._count(origin.learner, origin.life, steps)
        if (origin.life, origin.sequence) <= (entry.life, entry.sequence):
            return self._answer(entry.outcome if origin.sequence == entry.sequence else REPEATED)
        if base.life != self._life or base.version < self.version:
            outcome = LATE if base.life == self._life else OLD_LIFE
            self._decide(entry, origin, outcome, self.version - base.version)
            return self._answer(outcome)
        if (before := self._held.get((base.version, origin.learner))) is not None and before[0] != origin:
            self._decide(entry, before[0], LATE)  # it gave up waiting for that version to be made of it
        self._held[base.version, origin.learner] = (origin, gradient.copy())
        return self._answer(HELD)

    def commit(self, version: int, learners: list[int], rate: float) -> dict[str, Any]:
        """The version after this one is made of these learners' gradients. Asked twice, it happens once."""
        begin = time.perf_counter()
        if version >= self.version:
            held = [self._held.get((version, learner)) for learner in learners]
            if version == self.version and all(held):
                mean = np.mean([gradient for _, gradient in held if gradient is not None], axis=0)  # type: ignore[misc]
                self._apply(mean, rate)
                for learner in learners:
                    self._decide(self._table[learner], self._held.pop((version, learner))[0], APPLIED)
            self._skip_to(version + 1)  # begun anew from a snapshot: the others go on, and so do we
        return self._answer("", latency_s=time.perf_counter() - begin)

    def catch_up(self, version: int) -> dict[str, Any]:
        """After a restart from a snapshot: the others are at this version, what they have more is lost here."""
        self._skip_to(version)
        return self._answer("")

    def _skip_to(self, version: int) -> None:
        """Updates up to this version that were not made here are lost; gradients that waited for them come too late."""
        if version > self.version:
            self._lost += version - self.version
            self._write(outcome="skipped", skipped=version - self.version)
            self.version = version
        for (of, learner), (origin, _) in list(self._held.items()):
            if of < version:
                del self._held[of, learner]
                self._decide(self._table[learner], origin, LATE, version - of)

    # -- asked by the parent --------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Counters, often asked for; also the sign that this server is alive."""
        outcomes: dict[str, int] = {}
        for entry in self._table.values():
            for outcome, count in entry.outcomes.items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        staleness, self._staleness = self._staleness, {}
        answer = self._answer("")
        told = {learner: dict(entry.steps) for learner, entry in self._table.items()}
        return {
            "version": self.version,
            "steps": answer["steps"],
            "told": told,
            "outcomes": outcomes,
            "lost": self._lost,
            "staleness": staleness,
            "ledger": self._take_ledger(),
        }

    def _take_ledger(self) -> list[dict[str, Any]]:
        """What was not told yet. A snapshot tells it too: whoever begins from it has all that led there."""
        ledger, self._ledger = self._ledger, []
        return ledger

    def state(self) -> dict[str, Any]:
        """The shard, and the table: a repeated push is recognised also after a restart from this."""
        table = {
            str(learner): {**vars(entry), "steps": {str(life): steps for life, steps in entry.steps.items()}}
            for learner, entry in self._table.items()
        }
        return {
            "parameters": self._shard.parameters.numpy(),
            "optimiser": {name: tensor.numpy() for name, tensor in self._shard.memory.items()},
            "version": self.version,
            "lost": self._lost,
            "table": table,
            "ledger": self._take_ledger(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        arrays = {name: torch.tensor(array) for name, array in state["optimiser"].items()}
        self._shard.load({"parameters": torch.tensor(state["parameters"]), "optimiser": arrays})
        self.version, self._lost = state["version"], state["lost"]
        self._began_at, self._lost_before = self.version, self._lost
        for learner, entry in state["table"].items():
            steps = {int(life): steps for life, steps in entry["steps"].items()}
            self._table[int(learner)] = Entry(**{**entry, "steps": steps})

    def close(self) -> None:
        pass
