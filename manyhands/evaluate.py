"""Evaluation and clips: a trained agent plays whole games; raw scores, no learning."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from manyhands.build import check_custom, find_device, identity, make_group, make_model, place_threads
from manyhands.checkpoint import check_same, load_newest
from manyhands.config import to_dict
from manyhands.envs.atari import AtariEnv
from manyhands.envs.gym import GymEnv
from manyhands.envs.snake import SnakeEnv
from manyhands.envs.starts import Starts, StartsGroup, default_path
from manyhands.maths import random
from manyhands.maths.stacking import stacked
from manyhands.nets.flat import Model
from manyhands.protocols import HUMAN, PROTOCOLS, RandomPlayer, default_protocol, evaluation_env, random_env
from manyhands.types import Algorithm, EnvGroup, UsageError

if TYPE_CHECKING:
    from manyhands.run import Run

STILL_FRAMES = 30  # after which greedy play has stalled: it would see and do the same for ever


@dataclass(frozen=True)
class Evaluation:
    mean: float
    standard_deviation: float
    minimum: float
    maximum: float
    episodes: int
    returns: list[float]
    steps: list[int]
    truncated: int  # episodes that ran into the frame cap or time limit
    fired: int  # how often greedy play had stalled, and FIRE was pressed instead
    protocol: str
    actions: str
    epsilon: float
    checkpoint_step: int
    seed: int
    seconds: float
    starts: str = ""  # whose games are gone on with


class Player:
    """A group of simulators and a frozen agent. `play` takes one slot in all of them."""

    def __init__(
        self,
        algorithm: Algorithm,
        model: Model,
        group: EnvGroup,
        actions: str,
        epsilon: float,
        seed: int,
        fire: int | None = None,
    ) -> None:
        """fire: the action that is taken instead when nothing on the screen has moved for a while."""
        self._algorithm, self._net, device = algorithm, model.net, model.parameters.device
        self._group = group
        self._greedy = actions == "greedy"
        self._epsilon = epsilon
        self._seed = seed
        self._slot = 0
        B, S, spec = group.num_envs, group.spec.stack, group.spec
        self._fire = fire
        self._still = torch.zeros(B, dtype=torch.int64, device=device)  # slots since something moved
        self.fired = torch.zeros((), dtype=torch.int64, device=device)
        self._ids = torch.arange(B, device=device)
        self._frames = torch.zeros(S, B, *spec.frame, dtype=getattr(torch, spec.dtype), device=device)
        self._first = torch.ones(S, B, dtype=torch.bool, device=device)
        self._before = torch.zeros_like(self._frames[0])
        self._see(group.reset([random.env_seed(seed, random.ENV, i) for i in range(B)]))

    def _see(self, step: Any) -> None:
        self._frames = self._frames.roll(-1, 0)
        self._first = self._first.roll(-1, 0)
        self._frames[-1] = torch.as_tensor(step.obs).to(self._frames.device)
        self._first[-1] = torch.as_tensor(step.first).to(self._first.device)
        if self._fire is not None:
            same = (self._frames[-1] == self._before).flatten(1).all(1) & ~self._first[-1]
            self._still = torch.where(same, self._still + 1, 0)
            self._before = self._frames[-1].clone()

    @torch.inference_mode()
    def _choose(self) -> Tensor:
        rows = (self._group.spec.stack - 1) * self._group.num_envs + self._ids
        obs = stacked(self._frames, self._first, rows, self._group.spec.stack)
        noise = random.uniform(self._seed, random.ACT, self._ids, torch.tensor(self._slot, device=self._ids.device), 4)
        if self._greedy:
            action = self._algorithm.greedy(self._net, obs)
        else:
            action = self._algorithm.act(self._net, obs, torch.zeros(len(obs), device=obs.device), noise[:, :2])[0]
        explore = noise[:, 2] < self._epsilon
        action = torch.where(explore, (noise[:, 3] * self._group.spec.actions).long(), action)
        if self._fire is None:
            return action
        stalled = self._still * self._group.spec.frames_per_step >= STILL_FRAMES
        self._still = torch.where(stalled, 0, self._still)
        self.fired += stalled.sum()
        return torch.where(stalled, self._fire, action)

    def play(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """reward, ended, truncated, reset-only – each [B]."""
        self._group.send(self._choose().cpu().numpy())
        step = self._group.recv()
        self._see(step)
        self._slot += 1
        values = [torch.as_tensor(x).cpu().numpy().copy() for x in (step.reward, step.terminated, step.truncated, step.first)]
        return values[0], values[1] | values[2], values[2], values[3]


def unstick(env: AtariEnv | SnakeEnv | GymEnv, algorithm: Algorithm, actions: str) -> int | None:
    """The action that gets a game going again, for players that would do the same for ever."""
    greedy = actions == "greedy" or hasattr(algorithm, "target_period")  # value learning draws nothing
    return env.fire() if isinstance(env, AtariEnv) and greedy else None


def _player(run: Run, group: EnvGroup, state: dict, manifest: dict, actions: str, epsilon: float, seed: int) -> Player:
    device = find_device(run.recipe.device)
    place_threads(run.recipe, device)
    algorithm = run.custom.algorithm or run.recipe.algorithm
    model = make_model(run.recipe, algorithm, group.spec, device, run.custom)
    check_same(identity(run.recipe, run.custom, group.spec, model), manifest["identity"], run.checkpoints)
    model.parameters.copy_(state["team"]["store"]["parameters"])
    return Player(algorithm, model, group, actions, epsilon, seed, unstick(run.recipe.env, algorithm, actions))


def play_episodes(player: Any, simulators: int, rounds: int, steps: int = 0) -> list[tuple[float, int, bool]]:
    """Score, length and whether it was cut short, of so many episodes of each simulator, round by round. Or of all that end
    within so many steps, together; a simulator in which none did gives what it has."""
    score, length = np.zeros(simulators), np.zeros(simulators, int)
    finished: list[list[tuple[float, int, bool]]] = [[] for _ in range(simulators)]
    slots = -(-steps // simulators)
    while slots > 0 if steps else any(len(f) < rounds for f in finished):
        slots -= 1
        reward, ended, truncated, reset = player.play()
        score, length = np.where(reset, 0.0, score + reward), np.where(reset, 0, length + 1)
        for i in np.flatnonzero(ended):
            finished[i].append((float(score[i]), int(length[i]), bool(truncated[i])))
    if steps:
        return [game for i, f in enumerate(finished) for game in f or [(float(score[i]), int(length[i]), True)]]
    return [f[r] for r in range(rounds) for f in finished]


def _open(run: Run, protocol: str | None, checkpoint_name: str, warn: Callable[[str], None]) -> tuple[Any, str, dict, dict]:
    """The environment to evaluate in, the protocol's name, the state and the manifest."""
    check_custom(run.recipe, run.custom)
    protocol = protocol or default_protocol(run.recipe.env)
    env = evaluation_env(run.recipe.env, protocol)
    state, manifest = load_newest(run.checkpoints, warn, checkpoint_name, streams=False)
    return env, protocol, state, manifest


def evaluate(
    run: Run,
    episodes: int | None = None,
    protocol: str | None = None,
    actions: Literal["sampled", "greedy"] | None = None,
    epsilon: float | None = None,
    seed: int = 1_000_000,
    checkpoint: str = "latest",
    warn: Callable[[str], None] = print,
    starts: str | Path | None = None,
) -> Evaluation:
    """Plays whole episodes and writes eval/*.json. What is not given is as the protocol has it. starts: a file of start states,
    for human-starts; starts/GAME.json if not given.

    Every simulator plays the same number of episodes: stopping at the first N that end would favour short ones.
    """
    _check_episodes(episodes)
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise UsageError(f"--epsilon {epsilon}: must lie between 0 and 1")
    env, protocol, state, manifest = _open(run, protocol, checkpoint, warn)
    chosen = PROTOCOLS[protocol]
    actions = actions or chosen.actions
    if epsilon is None:
        epsilon = dict(chosen.epsilons).get(to_dict(run.recipe)["algorithm"]["name"], 0.0)

    def player(group: EnvGroup) -> Player:
        return _player(run, group, state, manifest, actions, epsilon, seed)

    recorded = _starts(env, protocol, starts)
    if recorded is not None:
        episodes = min(episodes or chosen.episodes, len(recorded.states))

    def make(simulators: int) -> Any:
        if recorded is not None:
            return StartsGroup(env, recorded, simulators)
        return make_group(env, simulators, find_device(run.recipe.device), run.custom.env)

    result = _play(make, player, protocol, episodes, actions, epsilon, manifest["step"], seed)
    if recorded is not None:
        result = replace(
            result, starts=f"{len(recorded.states)} start states by {recorded.by}; those of the papers are not public"
        )
    folder = run.directory / "eval"
    folder.mkdir(exist_ok=True)
    whose = "" if recorded is None else f"-starts{recorded.digest[:8]}"
    name = f"{protocol}-{actions}-epsilon{epsilon:g}-episodes{result.episodes}-step{manifest['step']}-seed{seed}{whose}.json"
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps(asdict(result), indent=1))
    temporary.replace(folder / name)
    return result


def evaluate_random(game: str, protocol: str = "null-op", episodes: int | None = None, seed: int = 1_000_000) -> Evaluation:
    """What an Atari game gives to a player who does anything ten times a second."""
    _check_episodes(episodes)
    env = random_env(game, protocol)

    def make(simulators: int) -> EnvGroup:
        return make_group(env, simulators, torch.device("cpu"))

    return _play(make, lambda group: RandomPlayer(group, seed), protocol, episodes, "random", 1.0, 0, seed)


def _starts(env: Any, protocol: str, path: str | Path | None) -> Starts | None:
    if protocol != HUMAN:
        if path is not None:
            raise UsageError(f"--starts is for --protocol {HUMAN}")
        return None
    recorded = Starts.load(Path(path) if path is not None else default_path(env.id))
    recorded.check(env)
    return recorded


def _check_episodes(episodes: int | None) -> None:
    if episodes is not None and episodes < 1:
        raise UsageError(f"--episodes {episodes}: must be at least 1")


def _play(
    make: Callable[[int], Any],
    player_of: Callable[[EnvGroup], Any],
    protocol: str,
    episodes: int | None,
    actions: str,
    epsilon: float,
    checkpoint_step: int,
    seed: int,
) -> Evaluation:
    chosen = PROTOCOLS[protocol]
    steps = chosen.steps if episodes is None else 0
    episodes = episodes or chosen.episodes
    simulators = chosen.simulators if steps else min(episodes, chosen.simulators)
    begin = time.monotonic()
    group = make(simulators)
    try:
        player = player_of(group)
        played = play_episodes(player, simulators, math.ceil(episodes / simulators), steps)
    finally:
        group.close()
    played = played if steps else played[:episodes]
    returns = [p[0] for p in played]
    return Evaluation(
        mean=statistics.fmean(returns),
        standard_deviation=statistics.pstdev(returns),
        minimum=min(returns),
        maximum=max(returns),
        episodes=len(returns),
        returns=returns,
        steps=[p[1] for p in played],
        truncated=sum(p[2] for p in played),
        fired=int(getattr(player, "fired", 0)),
        protocol=protocol,
        actions=actions,
        epsilon=epsilon,
        checkpoint_step=checkpoint_step,
        seed=seed,
        seconds=round(time.monotonic() - begin, 2),
    )


def record(
    run: Run,
    video: Path,
    actions: Literal["sampled", "greedy"] = "sampled",
    seed: int = 1_000_000,
    max_steps: int = 1_500,
    fps: float = 15.0,
    checkpoint: str = "latest",
    warn: Callable[[str], None] = print,
) -> tuple[float, int]:
    """One episode as the real screen shows it, into an mp4 or gif. Returns its score and length so far."""
    import imageio.v2 as imageio

    if video.suffix not in (".mp4", ".gif"):
        raise UsageError(f"--video {video}: the name must end in .mp4 or .gif")
    if fps <= 0 or max_steps < 1:
        raise UsageError(f"--fps {fps:g} --max-steps {max_steps}: fps must be positive, max-steps at least 1")
    if not video.parent.is_dir():
        raise UsageError(f"--video {video}: no folder {video.parent}")
    env, _, state, manifest = _open(run, None, checkpoint, warn)
    group = make_group(env, 1, find_device(run.recipe.device), run.custom.env, screen=True)
    score = 0.0
    frames: list[np.ndarray] = []
    try:
        player = _player(run, group, state, manifest, actions, 0.0, seed)
        frames.append(group.screen(0).copy())
        for _ in range(max_steps):
            reward, ended, _, _ = player.play()
            frames.append(group.screen(0).copy())
            score += float(reward[0])
            if ended[0]:
                break
    finally:
        group.close()
    pictures: list[Any] = [_even(frame) for frame in frames]
    temporary = video.with_name(f".{video.name}.part{video.suffix}")
    if video.suffix == ".gif":
        imageio.mimsave(temporary, pictures, duration=1000 / fps, loop=0)
    else:
        imageio.mimsave(temporary, pictures, fps=fps, macro_block_size=2, codec="libx264")
    temporary.replace(video)
    return score, len(frames) - 1


def _even(frame: np.ndarray) -> np.ndarray:
    """Small screens twice as large; sides cut to even numbers, as video codecs want."""
    if max(frame.shape[:2]) < 240:
        frame = frame.repeat(2, 0).repeat(2, 1)
    return frame[: frame.shape[0] // 2 * 2, : frame.shape[1] // 2 * 2]
