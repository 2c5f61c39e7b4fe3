"""Asynchronous learners on one machine, around parameters and the rule's memory in shared memory (chunks.py).

With locks a learner works on one chunk at a time: it pulls the chunk to its device, applies its gradient there, and writes it
back. Without (Hogwild, A3C) everybody writes into the same place, and only the counters are exact.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from manyhands.graphs import Captured
from manyhands.nets.flat import Model
from manyhands.stores.chunks import ByteLocks, SharedConfig, SharedMemoryOf
from manyhands.stores.gate import Gate
from manyhands.stores.rules import Adam, Rule
from manyhands.stores.shard import Shard
from manyhands.types import Clock, GradientInfo, Receipt


class SharedStore:
    """On a GPU a chunk's way there, its update and its way back are captured: one launch, and one wait under its lock."""

    def __init__(
        self, model: Model, rule: Rule, total_steps: int, config: SharedConfig, block: int, locks: int, capture: bool = True
    ) -> None:
        self.model, self.rule, self.total_steps, self._config = model, rule, total_steps, config
        self._central = SharedMemoryOf(block, model.parameters.numel(), rule, config)
        self._on_gpu = model.parameters.is_cuda
        alone = self._on_gpu and self._central.page_lock()  # copies that need nobody's attention
        self.locks = ByteLocks(locks)
        self._counters = config.chunks  # the number of the lock around the counters
        self._gate = Gate(model, rule)
        self._staleness = Counter[int]()
        self._last_staleness = 0
        self.clock = Clock()
        if config.lock:
            self._shards = [Shard(model.parameters[p], model.gradient[p], rule) for p in self._central.pieces]
        else:
            self._place = self._central.chunk(0)
            memory = {name: tensor for name, tensor in self._place.items() if name != "parameters"}
            gradient = model.gradient if not model.gradient.is_cuda else torch.zeros_like(model.gradient, device="cpu")
            self._shards = [Shard(self._place["parameters"], gradient, rule, memory)]
        self._merge = MultiStep(model, rule) if config.sync_updates > 1 else None
        self._captures = capture and alone and config.lock and rule.capturable and self._merge is None
        self._exchanges: dict[tuple[int, int], Captured] = {}  # by chunk and place
        self._rate = torch.zeros((), device=model.parameters.device)
        self._judge = Captured(self._gate.judge, self._rate.device, changes=(model.gradient, self._gate.counts))
        self._computed = torch.cuda.Event() if self._captures else None  # the gradient
        self._unmerged = 0  # local updates since the last synchronisation
        self._base = 0  # the version read last
        self._waited = 0.0  # for locks, before the last update

    @property
    def refused(self) -> int:
        return self._gate.refused

    def count(self, steps: int) -> int:
        with self.locks.hold(self._counters):
            self._central.steps[0] += steps
        self.clock = Clock(self.clock.updates, int(self._central.steps[0]))
        return steps

    def refresh(self) -> Clock:
        if self._unmerged == 0:
            self._base = self._pull_all()
        self.clock = Clock(self._base + self._unmerged, int(self._central.steps[0]))
        return self.clock

    def step(self, info: GradientInfo) -> Receipt:
        rate = self.rule.rate(info.samples, int(self._central.steps[0]) / self.total_steps)
        norm = self._gate.admit(self.clock.updates) if self._computed is None else self._judged(self._computed)
        if norm is None or not self._apply(rate):
            return Receipt(self.clock, applied=False, metrics={"learning_rate": rate})
        wait, self._waited = self.locks.seconds - self._waited, self.locks.seconds
        metrics = {"gradient_norm": norm, "learning_rate": rate, "lock_wait_ms": 1e3 * wait}
        if self._unmerged == 0:
            metrics["staleness"] = float(self._last_staleness)
        self.clock = Clock(self._base + self._unmerged, int(self._central.steps[0]))
        return Receipt(self.clock, applied=True, metrics=metrics)

    def _judged(self, computed: torch.cuda.Event) -> Tensor:
        """The gradient is waited for here, if it is not there yet: others need not wait for it, as they would under a lock."""
        computed.record()
        norm = self._judge()[0]
        computed.synchronize()
        return norm

    def _apply(self, rate: float) -> bool:
        if self._merge is not None:
            self._apply_later(self._merge, rate)
            return True
        found = self._apply_locked(rate) if self._config.lock else self._apply_in_place(rate)
        if found is None:
            self._base = self._pull_all()  # ours were spoilt
            return False
        self._moved_on(found, 1)
        return True

    def _moved_on(self, found: int, updates: int) -> None:
        """Our updates were added to a central copy that had seen `found` of them."""
        self._last_staleness = found - self._base
        self._staleness[self._last_staleness] += updates
        self._base = found + updates

    def _apply_locked(self, rate: float) -> int | None:
        """Chunk by chunk; returns how many updates chunk 0 had seen before, or None where the gradient turns out not to be
        finite: the wait for the first chunk is also the one for the judge."""
        found = 0
        if self._captures:
            self._rate.fill_(rate)
        for number, shard in enumerate(self._shards):
            with self.locks.hold(number):
                updates = self._count(number)
                if self._captures:
                    self._exchange(number)()
                else:
                    self._advance(number, shard, rate)
                self._wait_for_gpu()
                if self._captures and number == 0:
                    self._gate.check(self.clock.updates)
                    if not self._gate.passed:
                        return None
                self._publish(number, updates + 1)
            found = updates if number == 0 else found
        return found

    def _exchange(self, number: int) -> Captured:
        key = number, self._central.place(number)
        if key not in self._exchanges:
            advance = partial(self._advance, number, self._shards[number], self._rate)
            self._exchanges[key] = Captured(advance, self._rate.device)
        return self._exchanges[key]

    def _advance(self, number: int, shard: Shard, rate: float | Tensor) -> None:
        """May be repeated until it is published."""
        self._pull(number, shard)
        shard.apply(rate)
        self._put(number, {"parameters": shard.parameters, **shard.memory})

    def _apply_in_place(self, rate: float) -> int:
        (shard,) = self._shards
        if shard.gradient is not self.model.gradient:
            shard.gradient.copy_(self.model.gradient)
        shard.apply(rate)
        with self.locks.hold(self._counters):
            found = int(self._central.updates[0, 0])
            self._central.updates[0, 0] = found + 1
        self.model.parameters.copy_(shard.parameters)
        return found

    def _apply_later(self, merge: MultiStep, rate: float) -> None:
        merge.accumulate()
        for shard in self._shards:
            shard.apply(rate)
        self._unmerged += 1
        if self._unmerged == self._config.sync_updates:
            self.flush()

    def flush(self) -> None:
        if self._merge is not None and self._unmerged:
            n = self._unmerged
            found = self._synchronise(self._merge, n)
            self._unmerged = 0
            self._moved_on(found, n)

    def _synchronise(self, merge: MultiStep, n: int) -> int:
        found = 0
        for number, (shard, piece) in enumerate(zip(self._shards, self._central.pieces, strict=True)):
            merge.take(piece, shard)
            with self.locks.hold(number):
                updates = self._pull(number, shard)
                merge.add(piece, shard, n)
                self._put(number, {"parameters": shard.parameters, **shard.memory})
                self._wait_for_gpu()
                self._publish(number, updates + n)
            found = updates if number == 0 else found
        merge.begin()
        return found

    def _pull_all(self) -> int:
        """The newest parameters. The rule's memory is fetched with them where local updates will use it."""
        if not self._config.lock:
            self.model.parameters.copy_(self._place["parameters"])
            return int(self._central.updates[0, 0])
        versions = []
        for number, shard in enumerate(self._shards):
            with self.locks.hold(number):
                if self._merge is not None:
                    versions.append(self._pull(number, shard))
                    self._wait_for_gpu()
                else:
                    shard.parameters.copy_(self._central.chunk(number)["parameters"])
                    versions.append(self._count(number))
        if self._merge is not None:
            self._merge.begin()
        return versions[0]

    def _pull(self, number: int, shard: Shard) -> int:
        chunk = self._central.chunk(number)
        shard.load({"parameters": chunk["parameters"], "optimiser": chunk})
        return self._count(number)

    def _count(self, number: int) -> int:
        return int(self._central.updates[self._central.place(number), number])

    def _put(self, number: int, values: dict[str, Tensor]) -> None:
        """Into the place that nobody reads."""
        for name, tensor in self._central.chunk(number, ahead=1).items():
            tensor.copy_(values[name], non_blocking=True)

    def _publish(self, number: int, updates: int) -> None:
        """What was put there is the valid one now; it must have arrived."""
        self._central.updates[self._central.place(number, 1), number] = updates
        self._central.flips[number] += 1

    def _wait_for_gpu(self) -> None:
        """What is under a lock is ours no longer than that."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def take_staleness(self) -> dict[int, int]:
        counts, self._staleness = dict(self._staleness), Counter()
        return counts

    def state(self) -> dict:
        """Of the central copy. Each chunk is whole with its count, also while somebody is learning."""
        chunks, updates = [], []
        for number in range(len(self._central.pieces)):
            with self.locks.hold(number):
                chunks.append({name: x.clone() for name, x in self._central.chunk(number).items()})
                updates.append(self._count(number))
        vectors = {name: torch.cat([chunk[name] for chunk in chunks]) for name in self._central.vectors}
        scalars = {name: torch.stack([chunk[name] for chunk in chunks]) for name in self._central.scalars}
        return {
            "parameters": vectors.pop("parameters"),
            "optimiser": {**vectors, **scalars},
            "updates": updates[0],
            "chunk_updates": updates,
            "steps": int(self._central.steps[0]),
        }

    def initial_state(self) -> dict:
        """The model's parameters as the central ones, before any update."""
        memory, chunks = self.rule.initial_state(self.model.parameters), len(self._central.pieces)
        scalars = {name: memory[name].repeat(chunks) for name in self._central.scalars}
        counts = {"updates": 0, "chunk_updates": [0] * chunks, "steps": 0}
        return {"parameters": self.model.parameters, "optimiser": {**memory, **scalars}, **counts}

    def load(self, state: dict) -> None:
        for number, piece in enumerate(self._central.pieces):
            values = {"parameters": state["parameters"][piece]}
            for name, x in state["optimiser"].items():
                values[name] = x[piece] if name in self._central.vectors else x[number]
            self._put(number, values)
            self._wait_for_gpu()
            self._publish(number, state["chunk_updates"][number])
        self._central.steps[0] = state["steps"]

    def close(self) -> None:
        self._central.close()


class MultiStep:
    """Multi-step asynchronous Adam (Stooke & Abbeel 2018): local steps are ordinary Adam, and also add up

        a_g ← β₁a_g + g,  a_g² ← β₂a_g² + g²,  a_s ← a_s + step

    which a synchronisation after n of them adds to the central copy:

        θ̃ ← θ̃ - a_s,  m̃ ← β₁ⁿm̃ + (1 - β₁)a_g,  ṽ ← β₂ⁿṽ + (1 - β₂)a_g²
    """

    def __init__(self, model: Model, rule: Rule) -> None:
        assert isinstance(rule, Adam)
        self._model, self._rule = model, rule
        self._begun_from = model.parameters.clone()
        self._gradients, self._squares = (torch.zeros_like(model.parameters) for _ in range(2))
        self._steps = torch.zeros_like(model.parameters)

    def begin(self) -> None:
        self._begun_from.copy_(self._model.parameters)
        self._gradients.zero_()
        self._squares.zero_()

    def accumulate(self) -> None:
        g = self._model.gradient
        self._gradients.mul_(self._rule.beta1).add_(g)
        self._squares.mul_(self._rule.beta2).addcmul_(g, g)

    def take(self, piece: slice, shard: Shard) -> None:
        """a_s of a chunk, before its parameters are replaced by the central ones."""
        torch.sub(self._begun_from[piece], shard.parameters, out=self._steps[piece])

    def add(self, piece: slice, shard: Shard, n: int) -> None:
        """The central chunk, which the shard holds now, moves on by n steps."""
        b1, b2 = self._rule.beta1, self._rule.beta2
        shard.parameters.sub_(self._steps[piece])
        shard.memory["exp_avg"].mul_(b1**n).add_(self._gradients[piece], alpha=1 - b1)
        shard.memory["exp_avg_sq"].mul_(b2**n).add_(self._squares[piece], alpha=1 - b2)
        shard.memory["step"].add_(n)
