"""The hands of a run, and what they tell: one in this process, or several in processes of their own.

Synchronous hands (one alone, or all-reduce) advance in rounds, and whatever is reported or saved is a function of the seed.
Asynchronous ones report when they have something; one that is lost is replaced, and the others go on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from manyhands.build import Custom, Meeting, make_model, make_store
from manyhands.config import Recipe
from manyhands.hand import Hand
from manyhands.hosts.inline import InlineHost
from manyhands.hosts.process import ChildError, ChildLost, GaveUp, ProcessHost, SharedBlock, gave_up
from manyhands.learner import MetricSums
from manyhands.machine import cores
from manyhands.stores.shared import SharedConfig
from manyhands.types import Clock, EnvSpec, Episode, Future, Handle, Host, Progress, RunError, Seat, Store

START_TIMEOUT_S = 600.0  # imports, hundreds of emulators
CALL_STEPS = 2000  # a call asks for about so many steps: often enough for a person, seldom enough for the hands
HURRY_S = 3.0  # how long a hand in a hurry may take to stop in the middle of a rollout
CLOSE_S = 3.0


class Team:
    def __init__(
        self, recipe: Recipe, custom: Custom, spec: EnvSpec, warn: Callable[[str], None], state: dict | None = None
    ) -> None:
        self._recipe, self._custom, self._warn = recipe, custom, warn
        self._learners = recipe.topology.learners
        self._threads = max(cores() // self._learners, 1)
        self._restarts_left = recipe.store.restarts if isinstance(recipe.store, SharedConfig) else 0
        self._blocks = [SharedBlock() for _ in range(2)] if recipe.in_processes else []
        self._meeting = Meeting(tuple(block.fd for block in self._blocks))
        self._host: Host = ProcessHost(self._meeting.fds) if self._blocks else InlineHost()
        steps = recipe.sampler.columns * recipe.sampler.horizon
        self._rollouts = max(CALL_STEPS // steps, 1) if self._blocks else 1
        self._hands: dict[int, Handle] = {}
        self._lives = dict.fromkeys(range(self._learners), 0)
        self._open: dict[int, list[Future]] = {rank: [] for rank in range(self._learners)}
        self._latest: dict[int, Progress] = {}
        self._refused, self._replaced = (state or {}).get("refused", 0), 0  # by hands that are no more, or before a resume
        self.replaced_learners = 0
        self.clock = Clock()
        self._central: Store | None = None  # our own view of parameters that are nobody's own
        try:
            if isinstance(recipe.store, SharedConfig):
                self._central = self._make_central(spec, state)
            for rank in range(self._learners):
                self._hands[rank] = self._start(rank)
            self._load(state)
        except BaseException:
            self.close()
            raise

    def _make_central(self, spec: EnvSpec, state: dict | None) -> Store:
        algorithm = self._custom.algorithm or self._recipe.algorithm
        model = make_model(self._recipe, algorithm, spec, torch.device("cpu"), self._custom)
        central = make_store(self._recipe, model, Seat(), self._meeting)
        central.load(central.initial_state() if state is None else state["store"])  # type: ignore[attr-defined]
        return central

    def _start(self, rank: int) -> Handle:
        seat = Seat(rank, self._learners, self._lives[rank])
        name = f"learner {rank} of {self._learners}"
        return self._host.start(Hand, self._recipe, self._custom, seat, self._meeting, name=name, threads=self._threads)

    def _load(self, state: dict | None) -> None:
        own = {} if state is None else state["hands"]
        store = None if state is None or self._central is not None else state["store"]
        self._all("load", lambda rank: (own.get(str(rank)), store))
        if state is not None:
            self.clock = Clock(state["store"]["updates"], state["store"]["steps"])

    def close(self) -> None:
        """Within seconds, and whatever the hands do. May be called twice."""
        deadline = time.monotonic() + CLOSE_S
        for hand in self._hands.values():
            hand.close(deadline)
        self._hands = {}
        for block in self._blocks:
            block.close()

    # -- going on -------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Progress]:
        """Each call's or round's progress. Raises GaveUp when the time after a stop is over."""
        while True:
            for rank, hand in self._hands.items():
                while len(self._open[rank]) < self._host.ahead:
                    self._open[rank].append(hand.call("advance", self._rollouts))
            yield from self._gather()
            if not self._hands:
                raise RunError("every learner was lost and none is to be replaced any more; the last checkpoint is good")

    def settle(self) -> list[Progress]:
        """What is still on its way. Afterwards nothing is, as a checkpoint needs it."""
        progress: list[Progress] = []
        while any(self._open.values()):
            progress += self._gather()
        return progress

    def _gather(self) -> list[Progress]:
        """What has arrived: of asynchronous hands anything, of the others a whole round."""
        oldest = {rank: calls[0] for rank, calls in self._open.items() if calls}
        self._host.wait([call for call in oldest.values() if not call.done()], 0.5)
        if gave_up():
            raise GaveUp
        done = [rank for rank, call in oldest.items() if call.done()]
        if self._central is not None:
            return [progress for rank in done if (progress := self._finish(rank)) is not None]
        if len(done) < len(oldest):  # the others wait for a rank that failed: say so at once
            for rank in done:
                self._outcome(rank)
            return []
        return [self._round([progress for rank in done if (progress := self._finish(rank)) is not None])]

    def _finish(self, rank: int) -> Progress | None:
        try:
            progress = self._outcome(rank)
        except ChildLost as lost:
            self._replace(rank, lost)
            return None
        self._open[rank].pop(0)
        self._latest[rank] = progress
        if progress.clock.steps >= self.clock.steps:
            self.clock = progress.clock
        return progress

    def _outcome(self, rank: int) -> Progress:
        """Of a hand's oldest call, which is done. A loss is raised as such only where the others can go on."""
        try:
            progress = self._open[rank][0].result()
        except ChildLost as lost:
            if self._central is not None:
                raise
            raise _cannot_go_on(lost) from None
        except (ChildError, RunError) as failure:
            cause = self._lost_hand() if self._central is None else None
            if cause is not None:  # a lost rank shows at the others as a broken connection
                raise _cannot_go_on(cause) from None
            raise _own_words(failure) from None
        if progress is None:
            raise GaveUp
        return progress

    def _lost_hand(self) -> ChildLost | None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            waiting = []
            for calls in self._open.values():
                try:
                    if calls and calls[0].done():
                        calls[0].result()
                    else:
                        waiting += calls[:1]
                except ChildLost as lost:
                    return lost
                except Exception:
                    continue
            if not waiting:
                break
            self._host.wait(waiting, 0.1)
        return None

    def _round(self, told: list[Progress]) -> Progress:
        episodes: list[Episode] = [episode for progress in told for episode in progress.episodes]
        return Progress(told[0].clock, episodes, self.refused, self.replaced_workers)

    def _replace(self, rank: int, lost: ChildLost) -> None:
        """A new hand in the place of a lost one; it finds the parameters in the shared store."""
        self._open[rank] = []
        self._hands.pop(rank).close(time.monotonic())
        if last := self._latest.pop(rank, None):
            self._refused += last.refused
            self._replaced += last.replaced
        if self._restarts_left == 0:
            self._warn(f"{lost}; {len(self._hands)} go on without it")
            return
        self._restarts_left -= 1
        self.replaced_learners += 1
        self._lives[rank] += 1
        self._warn(f"{lost}; replaced, {self._restarts_left} more times allowed")
        self._hands[rank] = self._start(rank)

    def _all(self, method: str, arguments: Callable[[int], tuple] = lambda rank: ()) -> list[Any]:
        """What all hands answer."""
        calls = [hand.call(method, *arguments(rank), timeout_s=START_TIMEOUT_S) for rank, hand in self._hands.items()]
        while waiting := [call for call in calls if not call.done()]:
            self._host.wait(waiting, 0.5)
            if gave_up():
                raise GaveUp
        try:
            return [call.result() for call in calls]
        except (ChildLost, ChildError) as failure:
            raise _own_words(failure) from None

    # -- what is known of them ------------------------------------------------------------------------------------------

    @property
    def refused(self) -> int:
        return self._refused + sum(progress.refused for progress in self._latest.values())

    @property
    def replaced_workers(self) -> int:
        return self._replaced + sum(progress.replaced for progress in self._latest.values())

    def take_metrics(self) -> dict[str, Any]:
        """Means over all hands since the last call, and how stale their gradients were."""
        sums, stale = MetricSums(), Counter[int]()
        for told in self._all("take_sums"):
            sums.merge(told)
            stale.update(told["staleness"])
        metrics: dict[str, Any] = sums.take()
        return {**metrics, "staleness_counts": {str(k): stale[k] for k in sorted(stale)}} if stale else metrics

    def state(self, hurried: bool = False) -> dict:
        """After settle(). Or hurried, after GaveUp: then simulators, and hands that do not answer, will start new episodes."""
        within = HURRY_S if hurried else START_TIMEOUT_S
        calls: dict[tuple[int, str], Future] = {}
        for rank, hand in self._hands.items():
            if hurried:
                hand.hurry()
            calls[rank, "state"] = hand.call("state", timeout_s=within)
            if self._central is None:
                calls[rank, "store_state"] = hand.call("store_state", timeout_s=within)
        answers: dict[tuple[int, str], dict] = {}
        for key, call in calls.items():
            try:
                answers[key] = call.result()
            except (ChildLost, ChildError) as failure:
                if not hurried:
                    raise _own_words(failure) from None
        stores = [answer for (_, method), answer in answers.items() if method == "store_state"]
        if self._central is None and not stores:
            raise RunError("no learner answered in time; the last checkpoint is good")
        return {
            "store": stores[0] if self._central is None else self._central.state(),
            "hands": {str(rank): answer for (rank, method), answer in answers.items() if method == "state"},
            "refused": self.refused,
        }


def _own_words(failure: Exception) -> RunError:
    if isinstance(failure, ChildError):
        return RunError(f"a learner failed; its own traceback:\n{failure}")
    return RunError(str(failure))


def _cannot_go_on(lost: ChildLost) -> RunError:
    return RunError(f"{lost}: synchronous learners cannot go on without it. The last checkpoint is good: continue with resume")
