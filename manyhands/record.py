"""Recording start states: from a trained agent that plays, or from a person in a window."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from manyhands.checkpoint import load_newest
from manyhands.envs.atari import AtariEnv, AtariGroup
from manyhands.envs.starts import LETTERS, Start, Starts, bare, start_at
from manyhands.maths import random
from manyhands.run import Run
from manyhands.types import UsageError

SIMULATORS = 16
EPSILON = 0.05  # random actions of agents that draw nothing themselves
LONGEST = 4500  # decisions before a start state: five minutes


class Tape:
    """A group whose seeds and actions are written down, each simulator's until its first game is over."""

    def __init__(self, group: AtariGroup) -> None:
        self._group = group
        self.num_envs, self.spec = group.num_envs, group.spec
        self.seeds: list[int] = []
        self.actions = [""] * group.num_envs
        self.over = np.zeros(group.num_envs, bool)

    def reset(self, seeds: list[int]) -> Any:
        self.seeds = seeds
        return self._group.reset(seeds)

    def send(self, actions: Any) -> None:
        for i in np.flatnonzero(~self.over):
            self.actions[i] += LETTERS[int(actions[i])]
        self._group.send(actions)

    def recv(self) -> Any:
        step = self._group.recv()
        self.over |= step.terminated | step.truncated
        return step


def _versions() -> str:
    import ale_py

    return ale_py.__version__


def by_agent(run: Run, number: int, seed: int, say: Callable[[str], None]) -> Starts:
    """Sampled play; every start state is from another game, after a random time of up to five minutes or the game's length."""
    from manyhands.evaluate import _player

    env = run.recipe.env
    if not isinstance(env, AtariEnv):
        raise UsageError(f"start states are of Atari games, not of {env.id}")
    state, manifest = load_newest(run.checkpoints, say, "latest", streams=False)
    # Nothing in the emulator is random: somebody has to be, or all games are the same.
    epsilon = EPSILON if hasattr(run.custom.algorithm or run.recipe.algorithm, "target_period") else 0.0
    found: list[Start] = []
    while len(found) < number:
        n = min(number - len(found), SIMULATORS)
        group = AtariGroup(bare(env), n)
        tape: Any = Tape(group)
        own_seed = random.key(seed, len(found))
        try:
            player = _player(run, tape, state, manifest, "sampled", epsilon, own_seed)
            drawn = np.random.default_rng(own_seed)
            wanted = drawn.integers(1, LONGEST + 1, n)
            while any(len(tape.actions[i]) < wanted[i] for i in np.flatnonzero(~tape.over)):
                player.play()
        finally:
            group.close()
        for game_seed, actions, want, over in zip(tape.seeds, tape.actions, wanted, tape.over, strict=True):
            # A game that ended earlier: anywhere in it, but before its last second.
            ended = over and want >= len(actions)
            length = int(drawn.integers(1, max(len(actions) - 15, 2))) if ended else int(want)
            found.append(start_at(env, game_seed, actions[:length]))
        say(f"{len(found)} of {number} start states")
    return Starts(env.id, env.frame_skip, f"{run.recipe.name} at step {manifest['step']}", _versions(), tuple(found))


class Cabinet(gymnasium.Env):
    """One game for a person to play, written down."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 – as Gymnasium has it
    render_mode = "rgb_array"

    def __init__(self, env: AtariEnv, seed: int) -> None:
        self._group = AtariGroup(bare(env), 1, with_screen=True)
        self._seed = seed
        self.games: list[tuple[int, str]] = []
        self.action_space = gymnasium.spaces.Discrete(self._group.spec.actions)
        self.observation_space = gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        own = random.env_seed(self._seed, random.ENV, len(self.games))
        self._group.reset([own])
        self.games.append((own, ""))
        return self.render(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._group.send(np.array([action]))
        step = self._group.recv()
        seed, actions = self.games[-1]
        self.games[-1] = (seed, actions + LETTERS[int(action)])
        return self.render(), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), {}

    def render(self) -> np.ndarray:
        return self._group.screen(0)

    def close(self) -> None:
        self._group.close()


def _check_window() -> None:
    """Without a display SDL draws to nowhere, and nobody could ever close that."""
    import pygame

    pygame.display.init()
    if pygame.display.get_driver() in ("offscreen", "dummy") and "SDL_VIDEODRIVER" not in os.environ:
        raise UsageError("there is no display to play on: record from an agent, with --run")


def by_person(env: AtariEnv, number: int, seed: int, say: Callable[[str], None]) -> Starts:
    """In a window, until it is closed; the start states are drawn from all that was played."""
    try:
        from gymnasium.utils.play import play
    except gymnasium.error.DependencyNotInstalled:
        raise UsageError("playing in a window needs pygame: pip install 'manyhands[play]'") from None
    _check_window()
    cabinet = Cabinet(env, seed)
    keys = gymnasium.make(env.id).unwrapped.get_keys_to_action()  # type: ignore[attr-defined]
    say("W, A, S and D to move, space to fire; close the window when you have played enough")
    with contextlib.suppress(KeyboardInterrupt):  # as good as closing the window
        play(cabinet, fps=15, zoom=3, keys_to_action=keys, seed=seed)
    places = [(game, k) for game, (_, actions) in enumerate(cabinet.games) for k in range(1, len(actions) - 15)]
    if not places:
        raise UsageError("nothing was played for longer than a second: no start states")
    drawn = np.random.default_rng(seed).permutation(len(places))[:number]
    chosen = [(*cabinet.games[game], k) for game, k in (places[i] for i in sorted(drawn))]
    states = tuple(start_at(env, game_seed, actions[:k]) for game_seed, actions, k in chosen)
    return Starts(env.id, env.frame_skip, f"a person, {time.strftime('%Y-%m-%d')}", _versions(), states)
