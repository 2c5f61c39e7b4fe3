"""How agents are evaluated, by name; and the random player that scores are counted from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from manyhands.envs.atari import AtariEnv
from manyhands.envs.gym import GymEnv
from manyhands.envs.snake import SnakeEnv
from manyhands.envs.starts import MOST_FRAMES
from manyhands.maths import random
from manyhands.types import EnvGroup, UsageError

PLAIN, HUMAN = "plain", "human-starts"
FRAMES_OF_RANDOM = 6  # a random player acts ten times a second


@dataclass(frozen=True)
class Protocol:
    """None and 0: the recipe's own."""

    about: str
    episodes: int = 30
    noop_max: int | None = None
    sticky_actions: float | None = None
    max_frames: int = 0
    actions: Literal["sampled", "greedy"] = "sampled"
    steps: int = 0
    """Play that many in all instead of a number of episodes."""
    simulators: int = 32
    """At most."""
    epsilons: tuple[tuple[str, float], ...] = ()
    """Share of random actions, by the algorithm's name."""


PROTOCOLS = {
    "null-op": Protocol("30 episodes, up to 30 no-ops first, 18 000 frames (DQN, Gorila, PAAC)", noop_max=30, max_frames=18_000),
    HUMAN: Protocol(
        "start states from recorded play, 108 000 frames from the recording's beginning, only the agent's points (Gorila)",
        episodes=100,
        noop_max=0,
        max_frames=MOST_FRAMES,
        simulators=16,
    ),
    "sticky": Protocol(
        "30 episodes, sticky actions 0.25, no no-ops, 108 000 frames (Machado et al. 2018)",
        noop_max=0,
        sticky_actions=0.25,
        max_frames=108_000,
    ),
    "ba3c": Protocol(
        "50 greedy games, up to 30 no-ops first, 108 000 frames", episodes=50, noop_max=30, max_frames=108_000, actions="greedy"
    ),
    "accelerated": Protocol(
        "125 000 steps, episodes of up to 27 000, ε 0.05 for DQN and 0.001 for Categorical",
        noop_max=30,
        max_frames=108_000,
        steps=125_000,
        simulators=8,
        epsilons=(("dqn", 0.05), ("categorical-dqn", 0.001)),
    ),
    PLAIN: Protocol("30 episodes of the recipe's own environment"),
}


def default_protocol(env: AtariEnv | SnakeEnv | GymEnv) -> str:
    return "null-op" if isinstance(env, AtariEnv) else PLAIN


def evaluation_env(env: AtariEnv | SnakeEnv | GymEnv, name: str) -> Any:
    """What is played: raw rewards, whole games."""
    if name != PLAIN and not isinstance(env, AtariEnv):
        raise UsageError(f"--protocol {name} is defined for Atari games, not for {env.id}: use {PLAIN}")
    protocol = PROTOCOLS[name]
    own = env.max_frames if isinstance(env, AtariEnv) else 0
    played = env.for_evaluation(protocol.noop_max, protocol.max_frames or own)
    if isinstance(played, AtariEnv) and protocol.sticky_actions is not None:
        played = replace(played, sticky_actions=protocol.sticky_actions)
    return played


class RandomPlayer:
    """Any action with the same probability."""

    def __init__(self, group: EnvGroup, seed: int) -> None:
        self._group, self._seed, self._slot = group, seed, 0
        self._ids = torch.arange(group.num_envs)
        group.reset([random.env_seed(seed, random.ENV, i) for i in range(group.num_envs)])

    def play(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        u = random.uniform(self._seed, random.ACT, self._ids, torch.tensor(self._slot), 1).squeeze(-1)
        self._group.send((u * self._group.spec.actions).long().numpy())
        step = self._group.recv()
        self._slot += 1
        reward, terminated, truncated, first = (
            torch.as_tensor(x).cpu().numpy().copy() for x in (step.reward, step.terminated, step.truncated, step.first)
        )
        return reward, terminated | truncated, truncated, first


def random_env(game: str, name: str) -> AtariEnv:
    """A game as the random player sees it: `Pong` or `ALE/Pong-v5`."""
    if name == HUMAN:
        raise UsageError(
            f"a random player of {FRAMES_OF_RANDOM} frames an action cannot go on from a game recorded with another number"
        )
    env = AtariEnv(id=game if "/" in game else f"ALE/{game}-v5", frame_skip=FRAMES_OF_RANDOM, stack=1).resolved()
    env.check()
    return evaluation_env(env, name)
