"""A run: training into a run directory, resuming from it, and asking it questions."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from manyhands import build, checkpoint
from manyhands.build import Custom, make_learner
from manyhands.config import Recipe, load_recipe, to_toml
from manyhands.learner import Learner
from manyhands.metrics import Display, MetricsWriter, read_metrics
from manyhands.types import Episode, RunError, UsageError

if TYPE_CHECKING:
    from manyhands.evaluate import Evaluation

GRACE_S = 5.0  # after Ctrl-C: time to reach the end of a rollout, where saving is exact


class Stop:
    """Ctrl-C or SIGTERM once: finish the update, save, leave. Twice: leave at once."""

    def __init__(self) -> None:
        self.asked_at: float | None = None

    @property
    def asked(self) -> bool:
        return self.asked_at is not None

    @property
    def overdue(self) -> bool:
        return self.asked_at is not None and time.monotonic() - self.asked_at > GRACE_S

    @contextlib.contextmanager
    def listening(self, say: Callable[[str], None]) -> Iterator[Stop]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handle(number: int, frame: Any) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked_at = time.monotonic()
            say("stopping: finishing this rollout, then saving (again to leave at once)")

        previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class Run:
    """The record of a run, as its directory holds it."""

    directory: Path
    recipe: Recipe
    custom: Custom = field(default_factory=Custom)
    interrupted: bool = False
    steps: int = 0  # taken so far, where this object comes from training

    @staticmethod
    def open(directory: str | Path, custom: Custom = Custom()) -> Run:  # noqa: B008 – frozen
        directory = Path(directory)
        if not (directory / "recipe.toml").is_file():
            raise UsageError(f"{directory} is not a run directory: it has no recipe.toml")
        return Run(directory, load_recipe(str(directory / "recipe.toml")), custom)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory)

    def evaluate(self, episodes: int = 30, **options: Any) -> Evaluation:
        from manyhands.evaluate import evaluate

        return evaluate(self, episodes, **options)


def start(recipe: Recipe, directory: Path, custom: Custom = Custom(), quiet: bool = False) -> Run:  # noqa: B008
    """Train a new run."""
    recipe = replace(recipe, env=recipe.env.resolved())
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(
            f"{directory} exists already: continue it with 'manyhands resume {directory}', or choose another --run-dir or --seed"
        )
    _check_reporting(recipe)
    learner = make_learner(recipe, custom)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "recipe.toml").write_text(to_toml(recipe))
        return _Session(Run(directory, recipe, custom), learner, quiet).go()
    finally:
        learner.close()


def resume(run: Run, total_steps: int | None = None, quiet: bool = False) -> Run:
    """Continue a run from its newest good checkpoint."""
    recipe = run.recipe if total_steps is None else replace(run.recipe, total_steps=total_steps)
    build.check_custom(recipe, run.custom)
    display = Display(recipe.total_steps, quiet=True)
    state, manifest = checkpoint.load_newest(run.checkpoints, display.warn)
    if manifest["step"] >= recipe.total_steps:
        raise UsageError(
            f"{run.directory} is finished ({manifest['step']:,} of {recipe.total_steps:,} steps): give a larger --total-steps"
        )
    _check_reporting(recipe)
    learner = make_learner(recipe, run.custom)
    try:
        checkpoint.check_same(identity(run.recipe, run.custom, learner), manifest["identity"], run.checkpoints)
        if total_steps is not None:
            (run.directory / "recipe.toml").write_text(to_toml(recipe))
        learner.load(state["learner"])
        return _Session(replace(run, recipe=recipe), learner, quiet, state).go()
    finally:
        learner.close()


def identity(recipe: Recipe, custom: Custom, learner: Learner) -> dict[str, Any]:
    return build.identity(recipe, custom, learner.sampler.spec, learner.model.parameters.numel())


def _check_reporting(recipe: Recipe) -> None:
    if recipe.report.wandb:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise UsageError("report.wandb = true needs wandb: pip install 'manyhands[track]'") from None


class _Session:
    """One process's share of a run: from a start or a resume until the end or a stop."""

    def __init__(self, run: Run, learner: Learner, quiet: bool, state: dict[str, Any] | None = None) -> None:
        self._run = run
        self._recipe = recipe = run.recipe
        self._learner = learner
        self._window: deque[float] = deque(maxlen=recipe.report.window)
        self._lengths: deque[int] = deque(maxlen=recipe.report.window)
        self._episodes = 0
        self._best: float | None = None
        self._seconds_before = 0.0
        self._reported: tuple[int, float] = (0, 0.0)  # step and time of the last report
        from_step = None
        if state is not None:
            self._load(state["session"])
            from_step = state["learner"]["store"]["steps"]
        self._display = Display(recipe.total_steps, quiet)
        self._writer = MetricsWriter(run.directory, recipe, from_step, self._display.warn)
        self._begin = time.monotonic()

    def go(self) -> Run:
        stop = Stop()
        try:
            with stop.listening(self._display.say):
                self._loop(stop)
        except torch.cuda.OutOfMemoryError as error:
            peak = torch.cuda.max_memory_allocated() / 2**30
            raise RunError(
                f"the GPU ran out of memory (peak {peak:.1f} GiB). The last checkpoint is good; lower sampler.num_envs or "
                "sampler.horizon, or raise memory.minibatches"
            ) from error
        finally:
            self._writer.close()
            self._display.close()
        steps = self._learner.clock.steps
        return replace(self._run, interrupted=stop.asked and steps < self._recipe.total_steps, steps=steps)

    def _loop(self, stop: Stop) -> None:
        recipe, learner = self._recipe, self._learner
        saved_at = learner.store.refresh().steps
        for rollout in learner.run():
            if rollout is None:
                if stop.overdue:
                    return self._save(mid_rollout=True)
                continue
            self._count(rollout.episodes)
            step = learner.clock.steps
            done = step >= recipe.total_steps
            if done or step // recipe.report.every_steps > self._reported[0] // recipe.report.every_steps:
                self._report(step)
            self._display.advance(step, self._mean())
            if done or stop.asked or step // recipe.checkpoint.every_steps > saved_at // recipe.checkpoint.every_steps:
                self._save()
                saved_at = step
            if done or stop.asked:
                return None
        return None

    def _count(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            self._window.append(episode.raw_return)
            self._lengths.append(episode.steps)
        self._episodes += len(episodes)

    def _mean(self) -> float | None:
        return sum(self._window) / len(self._window) if self._window else None

    def _report(self, step: int) -> None:
        now = self._seconds_before + time.monotonic() - self._begin
        last_step, last_time = self._reported
        row = {
            "step": step,
            "frames": step * self._learner.sampler.spec.frames_per_step,
            "updates": self._learner.clock.updates,
            "time_s": round(now, 3),
            "steps_per_s": round((step - last_step) / max(now - last_time, 1e-9), 1),
            "episodes": self._episodes,
            "return_mean": self._mean(),
            "return_max": max(self._window, default=None),
            "episode_steps": sum(self._lengths) / len(self._lengths) if self._lengths else None,
            "refused_gradients": self._learner.store.refused,
            **self._learner.sums.take(),
        }
        self._reported = (step, now)
        self._writer.write(row)
        self._display.report(row)

    def _save(self, mid_rollout: bool = False) -> None:
        mean = self._mean()
        best = mean is not None and (self._best is None or mean > self._best)
        if best:
            self._best = mean
        learner_state = self._learner.state(mid_rollout)
        continues = learner_state["sampler"]["continues"]
        about = {
            "identity": identity(self._recipe, self._run.custom, self._learner),
            "return_mean": mean,
            "environments": "continue mid-episode" if continues else "start new episodes",
        }
        state = {"learner": learner_state, "session": self._state()}
        step = self._learner.clock.steps
        try:
            checkpoint.save(self._run.checkpoints, step, state, about, self._recipe.checkpoint.keep, best)
        except (OSError, SafetensorError) as error:  # a full disk, as Python and as safetensors say it
            reason = getattr(error, "strerror", None) or error
            self._display.warn(f"checkpoint at step {step:,} not saved ({reason}); the last good one stays, training goes on")

    def _state(self) -> dict[str, Any]:
        return {
            "window": list(self._window),
            "lengths": list(self._lengths),
            "episodes": self._episodes,
            "best": self._best,
            "seconds": self._seconds_before + time.monotonic() - self._begin,
            "reported": list(self._reported),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._window.extend(state["window"])
        self._lengths.extend(state["lengths"])
        self._episodes = state["episodes"]
        self._best = state["best"]
        self._seconds_before = state["seconds"]
        self._reported = (state["reported"][0], state["reported"][1])
