"""The numbers a prediction is made of, and the closed form: the slowest of simulating and learning, serving, and moving."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from manyhands.types import UsageError

Curve = tuple[tuple[float, float], ...]  # learners for each core, seconds
StoreKind = Literal["local", "allreduce", "shared", "asynchronous", "synchronous"]


@dataclass(frozen=True)
class Costs:
    """Seconds of one learner that may use so many cores, the others being used by learners like it."""

    threads: int
    rollout_s: float  # simulating and acting, for all slots of a rollout
    gradient_s: float  # T: from a batch to its gradient
    spread: float = 0.0  # standard deviation over mean, of whole rollouts with their updates
    busy: float = 1.0  # cores that it keeps busy on average
    simulate_s: float = 0.0  # of rollout_s, waiting for simulators
    act_s: float = 0.0  # of rollout_s, the network's share


@dataclass(frozen=True)
class Measured:
    """One recipe on one machine."""

    recipe: str
    parameters: int
    steps_per_rollout: float
    updates_per_rollout: float
    costs: tuple[Costs, ...]
    update_s: float  # τ: the whole vector, on one core
    copy_s: float  # the whole vector once, from one process to another
    calls: Curve  # asking a server and being answered, beside what is moved
    reductions: Curve  # adding up everybody's gradients and applying them
    bytes_per_learner: int  # beside a replay
    replay_bytes: int  # of all learners together
    cores: int
    cpu: str
    gpus: int = 0  # of a machine, where the networks are
    crowding: float = 1.0  # what two learners on one core need, over twice what one needs: each finds the other's caches

    def at(self, threads: int) -> Costs:
        """With that many threads, or the nearest number that was measured."""
        return min(self.costs, key=lambda c: abs(math.log(c.threads / threads)))

    def with_batches(self, times: int) -> Measured:
        """Batches so many times as large: fewer updates, and a gradient takes as many times as long."""
        costs = tuple(replace(c, gradient_s=times * c.gradient_s) for c in self.costs)
        return replace(self, costs=costs, updates_per_rollout=self.updates_per_rollout / times)

    def call_s(self, crowd: float) -> float:
        return _on(self.calls, crowd)

    def reduction_s(self, crowd: float) -> float:
        return _on(self.reductions, crowd) if self.reductions else 2 * self.copy_s + self.update_s

    @property
    def vector_bytes(self) -> int:
        return 4 * self.parameters

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Measured:
        try:
            tree = json.loads(path.read_text())
            curves = {name: tuple(map(tuple, tree[name])) for name in ("calls", "reductions")}
            return cls(**{**tree, **curves, "costs": tuple(Costs(**c) for c in tree["costs"])})
        except OSError as error:
            raise UsageError(f"--measured {path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"--measured {path}: not what `manyhands plan --save` writes") from None


def slower(crowd: float, crowding: float) -> float:
    """How many times as long work takes where so many want each core."""
    return crowd * (1 + (crowding - 1) * min(crowd - 1, 1.0)) if crowd > 1 else 1.0


def _on(curve: Curve, crowd: float) -> float:
    """Between the points that were measured, and beyond the last as it rose before; nothing where nothing was measured."""
    if len(curve) < 2 or crowd <= curve[0][0]:
        return curve[0][1] if curve else 0.0
    (x0, y0), (x1, y1) = next((pair for pair in itertools.pairwise(curve) if crowd <= pair[1][0]), curve[-2:])
    return max(y0 + (y1 - y0) * (crowd - x0) / (x1 - x0), 0.0)


@dataclass(frozen=True)
class Topology:
    store: StoreKind
    learners: int
    shards: int = 1  # or chunks of a shared store
    gather: int = 0  # gradients that make a version


@dataclass(frozen=True)
class Machines:
    """What the learners run on. Servers are on machines of their own, unless there is one machine only."""

    cores: int
    learners_each: int = 0  # 0: all on one
    bytes_per_s: float = math.inf  # of each machine's link
    latency_s: float = 0.0  # one way

    def number(self, learners: int) -> int:
        return math.ceil(learners / self.learners_each) if self.learners_each else 1

    def threads(self, learners: int) -> int:
        return max(self.cores // min(self.learners_each or learners, learners), 1)

    def crowd(self, learners: int) -> float:
        """Learners for each core."""
        return min(self.learners_each or learners, learners) / self.cores

    @property
    def one(self) -> bool:
        return not self.learners_each


def _bend(measured: Measured, topology: Topology, machines: Machines, work_s: float) -> float:
    """P = T/τ: as many learners as there are updates of the servers in the time that each needs by itself."""
    turn_s = work_s + measured.call_s(0.0) + 2 * machines.latency_s
    return turn_s / max(measured.update_s + measured.copy_s, 1e-9) * topology.shards


def closed_form(measured: Measured, topology: Topology, machines: Machines) -> dict[str, Any]:
    """Updates per second that each part could do if the others were no limit; the least of them is the answer, and says where the
    bend is: P = T/τ learners, for servers that are asked one gradient at a time."""
    n, costs = topology.learners, measured.at(machines.threads(topology.learners))
    network_s = costs.act_s / measured.updates_per_rollout + costs.gradient_s
    whole_s = costs.rollout_s / measured.updates_per_rollout + costs.gradient_s
    gpu_s = network_s if measured.gpus else 0.0
    moved = 2 * measured.copy_s if topology.store in ("asynchronous", "synchronous", "shared") else 0.0
    crowd = machines.crowd(n)
    crowded = slower(crowd * costs.busy, measured.crowding)
    alone_s = (whole_s - gpu_s + moved) * crowded + gpu_s + 2 * machines.latency_s
    if topology.store in ("asynchronous", "synchronous"):
        # Synchronous: a gradient is offered to the servers, announced to the chief, and the parameters are asked for.
        alone_s += measured.call_s(crowd) * (3 if topology.store == "synchronous" else 1)
    own_update = measured.update_s * crowded if topology.store in ("local", "shared") else 0.0
    if topology.store == "allreduce":
        own_update = measured.reduction_s(crowd) + (0.0 if machines.one else 2 * measured.vector_bytes / machines.bytes_per_s)
    limits = {"learners": n / (alone_s + own_update)}
    if measured.gpus:
        limits["GPUs"] = machines.number(n) * measured.gpus / network_s
    if topology.store == "asynchronous":
        limits["servers"] = topology.shards / (measured.update_s + measured.copy_s)
    if topology.store == "synchronous":
        served = n * 2 * measured.copy_s + measured.update_s
        limits["servers"] = topology.shards * (topology.gather or n) / served
    if not machines.one and topology.store in ("asynchronous", "synchronous"):
        per_update = 2 * measured.vector_bytes
        limits["learners' network"] = machines.number(n) * machines.bytes_per_s / per_update
        limits["servers' network"] = topology.shards * machines.bytes_per_s / per_update
    room = machines.cores / costs.busy if machines.one else math.inf  # learners that have cores to themselves
    made = 1 if topology.store in ("asynchronous", "shared", "local") else n  # learners that an update is made of
    made = (topology.gather or n) if topology.store == "synchronous" else made
    bottleneck = min(limits, key=lambda name: limits[name])
    gradients = limits[bottleneck]
    steps = gradients * measured.steps_per_rollout / measured.updates_per_rollout
    return {
        "steps_per_s": steps,
        "updates_per_s": gradients / made,
        "bottleneck": bottleneck,
        "limits": limits,
        "bend": min(_bend(measured, topology, machines, whole_s + moved), room),
    }
