"""eval, play, random, record-starts, table, plot."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from manyhands.commands.options import RunDirectory, check_picture, options_of, warn
from manyhands.types import UsageError

ProtocolName = Literal["null-op", "human-starts", "sticky", "ba3c", "accelerated", "plain"]


@dataclass(frozen=True)
class EvalOptions:
    run: RunDirectory
    """A run directory."""
    protocol: ProtocolName | None = None
    """null-op (Atari's default), human-starts, sticky, ba3c, accelerated, or plain: the recipe's own environment."""
    starts: Path | None = None
    """Of human-starts: what record-starts wrote; starts/GAME.json if not given."""
    episodes: int | None = None
    """Whole episodes to play; the protocol's number if not given."""
    actions: Literal["sampled", "greedy"] | None = None
    """Draw actions from the policy, or always take the most probable; the protocol's if not given."""
    epsilon: float | None = None
    """Share of uniformly random actions; the protocol's if not given."""
    seed: int = 1_000_000
    """Seed of the evaluation, apart from the training's."""
    checkpoint: str = "latest"
    """latest, best, or a folder in checkpoints/."""
    device: str | None = None
    """Another device than the recipe's."""
    json: bool = False
    """Print the result as JSON."""


def evaluate(arguments: list[str]) -> int:
    """Let a trained agent play whole episodes, and write the scores to the run directory."""
    from manyhands.run import Run

    o = options_of(EvalOptions, "eval", arguments, evaluate.__doc__ or "")
    result = (
        Run.open(o.run)
        .on(o.device)
        .evaluate(
            o.episodes,
            protocol=o.protocol,
            actions=o.actions,
            epsilon=o.epsilon,
            seed=o.seed,
            checkpoint=o.checkpoint,
            warn=warn,
            starts=o.starts,
        )
    )
    print(json.dumps(dataclasses.asdict(result)) if o.json else _show_evaluation(result))
    return 0


def _show_evaluation(result: Any) -> str:
    capped = f", {result.truncated} stopped by the limit" if result.truncated else ""
    step = f", step {result.checkpoint_step:,}" if result.actions != "random" else ""
    begun = f"\nfrom {result.starts}" if result.starts else ""
    return (
        f"{result.mean:.2f} ± {result.standard_deviation:.2f} over {result.episodes} episodes "
        f"(min {result.minimum:g}, max {result.maximum:g}; {result.protocol}, {result.actions}"
        f"{step}{capped}; {result.seconds:.0f} s){begun}"
    )


@dataclass(frozen=True)
class RandomOptions:
    game: Annotated[str, tyro.conf.Positional]
    """Pong, Breakout, … as ALE calls them."""
    protocol: Literal["null-op", "sticky", "ba3c", "accelerated"] = "null-op"
    """How it is played."""
    episodes: int | None = None
    """Whole episodes to play; the protocol's number if not given."""
    seed: int = 1_000_000
    """Seed of the games and of the player."""
    json: bool = False
    """Print the result as JSON."""


def random_player(arguments: list[str]) -> int:
    """Let a random player, ten actions a second, play an Atari game: what scores are counted from."""
    from manyhands.evaluate import evaluate_random

    o = options_of(RandomOptions, "random", arguments, random_player.__doc__ or "")
    result = evaluate_random(o.game, o.protocol, o.episodes, o.seed)
    print(json.dumps(dataclasses.asdict(result)) if o.json else _show_evaluation(result))
    return 0


@dataclass(frozen=True)
class StartsOptions:
    game: Annotated[str, tyro.conf.Positional]
    """Pong, or ALE/Pong-v5."""
    run: Path | None = None
    """A run directory: its agent plays. Without it you do, in a window, until you close it."""
    number: int = 100
    """How many."""
    out: Path | None = None
    """Where they go; starts/GAME.json if not given."""
    seed: int = 0
    """Of the games, and of where they are left."""


def record_starts(arguments: list[str]) -> int:
    """Record start states of an Atari game, from a trained agent or from you, for the human-starts protocol."""
    from manyhands.envs.atari import AtariEnv
    from manyhands.envs.starts import default_path
    from manyhands.record import by_agent, by_person
    from manyhands.run import Run

    o = options_of(StartsOptions, "record-starts", arguments, record_starts.__doc__ or "")
    env = AtariEnv(id=o.game if "/" in o.game else f"ALE/{o.game}-v5").resolved()
    env.check()
    if o.number < 1:
        raise UsageError(f"--number {o.number}: must be at least 1")
    path = o.out or default_path(env.id)
    if path.is_file():
        raise UsageError(f"{path} exists already: give another --out, or delete it")
    if path.is_dir() or (path.parent.exists() and not os.access(path.parent, os.W_OK)):
        raise UsageError(f"--out {path}: a file cannot be written there")
    run = None if o.run is None else Run.open(o.run)
    if run is not None and run.recipe.env.id != env.id:
        raise UsageError(f"{o.run} plays {run.recipe.env.id}, not {env.id}")
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    starts = by_person(env, o.number, o.seed, say) if run is None else by_agent(run, o.number, o.seed, say)
    starts.save(path)
    print(f"{path}: {len(starts.states)} start states of {env.id} by {starts.by}; those of the papers' humans are not public")
    return 0


@dataclass(frozen=True)
class PlayOptions:
    run: RunDirectory
    """A run directory."""
    video: Path | None = None
    """An .mp4 or .gif to write; play.mp4 in the run directory if not given."""
    actions: Literal["sampled", "greedy"] = "sampled"
    """Draw actions from the policy, or always take the most probable."""
    seed: int = 1_000_000
    """Seed of the episode."""
    max_steps: int = 1_500
    """Stop filming after this many steps."""
    fps: float = 15.0
    """Steps shown per second (Atari in real time: 15)."""
    checkpoint: str = "latest"
    """latest, best, or a folder in checkpoints/."""
    device: str | None = None
    """Another device than the recipe's."""


def play(arguments: list[str]) -> int:
    """Film one episode from the real screen."""
    from manyhands.evaluate import record
    from manyhands.run import Run

    o = options_of(PlayOptions, "play", arguments, play.__doc__ or "")
    run = Run.open(o.run).on(o.device)
    video = o.video or run.directory / "play.mp4"
    score, steps = record(run, video, o.actions, o.seed, o.max_steps, o.fps, o.checkpoint, warn)
    print(f"{video}: {steps:,} steps, score {score:g}")
    return 0


@dataclass(frozen=True)
class TableOptions:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories with evaluations; runs of one game are its seeds."""
    protocol: Literal["null-op", "human-starts", "sticky", "ba3c", "accelerated"] = "null-op"
    """Which evaluations."""
    out: Path | None = None
    """Also draw it into this .png, .svg or .pdf."""
    json: bool = False
    """Print the table as JSON."""


def table(arguments: list[str]) -> int:
    """Evaluated runs of Atari games in one table: raw, normalised, beside the published scores."""
    from manyhands import table as tables
    from manyhands.run import Run

    o = options_of(TableOptions, "table", arguments, table.__doc__ or "")
    check_picture("--out", str(o.out or ""))
    result = tables.table([Run.open(path) for path in o.runs], o.protocol)
    if o.out is not None:
        tables.draw(result, o.out)
    if o.json:
        print(json.dumps(result))
        return 0
    from rich.console import Console

    Console().print(tables.show(result))
    print(tables.show_together(result))
    return 0


@dataclass(frozen=True)
class PlotOptions:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run directories; runs of one recipe become one line."""
    out: Path = Path("curves.png")
    """A .png, .svg or .pdf to write."""
    x: Literal["step", "time_s", "frames"] = "step"
    """Horizontal axis."""
    y: str = "return_mean"
    """Any key of metrics.jsonl; staleness_counts draws how stale the gradients of asynchronous learners were."""


def plot(arguments: list[str]) -> int:
    """Draw learning curves, the mean and spread over seeds."""
    from manyhands.plot import plot as draw
    from manyhands.run import Run

    o = options_of(PlotOptions, "plot", arguments, plot.__doc__ or "")
    print(draw([Run.open(path) for path in o.runs], o.out, o.x, o.y))
    return 0
