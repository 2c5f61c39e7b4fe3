"""A topology, event by event: cores that are shared, servers that are queued for, links, and who waits for whom."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from manyhands.plan.events import Gate, Process, Queue, Request, Shared, Simulation, Then, all_of
from manyhands.plan.model import Costs, Machines, Measured, Topology

EACH, LEAST, MOST = 40, 400, 6000  # gradients that are played through: of each learner, and in all; at least four of each
SERVERS_COPY = 0.3  # of what a push and pull moves is moved by the server: it writes the answer, everything else is the learner's
WARM = 0.2  # of it is not counted


class Play:
    def __init__(self, measured: Measured, topology: Topology, machines: Machines, seed: int = 0) -> None:
        self.measured, self.topology, self.machines = measured, topology, machines
        self.simulation = Simulation()
        self._random = np.random.default_rng(seed)
        n, number = topology.learners, machines.number(topology.learners)
        self.cores = [Shared(self.simulation, machines.cores, measured.crowding) for _ in range(number)]
        self._costs: Costs = measured.at(machines.threads(n))
        self._crowd = machines.crowd(n)
        self.gpus = [Shared(self.simulation, measured.gpus) for _ in range(number)] if measured.gpus else []
        central = topology.store in ("asynchronous", "synchronous")
        served_on = self.cores[:1] if machines.one else [Shared(self.simulation, machines.cores) for _ in range(topology.shards)]
        self.queues = [Queue(served_on[i % len(served_on)]) for i in range(topology.shards)]
        far = central and not machines.one
        self.links = [Shared(self.simulation, 1.0) for _ in range(number if far else 0)]
        self.server_links = [Shared(self.simulation, 1.0) for _ in range(topology.shards if far else 0)]
        self.version = 0  # updates
        self._base: dict[int, int] = {}  # the version that each learner computes from
        self.gradients = 0  # applied or not
        self.late = 0
        self.staleness: Counter[int] = Counter()
        self._arrived: list[int] = []
        self._made, self._barrier = Gate(), Gate()
        self._working_s = 0.0  # of all learners together
        self._spread = math.sqrt(math.log(1 + self._costs.spread**2))

    # -- what everybody does -------------------------------------------------------------------------------------------------

    def _jitter(self) -> float:
        """Around 1: some rollouts take longer than others."""
        return float(np.exp(self._random.normal(-(self._spread**2) / 2, self._spread))) if self._spread else 1.0

    def _compute(self, learner: int, seconds: float, busy: float | None = None) -> Request:
        cores = self.cores[learner // (self.machines.learners_each or self.topology.learners)]
        work = cores.use(seconds, busy or self._costs.busy)

        def request(then: Then) -> None:
            begin = self.simulation.now

            def done() -> None:
                self._working_s += self.simulation.now - begin
                then()

            work(done)

        return request

    def _network(self, learner: int, seconds: float) -> Request:
        """On one of the machine's GPUs, if that is where networks are."""
        if not self.gpus:
            return self._compute(learner, seconds)
        return self.gpus[learner // (self.machines.learners_each or self.topology.learners)].use(seconds)

    def _call(self, learner: int) -> Iterator[Request]:
        """Asking and being answered: what it costs where nobody is in the way takes a core, the rest is waiting for one."""
        alone_s = self.measured.call_s(0.0)
        yield self._compute(learner, alone_s, 1)
        yield self.simulation.sleep(max(self.measured.call_s(self._crowd) - alone_s * max(self._crowd, 1.0), 0.0))

    def _move(self, learner: int) -> Iterator[Request]:
        """The whole vector over the network, one way; nothing on one machine."""
        if self.links:
            seconds = self.measured.vector_bytes / self.machines.bytes_per_s
            mine = self.links[learner // self.machines.learners_each]
            shares = [link.use(seconds / len(self.server_links)) for link in self.server_links]
            yield all_of([mine.use(seconds), *shares])
            yield self.simulation.sleep(self.machines.latency_s)

    def _learner(self, learner: int) -> Process:
        measured, learn = self.measured, getattr(self, f"_{self.topology.store}")
        owed = 0.0
        if self.topology.learners > 1:  # nobody begins at the same moment
            yield self.simulation.sleep(float(self._random.uniform(0, self._costs.rollout_s + self._costs.gradient_s)))
        self._base[learner] = self.version
        while True:
            slower = self._jitter()
            yield self._compute(learner, (self._costs.rollout_s - self._costs.act_s) * slower)
            yield self._network(learner, self._costs.act_s * slower)
            owed += measured.updates_per_rollout
            while owed >= 1:
                owed -= 1
                yield self._network(learner, self._costs.gradient_s * slower)
                yield from learn(learner)
                self.gradients += 1

    # -- what becomes of a gradient ------------------------------------------------------------------------------------------

    def _local(self, learner: int) -> Iterator[Request]:
        yield self._compute(learner, self.measured.update_s, 1)
        self._apply(learner)

    def _allreduce(self, learner: int) -> Iterator[Request]:
        self._arrived.append(learner)
        if len(self._arrived) < self.topology.learners:
            yield self._barrier.wait
        else:
            self._arrived = []
            self.version += 1
            self._barrier.open()
        yield self.simulation.sleep(self.measured.reduction_s(self._crowd))
        if not self.machines.one:
            yield self.simulation.sleep(2 * self.measured.vector_bytes / self.machines.bytes_per_s + 2 * self.machines.latency_s)

    def _shared(self, learner: int) -> Iterator[Request]:
        """Chunk after chunk under its lock, by the learner itself."""
        seconds = (self.measured.update_s + 2 * self.measured.copy_s) / self.topology.shards
        for chunk, queue in enumerate(self.queues):
            last = chunk == self.topology.shards - 1
            yield queue.serve(seconds, (lambda: self._apply(learner)) if last else None)

    def _apply(self, learner: int) -> None:
        self.staleness[self.version - self._base[learner]] += 1
        self.version += 1
        self._base[learner] = self.version

    def _asynchronous(self, learner: int) -> Iterator[Request]:
        measured, shards = self.measured, self.topology.shards
        copied = 2 * measured.copy_s
        yield self._compute(learner, copied * (1 - SERVERS_COPY), 1)
        yield from self._call(learner)
        yield from self._move(learner)
        seconds = (measured.update_s + copied * SERVERS_COPY) / shards
        yield all_of(queue.serve(seconds, None if i else lambda: self._apply(learner)) for i, queue in enumerate(self.queues))
        yield from self._move(learner)

    def _synchronous(self, learner: int) -> Iterator[Request]:
        measured, shards = self.measured, self.topology.shards
        version = self._base[learner]
        yield self._compute(learner, measured.copy_s, 1)
        yield from self._call(learner)
        yield from self._move(learner)
        yield all_of(queue.serve(measured.copy_s * 0.5 / shards) for queue in self.queues)  # a copy is held until it is used
        yield from self._call(learner)  # announced to the chief
        if version < self.version:
            self.late += 1
        else:
            self._arrived.append(learner)
            if len(self._arrived) >= (self.topology.gather or self.topology.learners):
                gathered, self._arrived = len(self._arrived), []
                seconds = (measured.update_s + measured.copy_s * 0.5 * gathered) / shards  # their mean, then the rule
                yield all_of(queue.serve(seconds) for queue in self.queues)
                self.version += 1
                self.staleness[0] += gathered
                self._made.open()
            else:
                yield self._made.wait
        yield all_of(queue.serve(2 * measured.copy_s * SERVERS_COPY / shards) for queue in self.queues)
        self._base[learner] = self.version
        yield from self._move(learner)
        yield from self._call(learner)
        yield self._compute(learner, measured.copy_s, 1)

    # -- the whole -----------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        n = self.topology.learners
        for learner in range(n):
            self.simulation.start(self._learner(learner))
        a_rollout = math.ceil(self.measured.updates_per_rollout) * n  # gradients: the clock must not stop within the first few
        wanted = max(min(EACH * n, MOST), 4 * n, LEAST, min(10 * a_rollout, 5 * MOST), 2 * a_rollout)
        self.simulation.run(lambda: self.gradients >= WARM * wanted)
        before = (self.simulation.now, self.version, self.gradients, self._busy())
        self.staleness.clear()
        self.simulation.run(lambda: self.gradients >= (1 + WARM) * wanted)
        seconds = self.simulation.now - before[0]
        busy = {name: (after - before[3][name]) / seconds for name, after in self._busy().items()}
        total = sum(self.staleness.values())
        steps_each = self.measured.steps_per_rollout / self.measured.updates_per_rollout
        return {
            "steps_per_s": (self.gradients - before[2]) * steps_each / seconds,
            "updates_per_s": (self.version - before[1]) / seconds,
            "staleness": {k: round(v / max(total, 1), 4) for k, v in sorted(self.staleness.items())},
            "late": self.late / max(self.gradients, 1),
            "busy": {name: round(share, 3) for name, share in busy.items()},
            "bottleneck": "cores" if busy["cores"] > 0.97 else max(busy, key=lambda name: busy[name]),
        }

    def _busy(self) -> dict[str, float]:
        """How much of each kind of thing was used so far, in seconds of all of it."""
        used = {
            "the learners' own work": self._working_s / self.topology.learners,
            "cores": sum(c.used / c.capacity for c in self.cores) / len(self.cores),
        }
        if self.topology.store in ("asynchronous", "synchronous", "shared"):
            name = "locks" if self.topology.store == "shared" else "servers"
            used[name] = sum(queue.served for queue in self.queues) / len(self.queues)
        if self.gpus:
            used["GPUs"] = sum(gpu.used / gpu.capacity for gpu in self.gpus) / len(self.gpus)
        if self.links:
            used["learners' network"] = sum(link.used for link in self.links) / len(self.links)
            used["servers' network"] = sum(link.used for link in self.server_links) / len(self.server_links)
        return used


def simulate(measured: Measured, topology: Topology, machines: Machines, seed: int = 0) -> dict[str, Any]:
    return Play(measured, topology, machines, seed).run()
