"""The global replay as learners and actors see it: shards elsewhere, which actors fill and learners draw from.

How often a transition is used is kept by both: learners wait while the data has not paid for their draws, actors wait while
they are too far ahead. A shard that is lost is drawn from again when another has taken its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.hosts.lines import CALL_S, Lines
from manyhands.hosts.process import ChildLost, GaveUp, gave_up
from manyhands.maths import schedules
from manyhands.memory.replay import ReplayConfig
from manyhands.memory.server import SENT
from manyhands.types import Address, Caller, Rollout, Seat, TransitionBatch

POLL_S = 0.02  # between two looks at a replay that has no room
AHEAD_BATCHES = 20  # how far actors and learners may be apart
AGAIN_S = 0.5  # before a lost shard is looked for again


class RemoteReplay:
    def __init__(
        self,
        config: ReplayConfig,
        places: tuple[Address, ...],
        seat: Seat,
        device: torch.device,
        seed: int,
        total_steps: int,
        steps: Callable[[], int],
    ) -> None:
        """steps: of the whole run so far."""
        self._total_steps, self._steps = total_steps, steps
        self._config, self._seat, self._device, self._seed = config, seat, device, seed
        self._places = places
        self._lines = Lines(places)  # for actors, who wait for a shard that was lost
        self._callers: list[Caller | None] = [None] * len(places)  # for learners, who go on without it
        self._look_again = [0.0] * len(places)
        nothing = {"added": 0, "drawn": 0, "mass": 0.0, "size": 0, "life": -1, "free": False}
        self._known: list[dict[str, Any]] = [dict(nothing) for _ in places]
        self._sequence = self._draws = 0
        self._warm = False

    # -- actors ---------------------------------------------------------------------------------------------------------

    def add(self, rollout: Rollout) -> None:
        self._sequence += 1
        shard = self._seat.rank % len(self._places)
        arrays = {name: getattr(rollout, name).cpu().numpy() for name in SENT}
        given = (self._seat.rank, self._seat.life, self._sequence, arrays, rollout.steps)
        self._note(shard, self._lines.ask_one(shard, "add", *given))
        while not self._room():
            if gave_up():
                raise GaveUp
            time.sleep(POLL_S)
            self._look()

    def _room(self) -> bool:
        added, drawn = self._total("added"), self._total("drawn")
        if self.paused:
            return True
        ahead = AHEAD_BATCHES * self._config.batch
        return added <= self._config.warmup_steps + (drawn + ahead) / self._config.intensity

    @property
    def paused(self) -> bool:
        """Learners have stopped, or are about to: who only acts stops too, instead of running ahead."""
        return any(known["free"] for known in self._known)

    def look(self) -> None:
        """How things are now."""
        self._look()

    # -- learners -------------------------------------------------------------------------------------------------------

    def next(self) -> TransitionBatch | None:
        batch = self._config.batch
        if not self._seat.learns:
            return None
        if not self._paid(batch):
            self._look()
            if not self._paid(batch):
                return None
        counts = self._counts(batch)
        answers: dict[int, dict[str, Any]] = {}
        calls = {shard: self._call(shard, "sample", int(n)) for shard, n in enumerate(counts) if n}
        for shard, call in calls.items():
            answer = self._answer(shard, call)
            if answer is not None and answer["arrays"]:
                # What came through the mailbox is valid until the next call only.
                answers[shard] = {name: torch.tensor(array) for name, array in answer["arrays"].items()}
        self._draws += 1
        return self._joined(answers) if answers else None

    def _paid(self, batch: int) -> bool:
        added, drawn = self._total("added"), self._total("drawn")
        self._warm = self._warm or added >= self._config.warmup_steps
        if not self._warm or sum(known["mass"] for known in self._known) <= 0:
            return False
        return drawn + batch <= self._config.intensity * max(added - self._config.warmup_steps, 0)

    def _counts(self, batch: int) -> np.ndarray:
        masses = np.array([known["mass"] for known in self._known])
        generator = np.random.default_rng([self._seed, self._seat.rank, self._seat.life, self._draws])
        return generator.multinomial(batch, masses / masses.sum())

    def _joined(self, answers: dict[int, dict[str, Tensor]]) -> TransitionBatch:
        parts = list(answers.values())
        shards = torch.cat([torch.full((len(part["keys"]),), shard) for shard, part in answers.items()])
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        lives = torch.tensor([self._known[int(shard)]["life"] for shard in shards])
        keys = torch.stack([shards, lives, found["actor"], found["keys"], found["slots"]], 1)  # [N, 5]
        weight = found["weight"] * self._importance(found["priority"])
        names = ("obs", "action", "reward", "discount", "next_obs")
        moved = {name: found[name].to(self._device) for name in names}
        if moved["obs"].dim() == 4:  # as the convolutions want it
            for name in ("obs", "next_obs"):
                moved[name] = moved[name].contiguous(memory_format=torch.channels_last)
        return TransitionBatch(**moved, weight=weight.float().to(self._device), keys=keys)

    def _importance(self, priority: Tensor) -> Tensor:
        if not self._config.prioritized:
            return torch.ones_like(priority)
        total, size = (sum(known[name] for known in self._known) for name in ("mass", "size"))
        beta = schedules.linear(self._config.beta, 1.0, self._steps() / self._total_steps)
        weight = (priority / total * size).clamp(min=1e-12) ** -beta
        return weight / weight.max()

    def metrics(self) -> dict[str, float]:
        return {}

    def feedback(self, keys: Tensor, priority: Tensor) -> None:
        if not self._config.prioritized:
            return
        told, priority = keys.cpu(), priority.detach().cpu()
        for shard in told[:, 0].unique().tolist():
            mine = told[:, 0] == shard
            _, lives, actor, at, slots = told[mine].unbind(1)
            given = (actor.numpy(), at.numpy(), slots.numpy(), priority[mine].numpy())
            self._answer(shard, self._call(shard, "feedback", int(lives[0]), *given))

    # -- shards that come and go ----------------------------------------------------------------------------------------

    def _call(self, shard: int, method: str, *arguments: Any) -> Any:
        """None: not there now."""
        caller = self._callers[shard]
        if caller is None:
            if time.monotonic() < self._look_again[shard]:
                return None
            try:
                caller = self._callers[shard] = self._places[shard].connect(0.0)
            except ChildLost:
                self._missing(shard)
                return None
        return caller.call(method, *arguments, timeout_s=CALL_S)

    def _answer(self, shard: int, call: Any) -> dict[str, Any] | None:
        if call is None:
            return None
        try:
            answer = call.result()
        except ChildLost:
            self._missing(shard)
            return None
        if answer is not None:
            self._note(shard, answer)
        return answer

    def _missing(self, shard: int) -> None:
        if (caller := self._callers[shard]) is not None:
            caller.close()
        self._callers[shard] = None
        self._look_again[shard] = time.monotonic() + AGAIN_S
        self._known[shard] = {**self._known[shard], "mass": 0.0, "size": 0}

    def _note(self, shard: int, answer: dict[str, Any]) -> None:
        self._known[shard] = {name: answer[name] for name in self._known[shard]}

    def _look(self) -> None:
        calls = {shard: self._call(shard, "report") for shard in range(len(self._places))}
        for shard, call in calls.items():
            self._answer(shard, call)

    def _total(self, name: str) -> int:
        return sum(known[name] for known in self._known)

    def state(self) -> dict:
        return {"contents": False}

    def load(self, state: dict) -> None:
        """Filled anew."""

    def close(self) -> None:
        self._lines.close()
        for shard in range(len(self._places)):
            self._missing(shard)
