"""Atari through ale-py's native vector environment: C++ threads, one frame per step (stacks are assembled by us).

ale-py's traps are dealt with here and nowhere else: raw rewards (it clips by default), life loss derived from `lives`
(its own option restarts the game), actions range-checked (a wrong one hangs it for ever), never a reset while a send
is pending (that corrupts memory).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from manyhands import machine
from manyhands.types import EnvSpec, Step, UsageError

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"sticky_actions": 0.0, "noop_max": 30},  # deterministic emulator, up to 30 no-ops at the start
    "sticky": {"sticky_actions": 0.25, "noop_max": 0},  # Machado et al. 2018
}


@dataclass(frozen=True)
class AtariEnv:
    """[env] of a game `ALE/...`: what is simulated and what the network sees of it."""

    id: str = "ALE/Pong-v5"
    """The game."""
    preset: Literal["paper", "sticky"] = "paper"
    """paper: no sticky actions, up to 30 no-op starts; sticky: repeat probability 0.25, no life-loss signal."""
    sticky_actions: float | None = None
    """Probability that the emulator repeats the last action; the preset decides if not given."""
    noop_max: int | None = None
    """Up to this many no-ops after a reset; the preset decides if not given."""
    life_loss: bool = False
    """A lost life ends the learning return (never the game)."""
    size: Literal["84x84", "104x80"] = "84x84"
    """84x84: resized; 104x80: first and last row cropped, every second pixel kept (Accelerated Methods)."""
    colour: Literal["gray", "rgb"] = "gray"
    """rgb: three channels a frame, as BA3C sees it."""
    stack: int = 4
    """Frames that the network sees at once."""
    frame_skip: int = 4
    """Emulator frames per step; the last two are maximised."""
    reward_clip: float = 1.0
    """Rewards are clipped to ± this for learning, never for reporting; 0 leaves them alone."""
    max_frames: int = 108_000
    """An episode is truncated after this many frames."""
    threads: int = 0
    """Simulator threads per group; 0: one per core, beside a GPU one fewer: the learner needs it."""
    workers: int = 0
    """Processes per group, which build their simulators at the same time (0.1 s each) and share the threads; 0: none."""

    def __post_init__(self) -> None:
        if self.stack < 1 or self.frame_skip < 1 or self.max_frames < 1:
            raise UsageError("env.stack, env.frame_skip and env.max_frames must be at least 1")
        if self.threads < 0 or self.workers < 0:
            raise UsageError("env.threads and env.workers must not be negative")
        if self.reward_clip < 0 or self.threads < 0 or (self.noop_max or 0) < 0:
            raise UsageError("env.reward_clip, env.threads and env.noop_max must not be negative")
        if not 0 <= (self.sticky_actions or 0.0) <= 1:
            raise UsageError(f"env.sticky_actions = {self.sticky_actions}: must lie between 0 and 1")

    def check(self) -> None:
        """A UsageError with the nearest name if there is no such game. Reading a recipe does not need ale-py."""
        game_of(self.id)

    def __str__(self) -> str:
        life = "life loss ends returns" if self.life_loss else "life loss not signalled"
        clip = f"rewards clipped to ±{self.reward_clip:g} for learning" if self.reward_clip else "raw rewards"
        return (
            f"{self.id}: sticky actions {self.sticky_actions:g}, up to {self.noop_max} no-ops, {life}, {clip}, {self.size} "
            f"{self.colour}, "
            f"{self.stack} frames of {self.frame_skip}"
        )

    def resolved(self) -> AtariEnv:
        """With the preset's values filled in, as the run directory records it."""
        chosen = {k: v for k, v in PRESETS[self.preset].items() if getattr(self, k) is None}
        if self.preset == "sticky":
            chosen["life_loss"] = False
        return replace(self, **chosen)

    def for_evaluation(self, noop_max: int | None, max_frames: int) -> AtariEnv:
        """Raw rewards and whole games."""
        changes = {} if noop_max is None else {"noop_max": noop_max}
        return replace(self, life_loss=False, reward_clip=0.0, max_frames=max_frames, **changes)  # type: ignore[arg-type]

    def fire(self) -> int | None:
        """The action that serves a ball or starts a level, where the game has one."""
        import ale_py
        from ale_py import roms

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        emulator, rom = ale_py.ALEInterface(), roms.get_rom_path(game_of(self.id))
        assert rom is not None
        emulator.loadROM(rom)
        actions = emulator.getMinimalActionSet()
        return actions.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in actions else None

    def make(self, num_envs: int, with_screen: bool = False) -> AtariGroup:
        return AtariGroup(self.resolved(), num_envs, with_screen)


def game_of(env_id: str) -> str:
    """ale-py's name of a game ("ALE/MsPacman-v5" -> "ms_pacman"), or a UsageError with the nearest one."""
    import difflib

    import gymnasium

    try:
        import ale_py
    except ImportError as error:
        raise UsageError(f"{env_id} needs ale-py: pip install 'manyhands[atari]'") from error
    gymnasium.register_envs(ale_py)
    games = {name: spec for name, spec in gymnasium.registry.items() if name.startswith("ALE/")}
    if env_id not in games:
        near = difflib.get_close_matches(env_id, games, 1, 0.3)
        raise UsageError(f"env.id = {env_id!r}: no such game" + (f"; did you mean {near[0]!r}?" if near else ""))
    return games[env_id].kwargs["game"]


class AtariGroup:
    def __init__(self, config: AtariEnv, num_envs: int, with_screen: bool = False, batch: int = 0) -> None:
        """batch: how many of the emulators answer together; 0: all (see envs.partial)."""
        import ale_py
        from ale_py.vector_env import AtariVectorEnv

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        tall = config.size == "104x80"
        threads = min(config.threads or machine.cores(), num_envs)
        options: dict[str, Any] = {
            "num_threads": threads,
            "batch_size": batch,
            # The scheduler often wakes two of them on one core, and leaves them there: 12 % of A2C's speed on two cores.
            "thread_affinity_offset": 0 if machine.one_thread_per_core(threads) else -1,
            "stack_num": 1,
            "frameskip": config.frame_skip,
            "noop_max": config.noop_max + 1 if config.noop_max else 0,  # ale-py draws from range(noop_max)
            "repeat_action_probability": config.sticky_actions,
            "max_num_frames_per_episode": config.max_frames,
            "reward_clipping": False,
        }
        size: dict[str, Any] = {"img_height": 210, "img_width": 160} if tall else {}
        game = game_of(config.id)
        self._rgb = config.colour == "rgb"
        self._env = AtariVectorEnv(game, num_envs, **options, **size, grayscale=not self._rgb)
        # A twin in colour, given the same seeds and actions, stays in lock-step: the screen a person would see.
        screen_size: dict[str, Any] = {"img_height": 210, "img_width": 160, "grayscale": False}
        self._twin = AtariVectorEnv(game, num_envs, **options, **screen_size) if with_screen else None
        self._screen: np.ndarray | None = None
        self._tall = tall
        self.num_envs = num_envs
        frame = (3 if self._rgb else 1, *((104, 80) if tall else (84, 84)))
        actions = int(self._env.single_action_space.n)  # type: ignore[attr-defined]
        self.spec = EnvSpec(config.id, frame, "uint8", config.stack, actions, config.frame_skip)
        self._pending = False
        self._ended = np.zeros(num_envs, bool)
        self._lives = np.zeros(num_envs, np.int64)

    @property
    def lives(self) -> np.ndarray:
        return self._lives

    def reset(self, seeds: list[int]) -> Step:
        return self._restart({"seed": np.array(seeds)}, np.ones(self.num_envs, bool))

    def restart(self, which: Any) -> Step:
        which = np.asarray(which, bool)
        return self._restart({"options": {"reset_mask": which}}, which)

    def _restart(self, arguments: dict[str, Any], which: np.ndarray) -> Step:
        if self._pending:
            self.recv()
        obs, info = self._env.reset(**arguments)
        if self._twin is not None:
            self._screen = self._twin.reset(**arguments)[0]
        self._ended &= ~which
        self._lives = info["lives"].copy()
        none = np.zeros(self.num_envs, bool)
        return Step(self._see(obs), np.zeros(self.num_envs, np.float32), none, none, none, which.copy())

    def send(self, actions: Any) -> None:
        actions = np.asarray(actions, np.int64)
        if actions.min() < 0 or actions.max() >= self.spec.actions:
            raise ValueError(f"actions {actions} outside 0..{self.spec.actions - 1}")
        self._env.send(actions)
        if self._twin is not None:
            self._twin.send(actions)
        self._pending = True

    def recv(self) -> Step:
        obs, reward, terminated, truncated, info = self._env.recv()
        if self._twin is not None:
            self._screen = self._twin.recv()[0]
        self._pending = False
        first = self._ended
        self._ended = terminated | truncated
        life_lost = (info["lives"] < self._lives) & ~first
        self._lives = info["lives"].copy()
        return Step(self._see(obs), reward.astype(np.float32), terminated, truncated, life_lost, first)

    def _see(self, obs: np.ndarray) -> np.ndarray:
        if self._rgb:
            obs = np.moveaxis(obs[:, 0], -1, 1)  # [B, 1, H, W, 3] -> [B, 3, H, W]
        return obs[:, :, 1:-1:2, ::2] if self._tall else obs

    def screen(self, index: int) -> np.ndarray:
        assert self._screen is not None, "made without a screen"
        return self._screen[index, 0]

    def state(self) -> None:
        return None  # the vector environment cannot save its emulators

    def load(self, state: dict) -> None:
        raise TypeError("Atari simulators have no saved state")

    def close(self) -> None:
        if self._pending:
            self.recv()
        self._env.close()
        if self._twin is not None:
            self._twin.close()
