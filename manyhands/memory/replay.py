"""Replay, organised by simulator: a ring of slots for each, every frame stored once.

A slot holds the frame that was seen, the action, the reward, the discount, and whether an episode was cut there. Stacks and
n-step sums are made when a batch is drawn, so n and the stack cost no memory. The frame after the newest slot is stored ahead,
and so every transition can be drawn as soon as its n steps are over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from manyhands.graphs import Captured
from manyhands.maths import random, schedules
from manyhands.maths.stacking import stacked, stacked_last
from manyhands.memory.sum_tree import SumTree
from manyhands.types import EnvSpec, Rollout, Streamed, TransitionBatch, UsageError

TRIES = 4  # draws of a slot before one that only reset is accepted, with weight 0
AHEAD = 64  # draws whose random numbers are made at once: a single one's are dozens of small operations


@dataclass(frozen=True)
class ReplayConfig:
    capacity: int = 1_000_000
    """Transitions kept, of all simulators together."""
    batch: int = 32
    """Transitions an update."""
    intensity: float = 8.0
    """How often each transition is used on average, whatever the batch and the number of simulators."""
    warmup_steps: int = 50_000
    """Steps of random play before the first update."""
    n_step: int = 1
    """Rewards summed before the bootstrap."""
    prioritized: bool = False
    """Draw in proportion to the last TD error instead of uniformly."""
    alpha: float = 0.5
    """Exponent of the priorities."""
    beta: float = 0.4
    """Exponent of the importance weights at the start; it reaches 1 at total_steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where frames lie; auto: beside the learner where they fit, otherwise in main memory."""
    shards: int = 0
    """Global replay: so many servers, which all actors fill and all learners draw from (needs topology.actors). 0: local."""

    def __post_init__(self) -> None:
        for name in ("capacity", "batch", "warmup_steps", "n_step"):
            if getattr(self, name) < 1:
                raise UsageError(f"memory.{name} = {getattr(self, name)}: must be at least 1")
        if self.shards < 0:
            raise UsageError(f"memory.shards = {self.shards}: must not be negative")
        if not (math.isfinite(self.intensity) and self.intensity > 0):
            raise UsageError(f"memory.intensity = {self.intensity}: must be a positive number")
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"memory.{name} = {getattr(self, name)}: must lie between 0 and 1")
        if not self.prioritized and (self.alpha, self.beta) != (ReplayConfig.alpha, ReplayConfig.beta):
            raise UsageError("memory.alpha and memory.beta: a uniform replay has no use for them; it needs memory.prioritized")
        if self.batch > self.capacity:
            raise UsageError(f"memory.batch = {self.batch} exceeds memory.capacity = {self.capacity}: lower it")
        if self.warmup_steps > self.capacity:
            raise UsageError(
                f"memory.warmup_steps = {self.warmup_steps} exceeds memory.capacity = {self.capacity}: they would be forgotten"
            )

    def share(self, learners: int) -> ReplayConfig:
        """What one of several learners keeps, each with a replay of its own."""
        if learners == 1:
            return self
        return replace(self, capacity=self.capacity // learners, warmup_steps=self.warmup_steps // learners)

    def slots(self, num_envs: int) -> int:
        """Of each simulator."""
        return -(-self.capacity // num_envs)

    def check(self, num_envs: int, horizon: int) -> None:
        slots = self.slots(num_envs)
        if slots <= self.n_step:
            raise UsageError(
                f"memory.n_step = {self.n_step} does not fit a replay of {slots} slots for each of {num_envs} simulators: "
                "raise memory.capacity"
            )
        if slots < horizon:
            raise UsageError(
                f"memory.capacity = {self.capacity} is less than one rollout of {num_envs} simulators × {horizon} slots"
            )


def ring_length(config: ReplayConfig, spec: EnvSpec, num_envs: int) -> int:
    """Slots kept beside the promised ones: the frame stored ahead, an unfinished n-step window, the oldest stack's history."""
    return config.slots(num_envs) + config.n_step + spec.stack - 1


def replay_bytes(config: ReplayConfig, spec: EnvSpec, num_envs: int) -> int:
    frame = math.prod(spec.frame) * torch.zeros(0, dtype=getattr(torch, spec.dtype)).element_size()
    slot = 8 + 3 * 4 + 2  # action, reward, discount, weight, cut, first
    tree = 9 if config.prioritized else 0  # a leaf of 8 bytes, and what lies above
    return ring_length(config, spec, num_envs) * num_envs * (frame + slot + tree)


def choose_device(config: ReplayConfig, needed: int, learner: torch.device, free: Callable[[torch.device], int]) -> torch.device:
    """Where the replay fits, with a fifth to spare for everything else; a UsageError with the bytes where it fits nowhere."""
    cpu = torch.device("cpu")
    wanted = {"auto": [learner, cpu], "cpu": [cpu], "cuda": [learner]}[config.device]
    if config.device == "cuda" and learner.type != "cuda":
        raise UsageError("memory.device = 'cuda' needs a learner there: set device = 'cuda', or memory.device = 'auto'")
    for device in wanted:
        if needed <= 0.8 * free(device):
            return device
    rooms = ", ".join(f"{free(device) / 1e9:.1f} GB free on {device.type}" for device in dict.fromkeys(wanted))
    raise UsageError(
        f"memory.capacity = {config.capacity} needs {needed / 1e9:.1f} GB ({needed:,} bytes), more than four fifths of what "
        f"is there ({rooms}): lower it"
    )


class Replay:
    """add() rollouts, draw batches by next(). What is drawn depends on the seed and on how many were drawn before, only."""

    def __init__(
        self,
        config: ReplayConfig,
        spec: EnvSpec,
        num_envs: int,
        device: torch.device,
        learner_device: torch.device,
        seed: int,
        total_steps: int,
        pauses: int = 1,
        saved: bool = False,
        capture: bool = True,
    ) -> None:
        self._config = config
        self._stack = spec.stack
        self._num_envs = num_envs
        self._length = ring_length(config, spec, num_envs)
        self._device, self._learner_device = device, learner_device
        self._seed, self._total_steps = seed, total_steps
        self._saved = saved
        self._pauses = pauses  # how often the learner asks between two rollouts: the updates owed are spread over them
        shape = (self._length, num_envs)
        self._frames = torch.zeros(*shape, *spec.frame, dtype=getattr(torch, spec.dtype), device=device)
        self._first = torch.zeros(shape, dtype=torch.bool, device=device)
        self._action = torch.zeros(shape, dtype=torch.int64, device=device)
        self._reward, self._discount, self._weight = (torch.zeros(shape, device=device) for _ in range(3))
        self._cut = torch.zeros(shape, dtype=torch.bool, device=device)
        self._simulators = torch.arange(num_envs, device=device)
        self._tree = SumTree(self._length * num_envs, device) if config.prioritized else None
        self._greatest = torch.ones((), dtype=torch.float64, device=device)  # priority of what is new
        self._cursor = torch.zeros(2, dtype=torch.int64, device=device)  # first and last slot to draw from
        self._beta = torch.zeros((), dtype=torch.float64, device=device)
        self._fed = tuple(torch.zeros(config.batch, dtype=t, device=device) for t in (torch.int64, torch.float64))
        self._draws = 1 if config.prioritized else 2 * TRIES  # random numbers a transition
        self._u = torch.zeros(config.batch, self._draws, device=device)
        self._ahead, self._ahead_from = self._u.unsqueeze(0), -AHEAD  # random numbers of the draws from that one on
        self._gather = Captured(lambda: self._gather_batch(self._u), device, capture)
        self._raise_fed = Captured(lambda: self._raise(*self._fed), device, capture)
        self._end = 0  # slots ever written
        self._steps = 0  # decisions of the run
        self._drawn = 0  # batches
        self._free_steps, self._free_batches = config.warmup_steps, 0  # these paid for nothing, those cost nothing
        self._share, self._taken = 0, 0
        self._resumed = False

    def __len__(self) -> int:
        """Slots that may be drawn, of all simulators, resets among them included."""
        begin, end = self._drawable()
        return (end - begin) * self._num_envs

    @property
    def owed(self) -> int:
        """Batches that the data has paid for and nobody has taken."""
        paid = self._config.intensity * max(self._steps - self._free_steps, 0) / self._config.batch
        return int(paid) + self._free_batches - self._drawn if len(self) else 0

    def add(self, rollout: Rollout) -> None:
        slots, history = len(rollout.action), rollout.stack - 1
        old = self._drawable()
        self._join(rollout, history)
        at = torch.arange(self._end, self._end + slots + 1, device=self._device) % self._length
        seen = slice(history, history + slots + 1)  # one frame ahead
        self._frames[at] = rollout.obs[seen].to(self._device)
        self._first[at] = rollout.first[seen].to(self._device)
        at = at[:-1]
        for ring, new in (
            (self._action, rollout.action),
            (self._reward, rollout.reward),
            (self._discount, rollout.discount),
            (self._cut, rollout.cut),
            (self._weight, rollout.weight),
        ):
            ring[at] = new.to(self._device)
        self._end += slots
        self._steps += rollout.steps
        self._resumed = False
        if self._tree is not None:
            self._admit(old, self._drawable())
        self._share, self._taken = -(-self.owed // self._pauses), 0

    def _beta_now(self) -> float:
        return schedules.linear(self._config.beta, 1.0, self._steps / self._total_steps)

    def metrics(self) -> dict[str, float]:
        return {"replay": float(len(self)), **({"beta": self._beta_now()} if self._config.prioritized else {})}

    def _drawable(self) -> tuple[int, int]:
        """Slots [begin, end), counted from the run's start, whose history, n steps and last frame are all there."""
        end = max(self._end - self._config.n_step + 1, 0)
        return max(end - self._config.slots(self._num_envs), 0), end

    def _join(self, rollout: Rollout, history: int) -> None:
        """What a new rollout says of the slots before it."""
        if self._end:
            # A simulator that was lost in the last slot of the rollout before: nothing may span it.
            self._cut[(self._end - 1) % self._length] |= rollout.weight[0].to(self._device) == 0
            if self._resumed or self._device.type == "cpu":  # asking a GPU means waiting for it
                self._mend_seam(rollout.first[history].to(self._device))
        elif history:  # begun in the middle of an episode, after a resume without contents: the rows before the first
            self._frames[-history:] = rollout.obs[:history].to(self._device)
            self._first[-history:] = rollout.first[:history].to(self._device)

    def _mend_seam(self, first: Tensor) -> None:
        """Where a simulator began anew without a reset slot – after a resume –, the slots that reach over are not drawn."""
        torn = (first & (self._weight[(self._end - 1) % self._length] > 0)).nonzero().squeeze(1)
        if len(torn) == 0:
            return
        slots = torch.arange(max(self._end - self._config.n_step, 0), self._end, device=self._device)
        rows = slots % self._length
        self._weight[rows.unsqueeze(1), torn] = 0.0
        if self._tree is not None:
            keys = (rows.unsqueeze(1) * self._num_envs + torn).flatten()
            self._tree.set(keys, torch.zeros(len(keys), device=self._device))

    def _admit(self, old: tuple[int, int], new: tuple[int, int]) -> None:
        """New slots at the greatest priority so far, resets and slots that are no longer whole at none."""
        assert self._tree is not None
        gone = torch.arange(old[0], min(new[0], old[1]), device=self._device)
        come = torch.arange(max(old[1], new[0]), new[1], device=self._device)
        for slots, value in ((gone, None), (come, self._greatest)):
            if len(slots):
                rows = slots % self._length
                keys = rows.unsqueeze(1) * self._num_envs + self._simulators
                priority = torch.zeros_like(self._weight[rows]) if value is None else value * self._weight[rows]
                self._tree.set(keys.flatten(), priority.flatten())

    def next(self) -> TransitionBatch | None:
        if self._taken >= self._share or self.owed < 1:
            self._taken = 0
            return None
        self._taken += 1
        return self.draw()

    def draw(self) -> TransitionBatch:
        """A batch; on a GPU the next draw overwrites it."""
        self._cursor.copy_(torch.tensor(self._drawable()), non_blocking=True)
        self._beta.fill_(self._beta_now())
        if not 0 <= self._drawn - self._ahead_from < AHEAD:
            self._ahead, self._ahead_from = self._noise(self._config.batch, AHEAD), self._drawn
        self._u.copy_(self._ahead[self._drawn - self._ahead_from])
        self._drawn += 1
        batch = self._gather()
        if self._device == self._learner_device:
            return batch
        moved = {f.name: getattr(batch, f.name).to(self._learner_device) for f in fields(batch) if f.name != "keys"}
        return replace(batch, **moved)

    def draw_some(self, n: int) -> tuple[TransitionBatch, Tensor, Tensor]:
        """For a replay that is one of several: n transitions, their priorities, and the slots they lie in, counted from the
        start. Their weights are 0 or 1: importance is relative to all replays."""
        begin, end = self._drawable()
        self._cursor.copy_(torch.tensor([begin, end]))
        u = self._noise(n, 1)[0]
        self._drawn += 1
        batch = self._gather_batch(u)
        slots = begin + (batch.keys // self._num_envs - begin) % self._length
        if self._tree is None:
            return batch, batch.weight, slots
        priority = self._tree.get(batch.keys)
        return replace(batch, weight=(priority > 0).float()), priority, slots

    @property
    def mass(self) -> float:
        """What draws are in proportion to."""
        return float(len(self)) if self._tree is None else float(self._tree.total)

    def feedback_at(self, keys: Tensor, slots: Tensor, priority: Tensor) -> None:
        """As feedback(), for slots that may have been overwritten since: those are left alone."""
        there = slots >= self._drawable()[0]
        if self._tree is not None and there.any():
            self._raise(keys[there], priority[there].to(torch.float64))

    def _gather_batch(self, u: Tensor) -> TransitionBatch:
        """Reads where to draw from _cursor, _beta and u [N, draws] only, so that it can be a CUDA graph."""
        keys, weight = self._draw_prioritized(u) if self._tree is not None else self._draw_uniform(u)
        reward, discount, steps = self._sum(keys)
        after = (keys + steps * self._num_envs) % self._weight.numel()
        obs, next_obs = self._see(torch.cat([keys, after])).chunk(2)
        return TransitionBatch(obs, self._action.flatten()[keys], reward, discount, next_obs, weight, keys)

    def _noise(self, n: int, batches: int) -> Tensor:
        """Of the next batches: [batches, N, draws]."""
        rows = torch.arange(n, device=self._device)
        numbers = torch.arange(self._drawn, self._drawn + batches, device=self._device).unsqueeze(1)
        return random.uniform(self._seed, random.REPLAY, rows, numbers, self._draws)

    def _draw_uniform(self, u: Tensor) -> tuple[Tensor, Tensor]:
        begin, end = self._cursor[0], self._cursor[1]
        slot = (begin + (u[:, :TRIES] * (end - begin)).long()) % self._length  # [N, TRIES]
        keys = slot * self._num_envs + (u[:, TRIES:] * self._num_envs).long()
        weight = self._weight.flatten()[keys]
        good = weight.argmax(1, keepdim=True)  # the first that is no reset
        return keys.gather(1, good).squeeze(1), weight.gather(1, good).squeeze(1)

    def _draw_prioritized(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Stratified: one draw from each of N equal parts of the total; importance weights relative to the batch's largest."""
        assert self._tree is not None
        keys = self._tree.draw((torch.arange(len(u), device=self._device) + u.squeeze(1).to(torch.float64)) / len(u))
        share = self._tree.get(keys) / self._tree.total
        kept = (self._cursor[1] - self._cursor[0]) * self._num_envs
        weight = (share * kept).clamp(min=1e-12) ** -self._beta
        return keys, (weight / weight.max()).float()

    def _sum(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Discounted rewards up to n steps or a cut, the discount of what follows, and how many steps that were."""
        if self._config.n_step == 1:  # a fifteenth of the operations
            return self._reward.flatten()[keys], self._discount.flatten()[keys], torch.ones_like(keys)
        ahead = torch.arange(self._config.n_step, device=self._device) * self._num_envs
        at = (keys.unsqueeze(1) + ahead) % self._weight.numel()  # [N, n]
        reward, discount, cut = (ring.flatten()[at] for ring in (self._reward, self._discount, self._cut))
        goes_on = cut.cumsum(1) - cut.long() == 0  # nothing was cut before
        discount = torch.where(goes_on, discount, 1.0).cumprod(1)
        before = torch.cat([torch.ones_like(discount[:, :1]), discount[:, :-1]], 1)
        return torch.where(goes_on, reward * before, 0.0).sum(1), discount[:, -1], goes_on.sum(1)

    def _see(self, rows: Tensor) -> Tensor:
        stack = stacked_last if self._device.type == "cpu" and self._stack > 1 else stacked
        return stack(self._frames, self._first, rows, self._stack)

    def feedback(self, keys: Tensor, priority: Tensor) -> None:
        if self._tree is None:
            return
        if len(keys) != len(self._fed[0]):
            self._raise(keys, priority.to(self._device, torch.float64))
            return
        for static, new in zip(self._fed, (keys, priority), strict=True):
            static.copy_(new)
        self._raise_fed()

    def _raise(self, keys: Tensor, priority: Tensor) -> None:
        assert self._tree is not None
        raised = (priority.abs() + 1e-6) ** self._config.alpha
        raised = torch.where(raised.isfinite(), raised, 0.0)  # a transition that gives nothing finite is not drawn again
        self._greatest.copy_(torch.maximum(self._greatest, raised.max()))
        self._tree.set(keys, raised)  # drawn twice: equal TD errors

    def _rings(self) -> dict[str, Tensor]:
        names = ("frames", "first", "action", "reward", "discount", "weight", "cut")
        return {name: getattr(self, f"_{name}") for name in names}

    def state(self) -> dict:
        counts = {name: getattr(self, f"_{name}") for name in ("steps", "drawn", "free_steps", "free_batches", "share", "taken")}
        if not self._saved or self._end == 0:
            return {**counts, "contents": False}
        rings = {name: Streamed(ring) for name, ring in self._rings().items()}
        tree = {"tree": self._tree.state(), "greatest": self._greatest} if self._tree is not None else {}
        return {**counts, "contents": True, "end": self._end, **rings, **tree}

    def load(self, state: dict) -> None:
        self._steps, self._drawn, self._resumed = state["steps"], state["drawn"], True
        if not state["contents"]:  # filled anew by the policy, as many steps as the warm-up had, before learning goes on
            self._free_steps, self._free_batches = self._steps + self._config.warmup_steps, self._drawn
            return
        self._free_steps, self._free_batches = state["free_steps"], state["free_batches"]
        self._share, self._taken, self._end = state["share"], state["taken"], state["end"]
        for name, ring in self._rings().items():
            state[name].read_into(ring)
        if self._tree is not None:
            self._tree.load(state["tree"])
            self._greatest.copy_(state["greatest"])
