"""A small discrete-event simulation: a clock, resources that are shared or queued for, and processes that use them.

A process is a generator; what it yields is a function that will call its argument when the thing it waits for has happened.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable

from manyhands.plan.model import slower

Then = Callable[[], None]
Request = Callable[[Then], None]
Process = Generator[Request, None, None]


class Simulation:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._count = 0

    def after(self, seconds: float, then: Then) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, then))

    def sleep(self, seconds: float) -> Request:
        return lambda then: self.after(seconds, then)

    def start(self, process: Process) -> None:
        def go_on() -> None:
            request = next(process, None)
            if request is not None:
                request(go_on)

        self.after(0.0, go_on)

    def run(self, over: Callable[[], bool]) -> None:
        while self._events and not over():
            self.now, _, then = heapq.heappop(self._events)
            then()


class Shared:
    """Cores, or a link: everybody gets what they ask for, until together they ask for more than there is; then all get the same
    share of it (cores lose some of it to crowding). Under that rule all slow down alike, so one clock, that slows down too, tells
    when each is finished."""

    def __init__(self, simulation: Simulation, capacity: float, crowding: float = 1.0) -> None:
        self._simulation, self.capacity, self._crowding = simulation, capacity, crowding
        self._clock, self._at = 0.0, 0.0  # the clock that slows down, and when it was looked at
        self._demand = 0.0
        self._tasks: list[tuple[float, int, float, Then]] = []
        self._count = 0
        self._version = 0  # of the event that is due next
        self.used = 0.0  # capacity times seconds

    def use(self, seconds: float, demand: float = 1.0) -> Request:
        """seconds: if nobody else were there."""

        def request(then: Then) -> None:
            if seconds <= 0:
                self._simulation.after(0.0, then)
                return
            self._look()
            self._count += 1
            heapq.heappush(self._tasks, (self._clock + seconds, self._count, demand, then))
            self._demand += demand
            self._plan()

        return request

    @property
    def _slower(self) -> float:
        return slower(self._demand / self.capacity, self._crowding)

    def _look(self) -> None:
        passed = self._simulation.now - self._at
        self._clock += passed / self._slower
        self.used += passed * min(self._demand, self.capacity)
        self._at = self._simulation.now

    def _plan(self) -> None:
        self._version += 1
        if self._tasks:
            version, left = self._version, (self._tasks[0][0] - self._clock) * self._slower
            self._simulation.after(max(left, 0.0), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # somebody came or went since
        self._look()
        _, _, demand, then = heapq.heappop(self._tasks)
        self._demand -= demand
        self._plan()
        then()


class Queue:
    """One after the other, each on a core of the machine that the server is on."""

    def __init__(self, cores: Shared) -> None:
        self._cores = cores
        self._waiting: deque[tuple[float, Then, Then | None]] = deque()
        self._busy = False
        self.served = 0.0  # seconds

    def serve(self, seconds: float, when_done: Then | None = None) -> Request:
        """when_done: happens before anybody else is served."""

        def request(then: Then) -> None:
            self._waiting.append((seconds, then, when_done))
            if not self._busy:
                self._next()

        return request

    def _next(self) -> None:
        self._busy = bool(self._waiting)
        if not self._busy:
            return
        seconds, then, when_done = self._waiting.popleft()
        self.served += seconds

        def done() -> None:
            if when_done is not None:
                when_done()
            then()
            self._next()

        self._cores.use(seconds)(done)


def all_of(requests: Iterable[Request]) -> Request:
    """When the last of them has happened."""
    together = list(requests)

    def request(then: Then) -> None:
        left = len(together)

        def one() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then()

        for each in together:
            each(one)

    return request


class Gate:
    """Who waits is let through when somebody opens it."""

    def __init__(self) -> None:
        self._waiting: list[Then] = []

    def wait(self, then: Then) -> None:
        self._waiting.append(then)

    def open(self) -> None:
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then()
