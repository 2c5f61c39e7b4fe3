"""Any Gymnasium environment with discrete actions and image (uint8) or vector observations, by id or by factory."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from manyhands.types import EnvSpec, Step, UsageError

Factory = Callable[[], gymnasium.Env]


@dataclass(frozen=True)
class GymEnv:
    """[env] of any other Gymnasium id."""

    id: str = "CartPole-v1"
    """A registered Gymnasium id."""
    stack: int = 1
    """Observations that the network sees at once."""
    reward_clip: float = 0.0
    """Rewards are clipped to ± this for learning, never for reporting; 0 leaves them alone."""
    max_episode_steps: int = 0
    """Truncate episodes after this many steps; 0 keeps the environment's own limit."""
    workers: int = -1
    """Processes per group; -1: one per core; 0: inside the learner's process (for a debugger)."""
    step_timeout_s: float = 60.0
    """A worker that does not answer a step in this time is ended and replaced."""
    restarts: int = 3
    """How often lost workers are replaced before the run stops."""

    def __post_init__(self) -> None:
        if self.stack < 1 or self.workers < -1 or self.step_timeout_s <= 0:
            raise UsageError("env.stack must be at least 1, env.workers at least -1, env.step_timeout_s positive")
        if self.reward_clip < 0 or self.max_episode_steps < 0 or self.restarts < 0:
            raise UsageError("env.reward_clip, env.max_episode_steps and env.restarts must not be negative")

    def __str__(self) -> str:
        return self.id

    def resolved(self) -> GymEnv:
        return self

    def for_evaluation(self, noop_max: int | None, max_frames: int) -> GymEnv:
        return replace(self, reward_clip=0.0)

    def check(self) -> None:
        """A UsageError with the nearest id if there is no such environment."""
        try:
            gymnasium.spec(self.id)
        except Exception as error:
            near = difflib.get_close_matches(self.id, gymnasium.registry, 1, 0.6)
            reason = f"no such environment; did you mean {near[0]!r}?" if near else _one_line(error)
            raise UsageError(f"env.id = {self.id!r}: {reason}") from error

    def make(self, num_envs: int, with_screen: bool = False, factory: Factory | None = None) -> GymGroup:
        return GymGroup(self, num_envs, _limited(self, factory) if factory else _maker(self, with_screen))


def _limited(config: GymEnv, factory: Factory) -> Factory:
    return (lambda: TimeLimit(factory(), config.max_episode_steps)) if config.max_episode_steps else factory


def _maker(config: GymEnv, with_screen: bool) -> Factory:
    config.check()
    arguments: dict[str, Any] = {"render_mode": "rgb_array"} if with_screen else {}
    if config.max_episode_steps:
        arguments["max_episode_steps"] = config.max_episode_steps

    def make() -> gymnasium.Env:
        try:
            return gymnasium.make(config.id, **arguments)
        except gymnasium.error.DependencyNotInstalled as error:
            raise UsageError(f"env.id = {config.id!r} needs a package: {_one_line(error)}") from error

    return make


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


class GymGroup:
    """Environments stepped one after the other, in whatever process this is. envs.workers spreads groups over processes."""

    def __init__(self, config: GymEnv, num_envs: int, factory: Factory) -> None:
        self._envs = [factory() for _ in range(num_envs)]
        self.num_envs = num_envs
        self.spec, self._see = _read_spaces(config, self._envs[0])
        self._first_action = int(getattr(self._envs[0].action_space, "start", 0))
        self._seeds = [0] * num_envs
        self._ended = np.zeros(num_envs, bool)
        self._actions = np.zeros(num_envs, np.int64)
        self._obs = np.zeros((num_envs, *self.spec.frame), self.spec.dtype)

    def reset(self, seeds: list[int]) -> Step:
        self._seeds = list(seeds)
        for i, seed in enumerate(seeds):
            self._keep(i, self._call(i, "reset", seed=int(seed))[0])
        self._ended[:] = False
        return self._step(first=np.ones(self.num_envs, bool))

    def restart(self, which: Any) -> Step:
        which = np.asarray(which, bool)
        for i in np.flatnonzero(which).tolist():
            self._keep(i, self._call(i, "reset")[0])
        self._ended &= ~which
        return self._step(first=which.copy())

    def send(self, actions: Any) -> None:
        self._actions[:] = actions
        if self._actions.min() < 0 or self._actions.max() >= self.spec.actions:
            raise ValueError(f"actions {self._actions} outside 0..{self.spec.actions - 1}")

    def recv(self) -> Step:
        step = self._step(first=self._ended.copy())
        for i, action in enumerate(self._actions):
            if step.first[i]:
                self._keep(i, self._call(i, "reset")[0])
            else:
                obs, reward, terminated, truncated, _ = self._call(i, "step", self._first_action + int(action))
                self._keep(i, obs)
                step.reward[i], step.terminated[i], step.truncated[i] = reward, terminated, truncated
        self._ended = np.asarray(step.terminated) | np.asarray(step.truncated)
        return step

    def _step(self, first: np.ndarray) -> Step:
        terminated, truncated, life_lost = np.zeros((3, self.num_envs), bool)
        return Step(self._obs, np.zeros(self.num_envs, np.float32), terminated, truncated, life_lost, first)

    def _keep(self, index: int, obs: Any) -> None:
        declared = self._envs[index].observation_space.shape
        if np.shape(obs) != declared:
            raise ValueError(f"{self.spec.id} gave an observation of shape {np.shape(obs)}, but its space says {declared}")
        self._obs[index] = self._see(obs)

    def _call(self, index: int, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self._envs[index], method)(*arguments, **named)
        except Exception as error:
            shown = ", ".join([*map(str, arguments), *(f"{k}={v}" for k, v in named.items())])
            raise RuntimeError(
                f"{self.spec.id}, simulator {index} of this group (seed {self._seeds[index]}), failed in {method}({shown})"
            ) from error

    def screen(self, index: int) -> np.ndarray:
        try:
            picture = self._envs[index].render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise UsageError(f"showing {self.spec.id} needs a package: {_one_line(error)}") from error
        if isinstance(picture, np.ndarray):
            return picture
        if not self.spec.is_image:
            raise UsageError(f"{self.spec.id} cannot be shown: it offers no render_mode 'rgb_array'")
        image = self._obs[index].transpose(1, 2, 0)
        return np.broadcast_to(image, (*image.shape[:2], 3)) if image.shape[2] == 1 else image[:, :, :3]

    def state(self) -> dict | None:
        states = [_env_state(env) for env in self._envs]
        if any(state is None for state in states):
            return None
        envs = {str(i): state for i, state in enumerate(states)}
        return {"envs": envs, "obs": self._obs.copy(), "ended": self._ended.copy(), "seeds": list(self._seeds)}

    def load(self, state: dict) -> None:
        self._seeds = list(state["seeds"])
        for i, env in enumerate(self._envs):
            env.reset(seed=self._seeds[i])  # wrappers insist on a reset first
            _load_env_state(env, state["envs"][str(i)])
        self._obs[:] = np.asarray(state["obs"])
        self._ended[:] = np.asarray(state["ended"])

    def close(self) -> None:
        for env in self._envs:
            env.close()


def _read_spaces(config: GymEnv, env: gymnasium.Env) -> tuple[EnvSpec, Callable[[Any], np.ndarray]]:
    """The spec, and a function from the environment's observation to ours (images channels first, vectors float32)."""
    actions, obs = env.action_space, env.observation_space
    if not isinstance(actions, gymnasium.spaces.Discrete):
        raise UsageError(f"{config.id} has {type(actions).__name__} actions: only Discrete ones are supported")
    if not isinstance(obs, gymnasium.spaces.Box):
        raise UsageError(
            f"{config.id} has {type(obs).__name__} observations: wrap it with gymnasium.wrappers.FlattenObservation "
            "(Box observations are supported)"
        )
    number = int(actions.n)
    if obs.dtype == np.uint8 and len(obs.shape) in (2, 3):
        see = _image_axes(config.id, obs.shape)
        frame = see(np.zeros(obs.shape, np.uint8)).shape
        return EnvSpec(config.id, frame, "uint8", config.stack, number), see
    size = int(np.prod(obs.shape))
    return EnvSpec(config.id, (size,), "float32", config.stack, number), lambda x: np.asarray(x, np.float32).reshape(-1)


def _image_axes(env_id: str, shape: tuple[int, ...]) -> Callable[[Any], np.ndarray]:
    if len(shape) == 2:
        return lambda x: np.asarray(x)[None]
    if shape[-1] in (1, 3, 4):
        return lambda x: np.asarray(x).transpose(2, 0, 1)
    if shape[0] in (1, 3, 4):
        return lambda x: np.asarray(x)
    raise UsageError(f"{env_id} shows images of shape {shape}: one axis, first or last, must be 1, 3 or 4 colours")


def _env_state(env: gymnasium.Env) -> dict | None:
    """An environment offers its state by get_state() -> dict (numbers, strings, lists, arrays) and set_state(dict)."""
    elapsed = None
    wrapper: Any = env
    while isinstance(wrapper, gymnasium.Wrapper):
        if isinstance(wrapper, TimeLimit):
            elapsed = wrapper._elapsed_steps
        elif not isinstance(wrapper, OrderEnforcing | PassiveEnvChecker):
            return None  # a wrapper that we don't know may have a state of its own
        wrapper = wrapper.env
    if not (hasattr(wrapper, "get_state") and hasattr(wrapper, "set_state")):
        return None
    generator = getattr(wrapper, "_np_random", None)
    state = {
        "env": wrapper.get_state(),
        "elapsed": elapsed,
        "np_random": None if generator is None else generator.bit_generator.state,
    }
    return state if _is_plain(state) else None


def _load_env_state(env: gymnasium.Env, state: dict) -> None:
    wrapper: Any = env
    while isinstance(wrapper, gymnasium.Wrapper):
        if isinstance(wrapper, TimeLimit):
            wrapper._elapsed_steps = state["elapsed"]
        wrapper = wrapper.env
    if state["np_random"] is not None:
        wrapper.np_random.bit_generator.state = state["np_random"]
    wrapper.set_state(state["env"])


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it: numbers, strings, lists and arrays, in dictionaries by name."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return value is None or isinstance(value, int | float | str | np.generic)
