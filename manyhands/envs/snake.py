"""Snake (Ong et al. 2015), written once on tensors: thousands of boards step together, on a CPU or a GPU.

An n×n board with hard walls; the snake starts in the middle with length two; +1 for an apple (and one longer),
-1 for dying; a reversal is ignored; truncated after `patience` steps without an apple. Everything random is keyed by
(board's seed, its clock), so a board depends on nothing but its seed and its actions. On a GPU a step is a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from manyhands.graphs import Captured
from manyhands.maths import random
from manyhands.types import EnvSpec, Step, UsageError

APPLE, BODY, HEAD = 255, 200, 230
UP, RIGHT, DOWN, LEFT = range(4)


@dataclass(frozen=True)
class SnakeEnv:
    """[env] of `manyhands/Snake-v0`."""

    id: str = "manyhands/Snake-v0"
    board: int = 10
    """Cells along each side."""
    cell_pixels: int = 2
    """Pixels along each side of a cell."""
    patience: int = 100
    """Truncated after this many steps without an apple; otherwise a circling snake never ends."""
    stack: int = 4
    """Frames that the network sees at once."""
    reward_clip: float = 0.0
    """Rewards are clipped to ± this for learning; 0 leaves them alone."""
    on_device: bool = False
    """Keep the boards on the run's device instead of the CPU."""

    def __post_init__(self) -> None:
        if self.board < 4:
            raise UsageError(f"env.board = {self.board}: the snake needs at least 4")
        if self.reward_clip < 0:
            raise UsageError(f"env.reward_clip = {self.reward_clip}: must not be negative")
        if self.cell_pixels < 1 or self.stack < 1 or self.patience < 1:
            raise UsageError("env.cell_pixels, env.stack and env.patience must be at least 1")

    def check(self) -> None:
        pass

    def __str__(self) -> str:
        return f"{self.id}: {self.board}×{self.board} cells, {self.stack} frames"

    def resolved(self) -> SnakeEnv:
        return self

    def for_evaluation(self, noop_max: int | None, max_frames: int) -> SnakeEnv:
        return replace(self, reward_clip=0.0)

    def make(self, num_envs: int, with_screen: bool = False, device: str = "cpu") -> SnakeGroup:
        return SnakeGroup(self, num_envs, device if self.on_device else "cpu")


class SnakeGroup:
    """`age` is the heart of a board: how many more moves a cell stays part of the snake (head = length, empty = 0).

    On a GPU what recv() returns is overwritten by the next."""

    def __init__(self, config: SnakeEnv, num_envs: int, device: str = "cpu") -> None:
        self.spec = EnvSpec(
            config.id,
            (1, config.board * config.cell_pixels, config.board * config.cell_pixels),
            "uint8",
            config.stack,
            4,
        )
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._n = n = config.board
        self._cell = config.cell_pixels
        self._patience = config.patience
        whole = {"dtype": torch.int64, "device": self.device}
        self._seed = torch.zeros(num_envs, **whole)  # type: ignore[call-overload]
        self._clock = torch.zeros(num_envs, **whole)  # type: ignore[call-overload]
        self._age = torch.zeros(num_envs, n * n, dtype=torch.int16, device=self.device)
        self._head = torch.zeros(num_envs, **whole)  # type: ignore[call-overload]
        self._apple = torch.zeros(num_envs, **whole)  # type: ignore[call-overload]
        self._heading = torch.zeros(num_envs, **whole)  # type: ignore[call-overload]
        self._hungry = torch.zeros(num_envs, **whole)  # type: ignore[call-overload]
        self._ended = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._action = torch.zeros(num_envs, **whole)  # type: ignore[call-overload]
        self._sent = False
        self._none = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self._moves = torch.tensor([-n, 1, n, -1], device=self.device)
        middle = (n // 2) * n + n // 2
        fresh = torch.zeros(n * n, dtype=torch.int16, device=self.device)
        fresh[middle], fresh[middle - 1] = 2, 1  # heading right
        self._fresh, self._middle = fresh, middle
        self._step = Captured(self._advance, self.device, changes=list(self._tensors().values()))

    def reset(self, seeds: list[int]) -> Step:
        self._seed.copy_(torch.tensor(seeds, dtype=torch.int64))
        self._clock.zero_()
        return self.restart(~self._none)

    def restart(self, which: Any) -> Step:
        which = torch.as_tensor(which, device=self.device)
        self._begin(which)
        self._ended &= ~which
        return Step(self._draw(), torch.zeros(self.num_envs, device=self.device), self._none, self._none, self._none, which)

    def send(self, actions: Any) -> None:
        self._action.copy_(torch.as_tensor(actions))
        self._sent = True

    def recv(self) -> Step:
        assert self._sent, "recv without send"
        self._sent = False
        return self._step()

    def _advance(self) -> Step:
        action, first = self._action, self._ended.clone()
        playing = ~first
        n = self._n
        self._clock += 1

        reversal = (action - self._heading).abs() == 2
        heading = torch.where(reversal, self._heading, action)
        row, column = self._head // n, self._head % n
        blocked = (
            ((heading == UP) & (row == 0))
            | ((heading == DOWN) & (row == n - 1))
            | ((heading == LEFT) & (column == 0))
            | ((heading == RIGHT) & (column == n - 1))
        )
        target = torch.where(blocked, self._head, self._head + self._moves.index_select(0, heading))
        eats = (target == self._apple) & ~blocked & playing
        # The tail moves away before the head arrives, unless the snake grows.
        age = (self._age - (~eats).to(torch.int16).unsqueeze(1)).clamp_(min=0)
        hit = blocked | (age.gather(1, target.unsqueeze(1)).squeeze(1) > 0)
        died = hit & playing
        moved = ~hit & playing
        length = self._age.amax(1) + eats.to(torch.int16)
        age.scatter_(1, target.unsqueeze(1), length.unsqueeze(1))
        torch.where(moved.unsqueeze(1), age, self._age, out=self._age)
        torch.where(moved, target, self._head, out=self._head)
        torch.where(moved, heading, self._heading, out=self._heading)
        self._hungry.add_(1).masked_fill_(eats, 0)

        full = eats & (length >= n * n)
        terminated = died | full
        truncated = (self._hungry >= self._patience) & playing & ~terminated
        self._place_apples(eats & ~full)
        self._begin(first)
        torch.logical_or(terminated, truncated, out=self._ended)
        reward = eats.to(torch.float32) - died.to(torch.float32)
        return Step(self._draw(), reward, terminated, truncated, self._none, first)

    def _begin(self, which: Tensor) -> None:
        torch.where(which.unsqueeze(1), self._fresh, self._age, out=self._age)
        for values, beginning in ((self._head, self._middle), (self._heading, RIGHT), (self._hungry, 0)):
            values.masked_fill_(which, beginning)
        self._place_apples(which)

    def _place_apples(self, where: Tensor) -> None:
        """Uniformly among the free cells of the marked boards."""
        if not where.is_cuda and not bool(where.any()):
            return
        free = self._age == 0
        u = random.uniform(0, random.APPLE, self._seed, self._clock, 1).squeeze(-1)
        count = free.sum(1)
        wanted = (u * count).long().clamp(max=count - 1) + 1  # the wanted-th free cell
        cell = (free.cumsum(1) < wanted.unsqueeze(1)).sum(1).clamp(max=self._n * self._n - 1)
        torch.where(where, cell, self._apple, out=self._apple)

    def _draw(self) -> Tensor:
        cells = (self._age > 0).to(torch.uint8) * BODY
        cells.scatter_(1, self._apple.unsqueeze(1), APPLE)  # on a full board the head is drawn over it
        cells.scatter_(1, self._head.unsqueeze(1), HEAD)
        n, p = self._n, self._cell
        image = cells.view(-1, 1, n, 1, n, 1).expand(-1, 1, n, p, n, p)
        return image.reshape(self.num_envs, 1, n * p, n * p)

    def screen(self, index: int) -> np.ndarray:
        """In colour, 24 pixels a cell."""
        n, p = self._n, 24
        picture = np.full((n, n, 3), (24, 26, 33), np.uint8)
        picture[(self._age[index] > 0).view(n, n).cpu().numpy()] = (80, 190, 110)
        for cell, colour in ((self._apple, (226, 70, 66)), (self._head, (150, 240, 160))):
            row, column = divmod(int(cell[index]), n)
            picture[row, column] = colour
        picture = picture.repeat(p, 0).repeat(p, 1)
        picture[::p], picture[:, ::p] = (32, 35, 44), (32, 35, 44)
        return picture

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that changes, where it stays."""
        return {name: getattr(self, f"_{name}") for name in _SAVED}

    def state(self) -> dict:
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load(self, state: dict) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])

    def close(self) -> None:
        pass


_SAVED = ("seed", "clock", "age", "head", "apple", "heading", "hungry", "ended")


class GymnasiumSnake(gymnasium.Env):
    """One board behind Gymnasium's interface, registered as manyhands/Snake-v0."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(self, board: int = 10, cell_pixels: int = 2, patience: int = 100, render_mode: str | None = None) -> None:
        self._group = SnakeGroup(SnakeEnv(board=board, cell_pixels=cell_pixels, patience=patience), 1)
        side = board * cell_pixels
        self.observation_space = gymnasium.spaces.Box(0, 255, (side, side, 1), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        step = self._group.reset([int(self.np_random.integers(2**31))])
        return self._see(step), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._group.send([int(action)])
        step = self._group.recv()
        return self._see(step), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), {}

    def render(self) -> np.ndarray | None:
        return self._group.screen(0) if self.render_mode == "rgb_array" else None

    @staticmethod
    def _see(step: Step) -> np.ndarray:
        return np.asarray(step.obs[0]).transpose(1, 2, 0).copy()
