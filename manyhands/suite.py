"""One recipe on many games with many seeds: a queue of training runs, so many at once, each evaluated when it is finished.

Everything that is known is in the folder: OUT/GAME-SEED is a run directory. Stopped or killed, the same command goes on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands import machine
from manyhands.checkpoint import newest_is_finished, newest_step
from manyhands.metrics import read_metrics
from manyhands.scores import published
from manyhands.table import evaluations
from manyhands.types import UsageError

GAMES: dict[str, tuple[str, ...]] = {
    "all49": tuple(sorted({game for game, _ in published()})),
    "paac12": (
        "Amidar", "Centipede", "BeamRider", "Boxing", "Breakout", "MsPacman", "NameThisGame", "Pong", "Qbert", "Seaquest",
        "SpaceInvaders", "UpNDown",
    ),
    "ba3c6": ("Breakout", "BeamRider", "Boxing", "Pong", "Seaquest", "SpaceInvaders"),
}  # fmt: skip
WAITING, TRAINING, EVALUATING, DONE, FAILED = "waiting", "training", "evaluating", "done", "failed"
LOOK_S = 0.5
MOST_LOST = 3  # machines that a run may be lost with


def games_of(words: str) -> list[str]:
    """A list by its name, or games with commas between them."""
    from manyhands.envs.atari import game_of

    games = list(dict.fromkeys(GAMES.get(words) or [word.strip() for word in words.split(",") if word.strip()]))
    for game in games:
        game_of(f"ALE/{game}-v5")
    if not games:
        raise UsageError(f"--games {words}: {', '.join(GAMES)}, or games with commas between them")
    return games


@dataclass
class Job:
    game: str
    seed: int
    directory: Path
    state: str = WAITING
    reason: str = ""
    process: Any = field(default=None, repr=False)  # a Popen, or what a cluster has instead
    lost: int = 0  # machines
    gpu: str = ""

    @property
    def name(self) -> str:
        return f"{self.game}-{self.seed}"


@dataclass(frozen=True)
class Plan:
    """What each run gets. share: cores of one of them."""

    recipe: str
    options: tuple[str, ...]  # of training, as on the command line
    protocol: str
    episodes: int  # 0: the protocol's
    share: int
    parallel: int

    def training(self, job: Job) -> list[str]:
        """From the beginning, or from where it was."""
        if newest_step(job.directory / "checkpoints") >= 0:
            return ["resume", str(job.directory), "--quiet"]
        own = ["--threads", str(self.share), "--env.threads", str(self.share)] if self.parallel > 1 else []
        game = ["--env.id", f"ALE/{job.game}-v5", "--seed", str(job.seed)]
        return ["train", self.recipe, *own, *self.options, *game, "--run-dir", str(job.directory), "--quiet"]

    def evaluation(self, job: Job) -> list[str]:
        number = ["--episodes", str(self.episodes)] if self.episodes else []
        return ["eval", str(job.directory), "--protocol", self.protocol, *number, "--json"]

    def trained(self, job: Job) -> bool:
        return newest_is_finished(job.directory / "checkpoints")


class Suite:
    def __init__(
        self, jobs: Sequence[Job], plan: Plan, say: Callable[[str], None], launch: Callable[[list[str], Path], Any] | None = None
    ) -> None:
        """launch: starts a command elsewhere than here."""
        self.jobs, self._plan, self._say, self._launch = list(jobs), plan, say, launch
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._gpus = allowed.split(",") if allowed else [str(i) for i in range(machine.gpus())]

    def run(self, look: Callable[[Suite], None]) -> None:
        """Until every job is done or has failed. A Ctrl-C lets each save what it has."""
        try:
            while any(job.state not in (DONE, FAILED) for job in self.jobs):
                for job in self.jobs:
                    self._advance(job)
                look(self)
                time.sleep(LOOK_S)
        except BaseException:
            self._stop()
            raise

    def _advance(self, job: Job) -> None:
        if job.process is not None and job.process.poll() is None:
            return
        if job.process is not None and getattr(job.process, "lost", False):
            job.lost += 1
            job.state, job.process = (WAITING, None) if job.lost < MOST_LOST else (FAILED, None)
            job.reason = f"it was lost {job.lost} times" if job.state == FAILED else ""
            self._say(f"{job.name}: its machine is lost; {'enough' if job.state == FAILED else 'it goes on elsewhere'}")
        elif job.process is not None and job.process.returncode:
            self._fail(job)
        elif job.state in (WAITING, TRAINING, EVALUATING):
            busy = sum(other.process is not None for other in self.jobs if other is not job)
            self._go_on(job, free=job.process is not None or busy < self._plan.parallel)

    def _go_on(self, job: Job, free: bool) -> None:
        from manyhands.run import Run

        job.process = None
        if not self._plan.trained(job):
            if job.state == TRAINING:
                job.state, job.reason = FAILED, "it ended before its last step"
            elif free:
                if newest_step(job.directory / "checkpoints") < 0 and (job.directory / "recipe.toml").exists():
                    shutil.rmtree(job.directory)  # stopped before it had anything to save
                self._start(job, TRAINING, self._plan.training(job))
        elif not evaluations(Run.open(job.directory), self._plan.protocol):
            if job.state == EVALUATING:
                job.state, job.reason = FAILED, "its evaluation left nothing"
            elif free:
                self._start(job, EVALUATING, self._plan.evaluation(job))
        else:
            job.state = DONE
            self._say(f"{job.name}: done")

    def _start(self, job: Job, state: str, arguments: list[str]) -> None:
        self._say(f"{job.name}: {state}")
        command, job.state = [sys.executable, "-m", "manyhands", *arguments], state
        if self._launch is not None:
            job.process = self._launch(command, self._log(job))
            return
        environment = dict(os.environ)
        if len(self._gpus) > 1:
            used = Counter(other.gpu for other in self.jobs if other is not job and other.process is not None)
            environment["CUDA_VISIBLE_DEVICES"] = job.gpu = min(self._gpus, key=lambda gpu: used[gpu])
        with self._log(job).open("a") as log:
            # A group of its own: a terminal's Ctrl-C is for us to pass on, once.
            job.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, process_group=0, preexec_fn=machine.die_with_parent
            )

    def _log(self, job: Job) -> Path:
        return job.directory.parent / f"{job.name}.log"

    def _fail(self, job: Job) -> None:
        lines = self._log(job).read_text(errors="replace").strip().splitlines() if self._log(job).exists() else []
        told = getattr(job.process, "reason", "") or (lines[-1] if lines else "no word")
        job.state, job.reason, job.process = FAILED, told, None
        self._say(f"{job.name}: failed: {job.reason}")

    def _stop(self) -> None:
        running = [job.process for job in self.jobs if job.process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in running:
            process.wait()


def progress(suite: Suite) -> Any:
    """One table of all runs."""
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in (("run", "left"), ("state", "left"), ("steps", "right"), ("steps/s", "right"), ("return", "right")):
        grid.add_column(name, justify=side)  # type: ignore[arg-type]
    for job in suite.jobs:
        rows = read_metrics(job.directory)
        last = rows[-1] if rows else {}
        mean = last.get("return_mean")
        rate = f"{last['steps_per_s']:,.0f}" if last and job.state == TRAINING else ""
        told = "" if mean is None else f"{mean:,.1f}"
        grid.add_row(job.name, job.reason or job.state, f"{last.get('step', 0):,}", rate, told)
    return grid
