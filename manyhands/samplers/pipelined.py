"""Simulators that never wait for a full batch: GA3C's and BA3C's queues, in one loop.

Whoever is ready is served: the prediction queue is what has arrived. Each simulator fills a piece of T slots of its own; a
finished piece waits in the training queue until enough of them make a rollout, which the learner takes while the simulators
step. The first actions of a rollout may be some updates older than the parameters that learn from it: the policy lag.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.maths import random
from manyhands.maths.stacking import room_for_frames, stacked
from manyhands.samplers.episodes import EpisodeTracker
from manyhands.samplers.lockstep import LIVES
from manyhands.samplers.noise import Noise
from manyhands.samplers.serving import Serving, note
from manyhands.samplers.slots import ANSWER, learnable, write_down
from manyhands.types import Episode, PartialGroup, Policy, Rollout, Seat, Step

LIFE_SLOTS = 1 << 32  # simulators that were started anew draw other random numbers


class PipelinedSampler:
    """The queue is bounded: it holds less than one rollout and what one service may add."""

    def __init__(
        self,
        group: PartialGroup,
        horizon: int,
        pieces: int,
        gamma: float,
        seed: int,
        device: torch.device,
        reward_clip: float = 0.0,
        life_loss: bool = False,
        capture: bool = True,
        seat: Seat = Seat(),  # noqa: B008 – frozen
    ) -> None:
        self.group = group
        self.spec, self.num_envs = group.spec, group.num_envs
        self._T, self._H, self._pieces = horizon, group.spec.stack - 1, pieces
        self._gamma, self._seed, self._device = gamma, seed, device
        self._reward_clip, self._life_loss = reward_clip, life_loss
        self._capture = capture
        self._ids = np.arange(self.num_envs) + seat.rank * self.num_envs  # among those of all learners
        self._life = seat.life * LIVES
        self.epsilon = torch.zeros(self.num_envs, device=device)
        self.seconds = {"simulate": 0.0, "transfer": 0.0, "act": 0.0}
        self._tracker = EpisodeTracker(self.num_envs)
        self._episodes: list[Episode] = []
        # Pieces being filled, one a simulator, on the learner's device; what is to be counted or told is here.
        T, B, H = self._T, self.num_envs, self._H
        self._t = np.full(B, -1)  # slots of each piece so far; -1: not even reset
        self._slots = np.zeros(B, np.int64)  # of each simulator, since it was started
        self._shown = np.zeros(B, np.int64)  # frames of each since its reset, before the newest
        self._pieces_open: dict[str, Tensor] = {
            "obs": room_for_frames(H + T + 1, B, self.spec.frame, getattr(torch, self.spec.dtype), device),
            "first": torch.zeros(H + T + 1, B, dtype=torch.bool, device=device),
            "action": torch.zeros(T, B, dtype=torch.int64, device=device),
            "answers": torch.zeros(T, B, dtype=torch.int64, device=device),
            "version": torch.zeros(T, B, dtype=torch.int64),
            "reset": torch.zeros(T, B, dtype=torch.bool),
        }
        self._far = device.type == "cuda"  # the simulators are elsewhere than their frames
        self._own = set(self._pieces_open)  # other names are what acting gives besides
        self._servings: dict[int, Serving] = {}
        self._policy: Policy | None = None
        self._noise = Noise(seed, torch.from_numpy(self._ids))
        self._queue: list[dict[str, Tensor]] = []  # finished pieces, those of one service side by side
        self._waiting = 0

    @property
    def replaced_workers(self) -> int:
        return getattr(self.group, "replaced", 0)

    def run(self, policy: Policy) -> Iterator[Rollout | None]:
        self._policy = policy
        self.group.begin([random.env_seed(self._seed, random.ENV, int(i), self._life) for i in self._ids])
        while True:
            begin = time.perf_counter()
            ids, step = self.group.serve()
            arrived = time.perf_counter()
            self._take(ids, step)
            taken = time.perf_counter()
            actions = self._act(policy, ids)
            served = time.perf_counter()
            self.group.answer(actions)
            self.seconds["transfer"] += taken - arrived
            self.seconds["act"] += served - taken
            self.seconds["simulate"] += arrived - begin + time.perf_counter() - served
            yield None
            while self._waiting >= self._pieces:
                yield self._rollout()

    def _take(self, ids: np.ndarray, step: Step) -> None:
        """What the simulators answered goes into their pieces; those that are full go into the queue."""
        at = self._t[ids]
        answers = np.empty(len(ids), ANSWER)
        write_down(step, answers)
        # Who answers for the first time has only been reset: that lands in the last slot of its piece (-1), which is still empty.
        if self._far:
            self._serving(len(ids)).put(at + self._H + 1, ids, step.obs, answers)
        else:
            self._put("obs", at + self._H + 1, ids, step.obs)
            self._put("first", at + self._H + 1, ids, answers["first"])
            self._put("answers", at, ids, answers.view(np.int64))
        self._put("reset", at, ids, answers["first"])
        ended = answers["terminated"] | answers["truncated"]
        self._episodes += self._tracker.update(answers["reward"][None], ended[None], answers["first"][None], ids)
        self._t[ids] += 1
        full = ids[self._t[ids] == self._T]
        if len(full):
            self._enqueue(torch.from_numpy(full.astype(np.int64)))
            self._t[full] = 0

    def _put(self, name: str, at: np.ndarray, who: np.ndarray, value: Any) -> None:
        self._pieces_open[name].numpy()[at, who] = value  # a tenth of what a torch assignment costs

    def _enqueue(self, full: Tensor) -> None:
        there = full.to(self._device, non_blocking=True)
        finished = {
            name: x.index_select(1, there if x.device.type == self._device.type else full)
            for name, x in self._pieces_open.items()
        }
        self._queue.append(finished)
        self._waiting += len(full)
        for name in ("obs", "first"):  # the next piece begins with this one's last frames
            self._pieces_open[name][: self._H + 1].index_copy_(1, there, finished[name][self._T :])

    def _act(self, policy: Policy, ids: np.ndarray) -> np.ndarray:
        self._put("version", self._t[ids], ids, policy.version)
        slots, self._slots[ids] = self._slots[ids], self._slots[ids] + 1
        who, at = torch.from_numpy(ids), torch.from_numpy(self._t[ids])
        low, high, life = int(slots.min()), int(slots.max()), self._life * LIFE_SLOTS
        noise = self._noise.of(low + life, high + 1 + life)[torch.from_numpy(slots - low), who]
        if self._far:
            return self._serving(len(ids)).act(self._t[ids], ids, noise.numpy())
        pieces = self._pieces_open
        seen = stacked(pieces["obs"], pieces["first"], (at + self._H) * self.num_envs + who, self.spec.stack)
        action, extras = policy.act(seen, self.epsilon[who], noise)
        note(pieces, at, who, {"action": action, **extras})
        return action.numpy()

    def _serving(self, n: int) -> Serving:
        """For so many simulators at once."""
        if n not in self._servings:
            assert self._policy is not None
            self._servings[n] = Serving(self._policy, self._pieces_open, n, self.spec, self.epsilon, self._shown, self._capture)
        return self._servings[n]

    def _rollout(self) -> Rollout:
        """The pieces that have waited longest."""
        n = self._pieces
        queue = {name: torch.cat([pieces[name] for pieces in self._queue], 1) for name in self._queue[0]}
        taken = {name: x[:, :n] for name, x in queue.items()}
        self._queue = [{name: x[:, n:] for name, x in queue.items()}]
        self._waiting -= n
        episodes, self._episodes = self._episodes, []
        return Rollout(
            obs=taken["obs"],
            first=taken["first"],
            action=taken["action"],
            **learnable(taken["answers"], self._life_loss, self._gamma, self._reward_clip),
            extras={name: x for name, x in taken.items() if name not in self._own},
            version=taken["version"],
            steps=int((~taken["reset"]).sum()),
            stack=self.spec.stack,
            episodes=episodes,
            queue=self._waiting,
        )

    def state(self, mid_rollout: bool = False) -> dict:
        return {"life": self._life, "continues": False}  # pieces are at different points: a resume starts new episodes

    def load(self, state: dict) -> None:
        self._life = state["life"] + 1

    def close(self) -> None:
        self.group.close()
