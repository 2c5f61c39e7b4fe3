"""Start states: games that are gone on with where somebody else stopped. Kept as a seed and the actions since, which any later
version can play again; what it must look like then is kept with them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.envs.atari import AtariEnv, AtariGroup
from manyhands.types import Step, UsageError

LETTERS = "abcdefghijklmnopqr"  # one for each action
MOST_FRAMES = 108_000  # of a game, counted from where the recording began


@dataclass(frozen=True)
class Start:
    seed: int
    actions: str  # a letter for each decision since the game began
    score: float  # so far: not the agent's
    lives: int
    sha256: str  # of the 84×84 picture


@dataclass(frozen=True)
class Starts:
    id: str
    frame_skip: int  # of a decision
    by: str
    ale_py: str
    states: tuple[Start, ...]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"manyhands_starts": 1, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: Path) -> Starts:
        try:
            tree = json.loads(path.read_text())
            del tree["manyhands_starts"]
            return cls(**{**tree, "states": tuple(Start(**state) for state in tree["states"])})
        except FileNotFoundError:
            raise UsageError(
                f"no start states at {path}: 'manyhands record-starts' makes them (those of the papers' humans are not public)"
            ) from None
        except (OSError, ValueError, TypeError, KeyError):
            raise UsageError(f"{path}: not what 'manyhands record-starts' writes") from None

    @property
    def digest(self) -> str:
        """Tells one recording from another."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    def check(self, env: AtariEnv) -> None:
        if env.id != self.id:
            raise UsageError(f"these start states are of {self.id}, not of {env.id}")
        if env.frame_skip != self.frame_skip:
            raise UsageError(f"these start states have {self.frame_skip} frames a decision, the agent has {env.frame_skip}")


def default_path(env_id: str) -> Path:
    return Path("starts") / f"{env_id.removeprefix('ALE/').removesuffix('-v5')}.json"


def bare(env: AtariEnv) -> AtariEnv:
    """The game as it is recorded: nothing random, whole games, every point."""
    return replace(env.for_evaluation(0, MOST_FRAMES), sticky_actions=0.0, threads=1)


def reach(group: AtariGroup, seed: int, actions: str) -> tuple[Step, float]:
    """Play a recording; the last step, and the points on the way."""
    step, score = group.reset([seed]), 0.0
    for at, letter in enumerate(actions):
        group.send(np.array([LETTERS.index(letter)]))
        step = group.recv()
        score += float(step.reward[0])
        if step.terminated[0] or step.truncated[0]:
            raise ValueError(f"the game ended after {at + 1} of {len(actions)} decisions")
    return step, score


def picture(step: Step) -> str:
    return hashlib.sha256(np.ascontiguousarray(step.obs).tobytes()).hexdigest()


def start_at(env: AtariEnv, seed: int, actions: str) -> Start:
    """A start state, played once more to see what it looks like."""
    group = AtariGroup(replace(bare(env), size="84x84", colour="gray"), 1)
    try:
        step, score = reach(group, seed, actions)
        return Start(seed, actions, score, int(group.lives[0]), picture(step))
    finally:
        group.close()


class StartsGroup:
    """Simulators whose games begin at start states, one after the other: simulator i of n has the states i, i + n, …"""

    def __init__(self, env: AtariEnv, starts: Starts, num_envs: int) -> None:
        starts.check(env)
        self._starts, self.num_envs = starts, num_envs
        self._parts = [AtariGroup(bare(env), 1) for _ in range(num_envs)]
        self.spec = self._parts[0].spec
        self._pictures = env.size == "84x84" and env.colour == "gray"
        self._begun = [0] * num_envs
        self._over = [False] * num_envs

    def reset(self, seeds: list[int]) -> Step:
        """The recordings have seeds of their own."""
        self._begun = [0] * self.num_envs
        return _joined([self._begin(i) for i in range(self.num_envs)])

    def _begin(self, i: int) -> Step:
        number = (i + self._begun[i] * self.num_envs) % len(self._starts.states)
        self._begun[i] += 1
        start, part = self._starts.states[number], self._parts[i]
        try:
            step, score = reach(part, start.seed, start.actions)
        except ValueError as error:
            raise UsageError(f"start state {number} cannot be reached: {error}") from None
        if score != start.score or part.lives[0] != start.lives or (self._pictures and picture(step) != start.sha256):
            raise UsageError(f"start state {number} does not look as it did when it was recorded (ale-py {self._starts.ale_py})")
        self._over[i] = False
        none = np.zeros(1, bool)
        return replace(step, reward=np.zeros(1, np.float32), life_lost=none, first=~none)

    def send(self, actions: Any) -> None:
        for i, part in enumerate(self._parts):
            if not self._over[i]:
                part.send(np.asarray(actions)[i : i + 1])

    def recv(self) -> Step:
        steps = [self._begin(i) if self._over[i] else part.recv() for i, part in enumerate(self._parts)]
        self._over = [bool(step.terminated[0] or step.truncated[0]) for step in steps]
        return _joined(steps)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _joined(steps: list[Step]) -> Step:
    names = ("obs", "reward", "terminated", "truncated", "life_lost", "first")
    return Step(*(np.concatenate([np.asarray(getattr(step, name)) for step in steps]) for name in names))
