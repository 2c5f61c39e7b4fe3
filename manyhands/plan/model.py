"""The numbers a prediction is made of, and the closed form: the slowest of simulating and learning, serving, and moving."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from manyhands.types import UsageError

StoreKind = Literal["local", "allreduce", "shared", "asynchronous", "synchronous"]


@dataclass(frozen=True)
class Costs:
    """Seconds of one learner, with so many threads of its own and nobody beside it."""

    threads: int
    rollout_s: float  # simulating and acting, for all slots of a rollout
    gradient_s: float  # T: from a batch to its gradient
    spread: float = 0.0  # standard deviation over mean, of whole rollouts with their updates


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
    call_s: float  # asking a server and being answered, beside what is moved
    bytes_per_learner: int
    cores: int
    cpu: str

    def at(self, threads: int) -> Costs:
        """With that many threads, or the nearest number that was measured."""
        return min(self.costs, key=lambda c: abs(math.log(c.threads / threads)))

    @property
    def vector_bytes(self) -> int:
        return 4 * self.parameters

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Measured:
        try:
            tree = json.loads(path.read_text())
            return cls(**{**tree, "costs": tuple(Costs(**c) for c in tree["costs"])})
        except OSError as error:
            raise UsageError(f"--measured {path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"--measured {path}: not what `manyhands plan --save` writes") from None


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

    @property
    def one(self) -> bool:
        return not self.learners_each


def closed_form(measured: Measured, topology: Topology, machines: Machines) -> dict[str, Any]:
    """Updates per second that each part could do if the others were no limit; the least of them is the answer, and says where the
    bend is: P = T/τ learners, for servers that are asked one gradient at a time."""
    n, costs = topology.learners, measured.at(machines.threads(topology.learners))
    together = min(machines.learners_each or n, n)  # on one machine
    cpu_s = costs.rollout_s / measured.updates_per_rollout + costs.gradient_s
    moved = 2 * measured.copy_s if topology.store in ("asynchronous", "synchronous", "shared") else 0.0
    crowded = max(together * costs.threads / machines.cores, 1.0)
    alone_s = (cpu_s + moved) * crowded + measured.call_s + 2 * machines.latency_s
    own_update = measured.update_s if topology.store in ("local", "allreduce", "shared") else 0.0
    limits = {"learners": n / (alone_s + own_update * crowded)}
    if topology.store == "asynchronous":
        limits["servers"] = topology.shards / (measured.update_s + measured.copy_s)
    if topology.store == "synchronous":
        served = n * 2 * measured.copy_s + measured.update_s
        limits["servers"] = topology.shards * (topology.gather or n) / served
    if not machines.one:
        per_update = 2 * measured.vector_bytes
        limits["learners' network"] = machines.number(n) * machines.bytes_per_s / per_update
        limits["servers' network"] = topology.shards * machines.bytes_per_s / per_update
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
        "bend": alone_s / (measured.update_s + measured.copy_s) * topology.shards,
    }
