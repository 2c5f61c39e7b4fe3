"""Samples T slots of all simulators, then hands over a rollout. Serial, batched and alternating are one loop over groups:

serial        one group per simulator, each answered before the next is asked
batched       one group: all simulators step together, then all are served in one batch
alternating   two or more groups: the others step while one is served

Frames are written once, on the learner's device, and stacked where they are used. On a CPU acting stacks them frame by frame,
and the learner reads the same stacks: gathering four planes from four places costs more than moving one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.graphs import Captured, on
from manyhands.maths import random
from manyhands.maths.stacking import push, room_for_frames, stacked
from manyhands.samplers.episodes import EpisodeTracker
from manyhands.samplers.noise import Noise
from manyhands.samplers.serving import Beside, Serving, note
from manyhands.samplers.slots import ANSWER, learnable, parts, write_down
from manyhands.types import EnvGroup, Episode, Policy, Rollout, Seat, Step

LIFE_SLOTS = 1 << 40  # a learner in the place of a lost one draws other random numbers
LIVES = 1000  # resumes that a learner may see before its seeds meet those of its successor


class LockstepSampler:
    """Between rollouts no send is in flight; that is when state() may be called."""

    def __init__(
        self,
        groups: Sequence[EnvGroup],
        horizon: int,
        gamma: float,
        seed: int,
        device: torch.device,
        reward_clip: float = 0.0,
        life_loss: bool = False,
        decorrelate_steps: int = 0,
        overlap: bool = True,
        capture: bool = True,
        seat: Seat = Seat(),  # noqa: B008 – frozen
    ) -> None:
        self.groups = list(groups)
        self.spec = groups[0].spec
        self.num_envs = sum(group.num_envs for group in groups)
        edges = np.cumsum([0, *(group.num_envs for group in groups)]).tolist()
        self._columns = [slice(a, b) for a, b in itertools.pairwise(edges)]
        self._who = [np.arange(a, b) for a, b in itertools.pairwise(edges)]
        self._horizon = horizon
        self._gamma = gamma
        self._seed = seed
        self._device = device
        self._reward_clip = reward_clip
        self._life_loss = life_loss
        self._decorrelate_steps = decorrelate_steps
        self._overlap = overlap
        self._capture = capture
        self._history = self.spec.stack - 1
        self.epsilon = torch.zeros(self.num_envs, device=device)  # the share of random actions of each simulator
        self.seconds = {"simulate": 0.0, "transfer": 0.0, "act": 0.0}
        self._simulators = torch.arange(self.num_envs, device=device)
        self._ids = self._simulators + seat.rank * self.num_envs  # among those of all learners
        self._slot = seat.life * LIFE_SLOTS  # slots since the run began, the same for all simulators
        self._life = seat.life * LIVES  # how often the simulators were started anew by a resume
        self._shown = np.zeros(self.num_envs, np.int64)  # frames of each since its reset, before the newest
        self._tracker = EpisodeTracker(self.num_envs)
        self._buffers = [_Buffer(self, groups[0]) for _ in range(2)]
        self._started = False

    @property
    def far(self) -> bool:
        """The simulators are elsewhere than their frames."""
        return self._buffers[0].far

    @property
    def replaced_workers(self) -> int:
        return sum(getattr(group, "replaced", 0) for group in self.groups)

    def run(self, policy: Policy) -> Iterator[Rollout | None]:
        if not self._started:
            self._start()
        for buffer in self._buffers:
            if buffer.far:
                buffer.serving = [self._serving(policy, buffer, columns) for columns in self._columns]
            elif buffer.side.type == "cuda":
                buffer.beside = [self._beside(policy, buffer, columns) for columns in self._columns]
        acting = policy.stream if self.far else None
        if acting is not None:
            acting.wait_stream(torch.cuda.current_stream())
        # Where simulators are far from who acts, random numbers are with them: there they are two words for each action.
        noise = Noise(self._seed, self._ids.cpu() if self.far else self._ids)
        while True:
            buffer = self._buffers.pop(0)
            with on(acting):
                buffer.begin(self._buffers[0])
            self._buffers.append(buffer)
            drawn = noise.of(self._slot, self._slot + self._horizon)
            for t in range(self._horizon):
                for g in range(len(self.groups)):
                    with on(acting):
                        if t and self._overlap:
                            self._receive(g, buffer, t - 1)
                        self._act(policy, g, buffer, t, drawn[t, self._columns[g]])
                    yield None
                    if not self._overlap:
                        with on(acting):
                            self._receive(g, buffer, t)
            # When the last answers are there nobody simulates: what can be counted before is counted before.
            early = self._horizon - 1 if buffer.side.type == "cpu" else 0  # from a GPU all come over at once
            self._count(buffer, slice(0, early))
            if self._overlap:
                with on(acting):
                    for g in range(len(self.groups)):
                        self._receive(g, buffer, self._horizon - 1)
            if acting is not None:
                torch.cuda.current_stream().wait_stream(acting)
            learned = buffer.learnable()  # on a GPU, while the rest is counted
            self._count(buffer, slice(early, self._horizon))
            self._slot += self._horizon
            yield self._finish(buffer, learned, policy.version)

    def _serving(self, policy: Policy, buffer: _Buffer, columns: slice) -> Serving:
        n = columns.stop - columns.start
        return Serving(policy, buffer.memory, n, self.spec, self.epsilon, self._shown, self._capture)

    def _beside(self, policy: Policy, buffer: _Buffer, columns: slice) -> Beside:
        return Beside(policy, buffer.memory, self._simulators[columns], self.spec, self.epsilon, self._capture)

    def _act(self, policy: Policy, g: int, buffer: _Buffer, t: int, noise: Tensor) -> None:
        begin, columns = time.perf_counter(), self._columns[g]
        answer: Any
        if buffer.far:
            answer = buffer.serving[g].act(t, self._who[g], noise.numpy())
        elif buffer.beside:
            answer = buffer.beside[g].act(t, noise)
        else:
            action, extras = policy.act(buffer.seen(t, columns), self.epsilon[columns], noise)
            note(buffer.memory, t, columns, {"action": action, **extras})
            answer = action.numpy()
        served = time.perf_counter()
        self.groups[g].send(answer)
        self.seconds["act"] += served - begin
        self.seconds["simulate"] += time.perf_counter() - served

    def _receive(self, g: int, buffer: _Buffer, t: int) -> None:
        begin = time.perf_counter()
        step = self.groups[g].recv()
        arrived = time.perf_counter()
        buffer.put_step(t, g, self._columns[g], self._who[g], step)
        self.seconds["simulate"] += arrived - begin
        self.seconds["transfer"] += time.perf_counter() - arrived

    def _count(self, buffer: _Buffer, slots: slice) -> None:
        """The steps and the finished episodes of these slots, which follow those counted before."""
        if slots.start == slots.stop:
            return
        answers = buffer.answers_here()[slots]
        reset = answers["first"]
        buffer.steps += reset.size - int(np.count_nonzero(reset))
        buffer.episodes += self._tracker.update(answers["reward"], answers["terminated"] | answers["truncated"], reset)

    def _finish(self, buffer: _Buffer, learned: dict[str, Tensor], version: int) -> Rollout:
        return Rollout(
            obs=buffer.obs,
            first=buffer.first,
            action=buffer.action,
            **learned,
            extras=buffer.extras,
            version=torch.tensor(version).expand(buffer.action.shape),
            steps=buffer.steps,
            stack=self.spec.stack,
            episodes=buffer.episodes,
            stacks=buffer.stacks,
            queue=None,
        )

    def _start(self) -> None:
        """Reset every simulator by its own seed, then let each play a random number of random steps."""
        current = self._buffers[-1]
        for group, columns in zip(self.groups, self._columns, strict=True):
            ids = self._ids[columns].tolist()
            step = group.reset([random.env_seed(self._seed, random.ENV, i, self._life) for i in ids])
            if self._decorrelate_steps:
                step = self._decorrelate(group, self._ids[columns].cpu(), step)
            current.put_start(columns, step)
        if self._decorrelate_steps:
            self._tracker.forget()
        self._started = True

    def _decorrelate(self, group: EnvGroup, simulators: Tensor, step: Step) -> Step:
        most = self._decorrelate_steps
        u = random.uniform(self._seed, random.DECORRELATE, simulators, torch.tensor(self._life), 1).squeeze(-1)
        start = most - (u * (most + 1)).long()  # the slot at which each simulator's game begins
        noise = random.uniform(self._seed, random.START, simulators, torch.tensor(self._life), most)
        for t in range(most):
            if bool((start == t).any()):
                group.restart((start == t).numpy())
            group.send((noise[:, t] * self.spec.actions).long().numpy())
            step = group.recv()
        return group.restart((start == most).numpy()) if bool((start == most).any()) else step

    def state(self, mid_rollout: bool = False) -> dict:
        """In the middle of a rollout there is no consistent state: the simulators will start new episodes."""
        if not self._started:
            return {"slot": self._slot, "life": self._life - 1, "continues": False}  # a load then starts them for the first time
        groups = [None if mid_rollout else group.state() for group in self.groups]
        common = {"slot": self._slot, "life": self._life}
        if any(state is None for state in groups):
            return {**common, "continues": False}
        return {
            **common,
            "continues": True,
            "groups": {str(i): state for i, state in enumerate(groups)},
            "tracker": self._tracker.state(),
            "tail": self._buffers[-1].tail(),
        }

    def load(self, state: dict) -> None:
        self._slot = state["slot"]
        if not state["continues"]:
            self._life = state["life"] + 1  # new episodes, from other seeds
            return
        self._life = state["life"]
        for i, group in enumerate(self.groups):
            group.load(state["groups"][str(i)])
        self._tracker.load(state["tracker"])
        self._buffers[-1].load_tail(state["tail"])
        first = state["tail"]["first"].cpu().numpy()[::-1]
        self._shown[:] = np.where(first.any(0), first.argmax(0), self._history)
        self._started = True

    def close(self) -> None:
        for group in self.groups:
            group.close()


class _Buffer:
    """A rollout being filled, on the learner's device. Answers are also beside the simulators, where episodes are counted."""

    def __init__(self, sampler: LockstepSampler, group: EnvGroup) -> None:
        T, B, H = sampler._horizon, sampler.num_envs, sampler._history
        spec, device = sampler.spec, sampler._device
        self.side = torch.device(getattr(group, "device", "cpu"))
        self._history, self._horizon = H, T
        self.obs = room_for_frames(H + T + 1, B, spec.frame, getattr(torch, spec.dtype), device)
        self.first = torch.zeros(H + T + 1, B, dtype=torch.bool, device=device)
        self.action, answers = torch.zeros(2, T, B, dtype=torch.int64, device=device)
        self.memory = {"obs": self.obs, "first": self.first, "action": self.action, "answers": answers}
        self._own = set(self.memory)  # other names are what acting gives besides
        self.far = device.type == "cuda" and self.side.type == "cpu"
        self._answers = torch.zeros_like(answers, device=self.side) if self.far else answers
        self._parts = parts(self._answers)  # to write to, beside simulators on a GPU
        how = (sampler._life_loss, sampler._gamma, sampler._reward_clip)
        self.learnable = Captured(lambda: learnable(answers, *how), device, sampler._capture)
        self.steps, self.episodes = 0, list[Episode]()
        self.serving: list[Serving] = []
        self.beside: list[Beside] = []
        self._stack, self._simulators = spec.stack, sampler._simulators
        self.stacks: Tensor | None = None  # [T+1, B, *obs], a view of channels-last memory
        if H and device.type == "cpu":
            channels_last = torch.zeros(T + 1, B, *spec.frame[1:], spec.obs[0], dtype=self.obs.dtype)
            self.stacks = channels_last.movedim(-1, 2)
            self._stacks_memory = channels_last.numpy()

    def begin(self, previous: _Buffer) -> None:
        """Start with the last frames of the previous rollout."""
        self.steps, self.episodes = 0, []
        self._copy_tail(previous.tail(), slice(0, self._history + 1))
        if self.stacks is not None:
            self.stacks[0] = self._gather(0, self._simulators)

    def seen(self, t: int, columns: slice) -> Tensor:
        """What the network is shown in slot t, [b, *obs]."""
        return self._gather(t, self._simulators[columns]) if self.stacks is None else self.stacks[t, columns]

    def _gather(self, t: int, simulators: Tensor) -> Tensor:
        rows = (self._history + t) * self.obs.shape[1] + simulators
        return stacked(self.obs, self.first, rows, self._stack)

    def tail(self) -> dict[str, Tensor]:
        keep = self._history + 1
        return {"obs": self.obs[-keep:], "first": self.first[-keep:]}

    def load_tail(self, tail: dict[str, Tensor]) -> None:
        """As this rollout's end, where the next begin() looks for it."""
        self._copy_tail(tail, slice(-self._history - 1, None))

    def _copy_tail(self, tail: dict[str, Tensor], where: slice) -> None:
        self.obs[where].copy_(tail["obs"])
        self.first[where].copy_(tail["first"])

    def put_start(self, columns: slice, step: Step) -> None:
        self._put(self.obs, -1, columns, step.obs)
        self.first[-1, columns] = True

    @property
    def extras(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.memory.items() if name not in self._own}

    def answers_here(self) -> np.ndarray:
        """[T, B] of ANSWER. Where the simulators are on a GPU that waits for them."""
        return self._answers.cpu().numpy().view(ANSWER)

    def put_step(self, t: int, g: int, columns: slice, who: np.ndarray, step: Step) -> None:
        at = self._history + t + 1
        if self.side.type == "cpu":
            answers = self.answers_here()[t, columns]
            write_down(step, answers)
        else:
            for name, part in self._parts.items():
                self._put(part, t, columns, getattr(step, name))
        if self.far:
            self.serving[g].put(at, who, step.obs, answers)
        else:
            self._put(self.obs, at, columns, step.obs)
            self._put(self.first, at, columns, step.first)
        if self.stacks is not None:
            memory = self._stacks_memory
            push(memory[t, columns], np.asarray(step.obs), np.asarray(step.first), memory[t + 1, columns])

    @staticmethod
    def _put(target: Tensor, at: int, columns: slice, value: Any) -> None:
        if target.device.type == "cpu":
            target.numpy()[at, columns] = value  # a tenth of what a torch assignment costs
        else:
            target[at, columns] = torch.as_tensor(value).to(target.device, non_blocking=True)
