"""Acting on a GPU by one captured launch: stacking, the network, the drawing of actions and the notes about them.

For simulators that are not there frames go over once, and keeping them is another CUDA graph. While a rollout is being filled
the only point at which anybody waits for the GPU is for their actions; for simulators that are there nobody waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.graphs import Captured
from manyhands.maths.stacking import frames_at, rows_of_stacks, stacked
from manyhands.samplers.slots import parts
from manyhands.types import EnvSpec, Policy


class Serving:
    """Serves n simulators at a time, out of and into a sampler's memory: obs and first [H+T+1, B, ...], action, answers and
    what else act() gives [T, B, ...]. shown [B], of all that serve the same simulators: how many frames each has shown since its
    reset, before the newest. To be called on the policy's stream; where it has none, on the one on which this was made."""

    def __init__(
        self,
        policy: Policy,
        memory: dict[str, Tensor],
        n: int,
        spec: EnvSpec,
        epsilon: Tensor,
        shown: np.ndarray,
        capture: bool = True,
    ) -> None:
        device = memory["obs"].device
        self._policy, self._memory, self._stack, self._epsilon, self._shown = policy, memory, spec.stack, epsilon, shown
        # What travels waits in page-locked memory: from there a copy needs nobody's attention.
        self._frames = _Mail((n, *spec.frame), getattr(torch, spec.dtype), device)
        self._put_at = _Mail((4, n), torch.int64, device)
        self._act_at = _Mail((self._stack + 3, n), torch.int64, device)
        self._actions = _Mail((n,), torch.int64, device)
        self._put = Captured(self._keep, device, capture)
        self._act = Captured(self._choose, device, capture)
        self._arrived, self._stream = None, policy.stream
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._stream = policy.stream or torch.cuda.current_stream(device)  # to ask each time would cost as much as a launch

    def put(self, at: np.ndarray | int, who: np.ndarray, obs: Any, answers: np.ndarray) -> None:
        """What the simulators `who` show becomes row `at` of the memory, and what they answered that of the slot before."""
        self._frames.here[...] = obs
        self._put_at.write(at, at - self._stack, who, answers.view(np.int64))
        self._put()
        self._shown[who] = np.where(answers["first"], 0, self._shown[who] + 1)

    def _keep(self) -> None:
        rows, slots, columns, answers = self._put_at.send()
        self._memory["obs"][rows, columns] = self._frames.send()
        self._memory["first"][rows, columns] = parts(answers)["first"]
        self._memory["answers"][slots, columns] = answers

    def act(self, slot: np.ndarray | int, who: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Actions for the simulators `who` in that slot of the memory. noise: two float32 for each, which travel as one word."""
        room = self._memory["obs"]
        newest = (slot + self._stack - 1) * room.shape[1] + who
        rows = rows_of_stacks(newest, self._shown[who], self._stack, room)  # [n, S]
        self._act_at.write(*rows.reshape(-1, len(who)), slot, who, noise.view(np.int64)[:, 0])
        self._act()
        if self._arrived is not None:
            self._arrived.record(self._stream)
            self._arrived.synchronize()
        return self._actions.here.copy()  # simulators may read it later than the next call

    def _choose(self) -> None:
        sent, memory = self._act_at.send(), self._memory
        rows, (slot, who, words) = sent[:-3].flatten(), sent[-3:]
        seen = frames_at(memory["obs"], rows, self._stack)
        noise = words.view(torch.float32).unflatten(0, (-1, 2))
        action, extras = self._policy.act(seen, self._epsilon[who], noise)
        note(memory, slot, who, {"action": action, **extras})
        self._actions.pinned.copy_(action, non_blocking=True)


class Beside:
    """The same for simulators that are on the GPU themselves (Snake with env.on_device)."""

    def __init__(
        self, policy: Policy, memory: dict[str, Tensor], who: Tensor, spec: EnvSpec, epsilon: Tensor, capture: bool = True
    ) -> None:
        self._policy, self._memory, self._who, self._stack, self._epsilon = policy, memory, who, spec.stack, epsilon
        self._slot = torch.zeros(1, dtype=torch.int64, device=who.device)  # a 0-d index is read by torch, which waits for the GPU
        self._noise = torch.zeros(len(who), 2, device=who.device)
        self._act = Captured(self._choose, who.device, capture)

    def act(self, slot: int, noise: Tensor) -> Tensor:
        """The actions, [n]; the next call overwrites them."""
        self._slot.fill_(slot)
        self._noise.copy_(noise)
        return self._act()

    def _choose(self) -> Tensor:
        memory = self._memory
        newest = (self._slot + self._stack - 1) * memory["obs"].shape[1] + self._who
        seen = stacked(memory["obs"], memory["first"], newest, self._stack)
        action, extras = self._policy.act(seen, self._epsilon[self._who], self._noise)
        note(memory, self._slot, self._who, {"action": action, **extras})
        return action


def note(memory: dict[str, Tensor], slot: Any, who: Any, notes: dict[str, Tensor]) -> None:
    """What acting gave for the simulators `who` in that slot; for a name that is new there is room from then on."""
    for name, value in notes.items():
        if name not in memory:
            shape = (*memory["action"].shape, *value.shape[1:])
            memory[name] = torch.zeros(shape, dtype=value.dtype, device=value.device)
        memory[name][slot, who] = value


class _Mail:
    """A tensor on the device, and its twin here."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.pinned = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.here = self.pinned.numpy()
        self.there = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, *rows: Any) -> None:
        for mine, row in zip(self.here, rows, strict=True):
            mine[...] = row

    def send(self) -> Tensor:
        self.there.copy_(self.pinned, non_blocking=True)
        return self.there
