"""A run: training into a run directory, resuming from it, and asking it questions."""

from __future__ import annotations

import contextlib
import os
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
from manyhands.build import Custom
from manyhands.config import Recipe, from_dict, read_tree, to_toml
from manyhands.hosts.process import GaveUp, give_up_at
from manyhands.memory.replay import ReplayConfig
from manyhands.metrics import Display, MetricsWriter, read_metrics
from manyhands.team import Team
from manyhands.types import EnvSpec, Episode, RunError, UsageError

if TYPE_CHECKING:
    from manyhands.evaluate import Evaluation

RETRY_S = 30.0  # after a checkpoint that could not be saved
GRACE_S = 4.0  # after Ctrl-C: time to reach the end of a rollout, where saving is exact


class Stop:
    """Ctrl-C or SIGTERM once: finish the update, save, leave. Twice: leave at once."""

    def __init__(self) -> None:
        self.asked_at: float | None = None

    @property
    def asked(self) -> bool:
        return self.asked_at is not None

    @contextlib.contextmanager
    def listening(self, say: Callable[[str], None]) -> Iterator[Stop]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def handle(number: int, frame: Any) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.asked_at = time.monotonic()
            give_up_at(self.asked_at + GRACE_S)  # a simulator that hangs must not keep us
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
    return_mean: float | None = None  # of the last training games, likewise

    @staticmethod
    def open(directory: str | Path, custom: Custom = Custom()) -> Run:  # noqa: B008 – frozen
        directory = Path(directory)
        if not (directory / "recipe.toml").is_file():
            raise UsageError(f"{directory} is not a run directory: it has no recipe.toml")
        tree = read_tree(str(directory / "recipe.toml"), ())
        algorithm = tree.get("algorithm")
        if isinstance(algorithm, dict) and algorithm.get("name") == "categorical-dqn":
            algorithm.pop("loss_kind", None)  # earlier versions wrote it, and it meant nothing there
        return Run(directory, from_dict(tree, f"recipe {directory / 'recipe.toml'}"), custom)

    def on(self, device: str | None) -> Run:
        """The same run on another device."""
        return self if device is None else replace(self, recipe=replace(self.recipe, device=device))

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory)

    def evaluate(self, episodes: int | None = None, **options: Any) -> Evaluation:
        from manyhands.evaluate import evaluate

        return evaluate(self, episodes, **options)


def start(recipe: Recipe, directory: Path, custom: Custom = Custom(), quiet: bool = False) -> Run:  # noqa: B008
    """Train a new run."""
    recipe = replace(recipe, env=recipe.env.resolved())
    _check_reporting(recipe)
    spec, model = build.check(recipe, custom)
    identity = build.identity(recipe, custom, spec, model)
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise UsageError(
                f"{directory} exists already: continue it with 'manyhands resume {directory}', "
                "delete it, or choose another --run-dir or --seed (run_dir=, seed=)"
            )
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            _refuse(directory, "not writable")
    except OSError as error:
        _refuse(directory, error.strerror or str(error))
    try:
        return _session(Run(directory, recipe, custom), quiet, identity, spec)
    finally:
        if not any(directory.iterdir()):  # nothing was started
            directory.rmdir()


def _refuse(directory: Path, reason: str) -> None:
    raise UsageError(f"cannot use {directory} as a run directory: {reason}")


def resume(
    run: Run,
    total_steps: int | None = None,
    quiet: bool = False,
    device: str | None = None,
    limit_minutes: float | None = None,
    stop_at_return: float | None = None,
) -> Run:
    """Continue a run from its newest good checkpoint."""
    changes = {
        "total_steps": total_steps, "device": device, "limit_minutes": limit_minutes, "stop_at_return": stop_at_return,
    }  # fmt: skip
    recipe = replace(run.recipe, **{key: value for key, value in changes.items() if value is not None})  # type: ignore[arg-type]
    _check_reporting(recipe)
    warn = Display(recipe.total_steps, quiet=True).warn
    state, manifest = checkpoint.load_newest(run.checkpoints, warn)
    if manifest["step"] >= recipe.total_steps:
        raise UsageError(
            f"{run.directory} is finished ({manifest['step']:,} of {recipe.total_steps:,} steps): give a larger --total-steps"
        )
    if 0 < recipe.limit_minutes * 60 <= state["session"]["seconds"]:
        minutes = f"{recipe.limit_minutes:g} minutes"
        raise UsageError(
            f"{run.directory} is finished (it was given {minutes}): give a larger --limit-minutes, or 0 for no limit"
        )
    if state["session"].get("reached") and recipe.stop_at_return == run.recipe.stop_at_return:
        goal = f"its games reached {recipe.stop_at_return:g}"
        raise UsageError(f"{run.directory} is finished ({goal}): give a larger --stop-at-return, or inf")
    _check_refill(recipe, state["team"], manifest["step"])
    if recipe.rule.anneal != "none" and recipe.total_steps != run.recipe.total_steps:
        before, now = (max(1 - manifest["step"] / r.total_steps, 0.0) for r in (run.recipe, recipe))
        warn(f"the learning rate falls over total_steps: now it goes on at {now:.0%} of its start, not {before:.0%}")
    spec, model = build.check(recipe, run.custom)
    identity = build.identity(recipe, run.custom, spec, model)
    checkpoint.check_same(identity, manifest["identity"], run.checkpoints)
    return _session(replace(run, recipe=recipe), quiet, identity, spec, state)


def _check_refill(recipe: Recipe, team: dict[str, Any], step: int) -> None:
    """A replay that was not saved is filled anew: a run that would be over by then learns nothing more."""
    if isinstance(recipe.memory, ReplayConfig) and _about_replay(team).get("replay", "saved") != "saved":
        need, left = recipe.memory.warmup_steps, recipe.total_steps - step
        if left <= need:
            raise UsageError(
                f"the replay was not saved, and filling it takes {need:,} steps (memory.warmup_steps): only {left:,} are left, "
                f"give --total-steps {step + need:,} or more"
            )


def _session(run: Run, quiet: bool, identity: dict[str, Any], spec: EnvSpec, state: dict[str, Any] | None = None) -> Run:
    display = Display(run.recipe.total_steps, quiet)
    team = None
    try:
        recipe = run.recipe
        display.say(str(recipe.env))
        display.say(f"{build.placement(recipe)}; writing to {run.directory}")
        for doubt in build.doubts(recipe):
            display.warn(doubt)
        where = " in processes of their own; this takes a while" if recipe.in_processes else ""
        display.wait_for(f"starting {build.counted(recipe.sampler.num_envs * recipe.actors, 'simulator')}{where}")
        team = Team(recipe, run.custom, spec, display.warn, state and state["team"])
        if state is not None and _about_replay(state["team"]).get("replay", "saved") != "saved":
            steps = f"{recipe.memory.warmup_steps:,} steps" if isinstance(recipe.memory, ReplayConfig) else ""
            display.say(
                f"the replay was not saved (checkpoint.replay = false): it is filled anew, {steps}, before learning goes on"
            )
        display.wait_for(f"the first rollout: {build.counted(recipe.sampler.horizon * recipe.sampler.columns, 'step')}")
        temporary = run.directory / ".recipe.toml"
        temporary.write_text(to_toml(run.recipe))
        temporary.replace(run.directory / "recipe.toml")
        return _Session(run, team, display, identity, spec, state).go()
    finally:
        display.close()
        if team is not None:
            team.close()


def _about_replay(team: dict[str, Any]) -> dict[str, str]:
    contents = [hand["memory"]["contents"] for hand in team["hands"].values() if "contents" in hand["memory"]]
    if not contents:
        return {}
    return {"replay": "saved" if all(contents) else "not saved: a resume fills it anew before learning goes on"}


def _check_reporting(recipe: Recipe) -> None:
    if recipe.report.wandb:
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise UsageError("report.wandb = true needs wandb: pip install 'manyhands[track]'") from None


class _Session:
    """One process's share of a run: from a start or a resume until the end or a stop."""

    def __init__(
        self, run: Run, team: Team, display: Display, identity: dict[str, Any], spec: EnvSpec, state: dict[str, Any] | None
    ) -> None:
        self._identity = identity
        self._frames_per_step = spec.frames_per_step
        self._run = run
        self._recipe = recipe = run.recipe
        self._team = team
        self._window: deque[float] = deque(maxlen=recipe.report.window)
        self._lengths: deque[int] = deque(maxlen=recipe.report.window)
        self._episodes = 0
        self._best: float | None = None
        self._best_judged: float | None = None
        self._judged: dict[str, Any] = {}
        self._seconds_before = 0.0
        self._reported: tuple[int, float] = (0, 0.0)  # step and time of the last report
        from_step = None
        self._resumed = False
        if state is not None:
            self._load(state["session"])
            self._resumed = True
            from_step = state["team"]["store"]["steps"]
        self._display = display
        self._reached = False  # stop_at_return
        self._saved_at = -1  # step of the newest checkpoint
        self._try_again_at = 0.0  # after a failed save
        self._writer = MetricsWriter(run.directory, recipe, from_step, self._display.warn)
        self._begin = time.monotonic()

    def go(self) -> Run:
        stop = Stop()
        try:
            with stop.listening(self._display.say):
                self._loop(stop)
        except RunError as error:
            kept = f"(the last checkpoint: step {max(self._saved_at, 0):,})" if self._saved_at >= 0 else "(no checkpoint yet)"
            raise RunError(f"{error} {kept}") from None
        finally:
            give_up_at(float("inf"))
            self._writer.write_ledger(self._team.take_ledger())
            self._writer.close()
        steps = self._team.clock.steps
        return replace(self._run, interrupted=stop.asked and not self._over(steps), steps=steps, return_mean=self._mean())

    def _loop(self, stop: Stop) -> None:
        team = self._team
        every = self._recipe.checkpoint.every_steps
        if self._resumed:
            self._saved_at = team.clock.steps
        else:
            self._save()  # so that a run can be resumed whenever it dies
        try:
            for progress in team.run():
                self._count(progress.episodes)
                if (judgement := team.take_judgement()) is not None:
                    self._note(judgement)
                step = team.clock.steps
                over = self._over(step)
                last = over or stop.asked
                due = step // every > max(self._saved_at, 0) // every and time.monotonic() >= self._try_again_at
                if last or due:
                    for late in team.settle():
                        self._count(late.episodes)
                    step = team.clock.steps
                    over = over or self._over(step)
                    last = last or over
                if over and team.judges and self._save():  # the last games take a while
                    for judgement in team.judge_the_end():
                        self._note(judgement)
                self._writer.write_ledger(team.take_ledger())
                if over or self._report_is_due(step):
                    self._report(step)
                self._display.advance(step, self._mean())
                if (last or due) and not self._save() and last:
                    raise RunError(f"the last checkpoint, at step {step:,}, could not be saved; see the warning above")
                if last:
                    return
        except GaveUp:  # asked to stop, and the rollout's end was too far away
            give_up_at(float("inf"))
            if self._saved_at != team.clock.steps:
                self._save(hurried=True)

    def _over(self, step: int) -> bool:
        limit, goal, mean = self._recipe.limit_minutes * 60, self._recipe.stop_at_return, self._mean()
        if goal is not None and mean is not None and len(self._window) == self._recipe.report.window:
            self._reached = self._reached or mean >= goal  # for good: games that come in late may be worse
        return step >= self._recipe.total_steps or 0 < limit <= self._seconds() or self._reached

    def _seconds(self) -> float:
        """Of training, before and after every resume."""
        return self._seconds_before + time.monotonic() - self._begin

    def _note(self, judgement: dict[str, Any]) -> None:
        """The judge's findings; the best parameters it played with are kept."""
        mean = judgement["mean"]
        self._judged = {"eval_return": mean, "eval_updates": judgement["updates"], "eval_step": judgement["steps"]}
        self._display.say(f"the judge: {mean:.2f} at update {judgement['updates']:,}")
        if self._best_judged is not None and mean <= self._best_judged:
            return
        store = {
            "parameters": torch.tensor(judgement["parameters"]),
            "updates": judgement["updates"],
            "steps": judgement["steps"],
        }
        about = {"identity": self._identity, "return_mean": mean}
        try:
            checkpoint.save_best(
                self._run.checkpoints, judgement["steps"], {"team": {"store": store}}, about, self._recipe.checkpoint.keep
            )
        except (OSError, SafetensorError) as error:
            self._display.warn(f"the best parameters so far could not be saved ({getattr(error, 'strerror', None) or error})")
            return
        self._best_judged = mean

    def _report_is_due(self, step: int) -> bool:
        every = self._recipe.report.every_steps
        return step // every > self._reported[0] // every

    def _count(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            self._window.append(episode.raw_return)
            self._lengths.append(episode.steps)
        self._episodes += len(episodes)

    def _mean(self) -> float | None:
        return sum(self._window) / len(self._window) if self._window else None

    def _report(self, step: int) -> None:
        now = self._seconds()
        last_step, last_time = self._reported
        row = {
            "step": step,
            "frames": step * self._frames_per_step,
            "updates": self._team.clock.updates,
            "time_s": round(now, 3),
            "steps_per_s": round((step - last_step) / max(now - last_time, 1e-9), 1),
            "episodes": self._episodes,
            "return_mean": self._mean(),
            "return_max": max(self._window, default=None),
            "episode_steps": sum(self._lengths) / len(self._lengths) if self._lengths else None,
            "refused_gradients": self._team.refused,
            "replaced_workers": self._team.replaced_workers,
            **({"replaced_learners": self._team.replaced_learners} if self._recipe.in_processes else {}),
            **self._team.take_metrics(),
            **self._judged,
        }
        self._reported = (step, now)
        self._writer.write(row)
        self._display.report(row)

    def _save(self, hurried: bool = False) -> bool:
        mean = self._mean()
        judged = self._recipe.evaluation.every_updates > 0  # then the judge says which is the best
        best = not judged and mean is not None and (self._best is None or mean > self._best)
        if judged and self._best_judged is None and self._over(self._team.clock.steps):
            best = True  # it ended before the judge did: the last is the best we know
        team_state = self._team.state(hurried)
        self._writer.write_ledger(self._team.take_ledger())  # up to what is being saved
        hands = team_state["hands"].values()
        continues = len(hands) == self._team.size and all(hand["sampler"]["continues"] for hand in hands)
        about = {
            "identity": self._identity,
            "return_mean": mean,
            "finished": self._over(self._team.clock.steps),
            "environments": "continue mid-episode" if continues else "start new episodes",
            **_about_replay(team_state),
        }
        state = {"team": team_state, "session": self._state(mean if best else self._best)}
        step = self._team.clock.steps
        try:
            checkpoint.save(self._run.checkpoints, step, state, about, self._recipe.checkpoint.keep, best)
        except (OSError, SafetensorError) as error:  # a full disk, as Python and as safetensors say it
            reason = getattr(error, "strerror", None) or error
            self._display.warn(f"checkpoint at step {step:,} not saved ({reason}); the last good one stays, training goes on")
            self._try_again_at = time.monotonic() + RETRY_S
            return False
        self._saved_at = step
        self._best = mean if best else self._best
        return True

    def _state(self, best: float | None) -> dict[str, Any]:
        return {
            "window": list(self._window),
            "lengths": list(self._lengths),
            "episodes": self._episodes,
            "best": best,
            "seconds": self._seconds(),
            "reached": self._reached,
            "reported": list(self._reported),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._window.extend(state["window"])
        self._lengths.extend(state["lengths"])
        self._episodes = state["episodes"]
        self._best = state["best"]
        self._best_judged = checkpoint.judged_best(self._run.checkpoints)
        self._seconds_before = state["seconds"]
        self._reported = (state["reported"][0], state["reported"][1])
