"""The hands of a run, and what they tell: one in this process, or several in processes of their own.

Synchronous hands (one alone, or all-reduce) advance in rounds, and whatever is reported or saved is a function of the seed.
Asynchronous ones report when they have something; one that is lost is replaced, and the others go on.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from manyhands.build import Custom, Meeting, make_model, make_store
from manyhands.config import Recipe
from manyhands.hand import Hand
from manyhands.hosts.door import new_name
from manyhands.hosts.inline import InlineHost
from manyhands.hosts.process import ChildError, ChildLost, GaveUp, ProcessHost, SharedBlock, gave_up
from manyhands.judge import Judge
from manyhands.keeper import Keeper
from manyhands.learner import MetricSums
from manyhands.machine import cores
from manyhands.stores.chunks import SharedConfig
from manyhands.stores.servers import ServersConfig
from manyhands.types import Clock, EnvSpec, Episode, Future, Handle, Host, Progress, RunError, Seat, Store

START_TIMEOUT_S = 600.0  # imports, hundreds of emulators
CALL_STEPS = 2000  # a call asks for about so many steps: often enough for a person, seldom enough for the hands
CALL_S = 1.0  # and asynchronous hands say after so long how far they are
ADVANCE_TIMEOUT_S = 600.0  # an asynchronous hand that says nothing for so long is replaced
SETTLE_S = 10.0  # what is not back by then is not in the checkpoint, where the others can do without
HURRY_S = 2.5  # how long a hand in a hurry may take to stop in the middle of a rollout
CLOSE_S = 1.5


class Team:
    def __init__(
        self, recipe: Recipe, custom: Custom, spec: EnvSpec, warn: Callable[[str], None], state: dict | None = None
    ) -> None:
        self._recipe, self._custom, self._warn = recipe, custom, warn
        self._seats = seats(recipe, (state or {}).get("lives", {}))  # by number
        self._threads = max(cores() // len(self._seats), 1)
        self._restarts_left = getattr(recipe.store, "restarts", 0)
        served = isinstance(recipe.store, ServersConfig)
        self._blocks = [SharedBlock() for _ in range(2)] if recipe.in_processes and not served else []
        self._meeting = Meeting(tuple(block.fd for block in self._blocks))
        self._host = make_host(recipe, self._meeting.fds)
        steps = recipe.sampler.columns * recipe.sampler.horizon
        self._rollouts = max(CALL_STEPS // steps, 1) if recipe.in_processes else 1
        self._hands: dict[int, Handle] = {}
        self._ready: set[int] = set()  # hands that have answered since they were started
        self._late: set[int] = set()  # and those that have not since they were last waited for
        self._sums, self._stale = MetricSums(), Counter[int]()
        self._open: dict[int, list[Future]] = {rank: [] for rank in self._seats}
        self._latest: dict[int, Progress] = {}
        self._refused, self._replaced = (state or {}).get("refused", 0), 0  # by hands that are no more, or before a resume
        self.replaced_learners = 0
        self.clock = Clock()
        self._judge: Handle | None = None
        self._judging: Future | None = None
        self._judged_at = 0  # updates
        self._judgement: dict[str, Any] | None = None
        self._central: Store | Keeper | None = None  # our own view of parameters that are nobody's own
        try:
            if isinstance(recipe.store, SharedConfig | ServersConfig):
                self._central = self._make_central(spec, state)
            for rank in self._seats:
                self._hands[rank] = self._start(rank)
            if recipe.evaluation.every_updates:
                self._judge = self._start_judge()
            self._load(state)
        except BaseException:
            self.close()
            raise

    def _make_central(self, spec: EnvSpec, state: dict | None) -> Store | Keeper:
        algorithm = self._custom.algorithm or self._recipe.algorithm
        model = make_model(self._recipe, algorithm, spec, torch.device("cpu"), self._custom)
        if isinstance(self._recipe.store, ServersConfig):
            keeper = Keeper(self._host, self._recipe, model, spec, self._warn, state and state["store"])
            self._meeting = Meeting(places=keeper.at, spec=spec)
            return keeper
        central = make_store(self._recipe, model, Seat(), self._meeting)
        central.load(central.initial_state() if state is None else state["store"])  # type: ignore[attr-defined]
        return central

    def _start(self, rank: int) -> Handle:
        seat = self._seats[rank]
        name = f"{'learner' if seat.learns else 'actor'} {seat.rank} of {seat.learners}"
        return self._host.start(Hand, self._recipe, self._custom, seat, self._meeting, name=name, threads=self._threads)

    def _start_judge(self) -> Handle:
        assert self._meeting.places is not None and self._meeting.spec is not None
        return self._host.start(Judge, self._recipe, self._custom, self._meeting.places, self._meeting.spec, name="the judge")

    def _load(self, state: dict | None) -> None:
        own = {} if state is None else state["hands"]
        store = None if state is None or self._central is not None else state["store"]
        calls = {
            rank: hand.call("load", own.get(str(rank)), store, timeout_s=START_TIMEOUT_S) for rank, hand in self._hands.items()
        }
        while calls:
            self._host.wait([call for call in calls.values() if not call.done()], 0.5)
            if gave_up():
                raise GaveUp
            for rank in [rank for rank, call in calls.items() if call.done()]:
                self._loaded(rank, calls.pop(rank))
        if state is not None:
            self._sums.load(state["sums"])
            self.clock = Clock(state["store"]["updates"], state["store"]["steps"])

    def _loaded(self, rank: int, call: Future) -> None:
        try:
            call.result()
            self._ready.add(rank)
        except ChildLost as lost:  # the others may wait for it for minutes: say so at once
            if self._central is None:
                raise RunError(f"{lost} while the learners were being started; start again") from None
            self._replace(rank, lost)
        except ChildError as failure:
            raise _own_words(failure) from None

    def close(self) -> None:
        """Within seconds, and whatever the hands do. May be called twice."""
        deadline = time.monotonic() + CLOSE_S
        everybody = [*self._hands.values(), *([self._judge] if self._judge is not None else [])]
        for hand in everybody:
            hand.hurry()
            hand.hang_up()
        for hand in everybody:
            hand.close(deadline)
        self._hands, self._judge = {}, None
        if isinstance(self._central, Keeper):
            self._central.close()
        self._host.close()
        for block in self._blocks:
            block.close()

    # -- going on -------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[Progress]:
        """Each call's or round's progress. Raises GaveUp when the time after a stop is over."""
        within = math.inf if self._central is None else ADVANCE_TIMEOUT_S  # ranks have a deadline of their own
        at_most_s = math.inf if self._central is None else CALL_S  # rounds are counted, so that they are the same every time
        while True:
            if isinstance(self._central, Keeper):
                self._central.pause(False)
            for rank, hand in self._hands.items():
                while len(self._open[rank]) < self._host.ahead:
                    self._open[rank].append(hand.call("advance", self._rollouts, at_most_s, timeout_s=within))
            yield from self._gather()
            for who, does in (("learner", "learns"), ("actor", "acts")):
                if not any(getattr(self._seats[rank], does) for rank in self._hands):
                    raise RunError(f"every {who} was lost and none is to be replaced any more; the last checkpoint is good")

    def settle(self) -> list[Progress]:
        """What is still on its way. Afterwards nothing is, as a checkpoint needs it; but nobody waits long for an asynchronous
        hand, nor again before it has answered, nor for one that is just being made."""
        progress: list[Progress] = []
        if isinstance(self._central, Keeper):
            self._central.pause(True)  # who has stopped already keeps nobody waiting
        until = time.monotonic() + (math.inf if self._central is None else SETTLE_S)
        while any(self._open[rank] for rank in self._ready - self._late) and time.monotonic() < until:
            progress += self._gather()
        self._late = {rank for rank in self._ready if self._open[rank]}
        if isinstance(self._central, Keeper):
            self._central.look()
        return progress

    def _gather(self) -> list[Progress]:
        """What has arrived: of asynchronous hands anything, of the others a whole round."""
        oldest = {rank: calls[0] for rank, calls in self._open.items() if calls}
        # A server's snapshot must be taken as soon as it comes, or the server waits for us and everybody for it.
        others = self._central.open_calls() if isinstance(self._central, Keeper) else []
        self._host.wait([call for call in (*oldest.values(), *others) if not call.done()], 0.5)
        if gave_up():
            raise GaveUp
        if isinstance(self._central, Keeper):
            self._central.watch()
            self._judge_now_and_then()
        done = [rank for rank, call in oldest.items() if call.done()]
        if self._central is not None:
            return [progress for rank in done if (progress := self._finish(rank)) is not None]
        if len(done) < len(oldest):  # the others wait for a rank that failed: say so at once
            for rank in done:
                self._outcome(rank)
            return []
        return [self._round([progress for rank in done if (progress := self._finish(rank)) is not None])]

    def _judge_now_and_then(self) -> None:
        every = self._recipe.evaluation.every_updates
        if self._judge is None:
            return
        if self._judging is None:
            if self.clock.updates // every > self._judged_at // every:
                self._judging = self._judge.call("score", timeout_s=ADVANCE_TIMEOUT_S)
            return
        self._host.wait([self._judging], 0.0)
        if not self._judging.done():
            return
        call, self._judging = self._judging, None
        try:
            self._judgement = call.result()
            self._judged_at = self._judgement["updates"]
        except ChildLost as lost:
            self._judge.close(time.monotonic())
            self._judge = self._start_judge() if self._restarts_left else None
            self._restarts_left = max(self._restarts_left - 1, 0)
            self._warn(f"{lost}; {'replaced' if self._judge else 'nobody judges any more'}")
        except (ChildError, RunError) as failure:
            raise _own_words(failure) from None

    def judge_the_end(self) -> Iterator[dict[str, Any]]:
        """The last parameters are judged too, when nobody changes them any more. Everything is saved: a judge that is lost now
        is not worth an error."""
        assert isinstance(self._central, Keeper)
        last = False
        while self._judge is not None and not last:
            if self._judging is None:
                self._judging, last = self._judge.call("score", timeout_s=ADVANCE_TIMEOUT_S), True
            while not self._judging.done():
                self._host.wait([self._judging, *self._central.open_calls()], 0.5)
                if gave_up():
                    raise GaveUp
                self._central.watch()
            call, self._judging = self._judging, None
            try:
                yield call.result()
            except (ChildLost, ChildError, RunError) as failure:
                self._warn(f"the last parameters were not judged: {str(failure).strip().splitlines()[-1]}")
                return

    @property
    def judges(self) -> bool:
        return self._judge is not None

    def take_ledger(self) -> list[dict[str, Any]]:
        return self._central.take_ledger() if isinstance(self._central, Keeper) else []

    def take_judgement(self) -> dict[str, Any] | None:
        """What the judge found since the last call: updates, steps, mean return, and the parameters it played with."""
        judgement, self._judgement = self._judgement, None
        return judgement

    def _finish(self, rank: int) -> Progress | None:
        try:
            progress = self._outcome(rank)
        except ChildLost as lost:
            self._replace(rank, lost)
            return None
        self._open[rank].pop(0)
        self._ready.add(rank)
        self._late.discard(rank)
        self._latest[rank] = progress
        if progress.sums is not None:
            self._sums.merge(progress.sums)
            self._stale.update(progress.sums["staleness"])
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
            cause = failure if self._central is not None else self._first_cause(failure)
            raise (_cannot_go_on(cause) if isinstance(cause, ChildLost) else _own_words(cause)) from None
        if progress is None:
            raise GaveUp
        return progress

    def _first_cause(self, failure: Exception) -> Exception:
        """A rank that failed shows at the others as a broken reduction: look for it for a second."""
        until = time.monotonic() + 1.0
        while "all_reduce" in str(failure) and time.monotonic() < until:
            calls = [calls[0] for calls in self._open.values() if calls]
            for call in calls:
                if call.done():
                    try:
                        call.result()
                    except Exception as other:
                        if "all_reduce" not in str(other):
                            return other
            self._host.wait([call for call in calls if not call.done()], 0.1)
        return failure

    def _round(self, told: list[Progress]) -> Progress:
        episodes: list[Episode] = [episode for progress in told for episode in progress.episodes]
        return Progress(told[0].clock, episodes, self.refused, self.replaced_workers)

    def _replace(self, rank: int, lost: ChildLost) -> None:
        """A new hand in the place of a lost one; it finds the parameters in the shared store."""
        self._open[rank] = []
        self._ready.discard(rank)
        self._late.discard(rank)
        self._hands.pop(rank).close(time.monotonic())
        if last := self._latest.pop(rank, None):
            self._refused += last.refused
            self._replaced += last.replaced
        if self._restarts_left == 0:
            self._warn(f"{lost}; {len(self._hands)} go on without it")
            if isinstance(self._central, Keeper):
                self._central.here(sorted(rank for rank in self._hands if self._seats[rank].learns))
            return
        self._restarts_left -= 1
        self.replaced_learners += 1
        self._seats[rank] = replace(self._seats[rank], life=self._seats[rank].life + 1)
        self._warn(f"{lost}; replaced, {self._restarts_left} more times allowed")
        self._hands[rank] = self._start(rank)

    # -- what is known of them ------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self._seats)

    @property
    def refused(self) -> int:
        counts = [self._latest[rank].refused for rank in sorted(self._latest)]
        return self._refused + sum(counts[:1] if self._central is None else counts)  # ranks refuse the same ones

    @property
    def replaced_workers(self) -> int:
        return self._replaced + sum(progress.replaced for progress in self._latest.values())

    def take_metrics(self) -> dict[str, Any]:
        """Means over all hands since the last call, and how stale their gradients were. Asks nobody but a hand in this process:
        the others must not be kept waiting for a slow one."""
        if not self._recipe.in_processes:
            self._sums.merge(self._hands[0].call("take_sums").result())
        metrics: dict[str, Any] = self._sums.take()
        stale, self._stale = self._stale, Counter()
        if isinstance(self._central, Keeper):
            metrics |= self._central.metrics()
        return {**metrics, "staleness_counts": {str(k): stale[k] for k in sorted(stale)}} if stale else metrics

    def state(self, hurried: bool = False) -> dict:
        """After settle(). Or hurried, after GaveUp: then simulators, and hands that do not answer, will start new episodes."""
        within = HURRY_S if hurried else START_TIMEOUT_S
        asked = [rank for rank in self._hands if hurried or (rank in self._ready and not self._open[rank])]
        for rank in asked if hurried else []:
            self._hands[rank].hurry()
        hands = {rank: self._hands[rank].call("state", timeout_s=within) for rank in asked}
        owners = [] if self._central is not None else asked if hurried else asked[:1]  # every rank has the same parameters
        stores = [self._hands[rank].call("store_state", timeout_s=within) for rank in owners]
        told = {str(rank): state for rank, call in hands.items() if (state := self._told(rank, call, hurried)) is not None}
        copies = [state for rank, call in zip(owners, stores, strict=True) if (state := self._told(rank, call, hurried))]
        if self._central is None and not copies:
            raise RunError("no learner answered in time; the last checkpoint is good")
        return {
            "store": copies[0] if self._central is None else self._central.state(),
            "hands": told,
            "lives": {str(rank): seat.life for rank, seat in self._seats.items()},
            "refused": self.refused,
            "sums": self._sums.state(),
        }

    def _told(self, rank: int, call: Future, hurried: bool) -> dict | None:
        """Without a hand that was lost meanwhile, where the others can do without."""
        try:
            return call.result()
        except (ChildLost, ChildError) as failure:
            if isinstance(failure, ChildLost) and self._central is not None and not hurried:
                self._replace(rank, failure)
            elif not hurried:
                raise (_cannot_go_on if isinstance(failure, ChildLost) else _own_words)(failure) from None
        return None


def seats(recipe: Recipe, lives: dict[str, int]) -> dict[int, Seat]:
    """Learners, and actors where others act for them, by number."""
    learners, actors = recipe.topology.learners, recipe.topology.actors
    everybody = [Seat(rank, learners, acts=actors == 0) for rank in range(learners)]
    everybody += [Seat(rank, actors, learns=False) for rank in range(actors)]
    # Where servers count what each life of a learner did, a resumed one is another life.
    again = 1 if isinstance(recipe.store, ServersConfig) and lives else 0
    return {seat.number: replace(seat, life=lives.get(str(seat.number), 0) + again) for seat in everybody}


def make_host(recipe: Recipe, files: tuple[int, ...]) -> Host:
    topology = recipe.topology
    if topology.host == "ray":
        from manyhands.cluster.host import RayHost

        return RayHost(topology.address, topology.learners + topology.actors, new_name(), gpus=recipe.device != "cpu")
    return ProcessHost(files) if recipe.in_processes else InlineHost()


def _own_words(failure: Exception) -> RunError:
    if isinstance(failure, ChildError):
        return RunError(f"a learner failed; its own traceback:\n{failure}")
    return RunError(str(failure))


def _cannot_go_on(lost: Exception) -> RunError:
    return RunError(f"{lost}: synchronous learners cannot go on without it. The last checkpoint is good: continue with resume")
