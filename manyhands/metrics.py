"""Where a run's numbers go: metrics.jsonl, TensorBoard, Weights & Biases, and the terminal."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from manyhands.config import Recipe, to_dict

FILE = "metrics.jsonl"
LEDGER = "ledger.jsonl"
QUIET_S = 20.0  # a plain log says something at least this often


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete line; a last one cut short by a kill is left out."""
    rows = []
    try:
        lines = (run_dir / FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def _cut_torn_line(path: Path) -> None:
    """What a killed process had begun to write."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


class MetricsWriter:
    """Appends reports. On a resume, lines from after the checkpoint are dropped first: those steps will be taken again."""

    def __init__(self, run_dir: Path, recipe: Recipe, from_step: int | None, warn: Any) -> None:
        self._warn = warn
        self._path = run_dir / FILE
        if from_step is not None:
            rows = [row for row in read_metrics(run_dir) if row["step"] <= from_step]
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
            temporary.replace(self._path)
            _cut_torn_line(run_dir / LEDGER)
        self._file = self._path.open("a")
        self._board: Any = None
        if recipe.report.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if from_step is None else from_step + 1
            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)
        self._wandb: Any = None
        if recipe.report.wandb:
            self._wandb = start_wandb(run_dir, recipe)

    def write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            if self._board is not None:
                for name, value in row.items():
                    if name != "step" and isinstance(value, int | float):
                        self._board.add_scalar(name, value, row["step"])
        except OSError as error:
            self._warn(f"could not write metrics ({error.strerror}); training goes on")
        if self._wandb is not None:
            self._wandb.log(row, step=row["step"])

    def write_ledger(self, rows: list[dict[str, Any]]) -> None:
        """What became of gradients, where a run keeps account of each."""
        if not rows:
            return
        try:
            with (self._path.parent / LEDGER).open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            self._warn(f"could not write {LEDGER} ({error.strerror}); training goes on")

    def close(self) -> None:
        for part in (self._file, self._board):
            try:
                if part is not None:
                    part.close()
            except OSError as error:
                self._warn(f"could not write the last metrics ({error.strerror})")
        if self._wandb is not None:
            self._wandb.finish()


def start_wandb(run_dir: Path, recipe: Recipe) -> Any:
    import wandb

    return wandb.init(project="manyhands", name=run_dir.name, dir=run_dir, config=to_dict(recipe))


class Display:
    """A live line on a terminal; otherwise one plain line per report, or nothing when quiet."""

    def __init__(self, total_steps: int, quiet: bool = False) -> None:
        self._total = total_steps
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False)
        self._live = not quiet and self._console.is_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._rate = _Rate()
        self._spoke_at = time.monotonic()
        if self._live:
            self._progress = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=False,
            )
            self._task = self._progress.add_task("", total=total_steps, text="starting")
            self._progress.start()

    def say(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, markup=False, soft_wrap=True)

    def wait_for(self, what: str) -> None:
        """What comes before there are steps to show."""
        if self._progress is not None:
            self._progress.update(self._task, text=what)
        else:
            self.say(what)

    def warn(self, line: str) -> None:
        """Also when quiet."""
        self._console.print(f"warning: {line}", markup=False, soft_wrap=True)

    def advance(self, step: int, return_mean: float | None) -> None:
        rate = self._rate.update(step)
        if not self._live and time.monotonic() - self._spoke_at > QUIET_S:
            self._line(step, rate, return_mean)
        if self._progress is not None:
            shown = "–" if return_mean is None else f"{return_mean:.2f}"
            left = format_seconds((self._total - step) / rate) if rate else "–"
            text = f"{step:,}/{self._total:,} steps  {_rate(rate)}  return {shown}  {left} left"
            self._progress.update(self._task, completed=min(step, self._total), text=text)

    def report(self, row: dict[str, Any]) -> None:
        if self._live or self._quiet:
            return
        self._line(row["step"], row["steps_per_s"], row["return_mean"])

    def _line(self, step: int, rate: float, return_mean: float | None) -> None:
        if self._quiet:
            return
        self._spoke_at = time.monotonic()
        shown = "–" if return_mean is None else f"{return_mean:.2f}"
        smooth = self._rate.value() or rate
        left = format_seconds(max(self._total - step, 0) / smooth) if smooth else "–"
        print(f"{step:>12,} steps  {_rate(rate):>10}  return {shown:>8}  {left:>8} left", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Rate:
    """Steps per second over the last twenty seconds or so."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, int]] = []

    def update(self, step: int) -> float:
        now = time.monotonic()
        self._marks.append((now, step))
        while len(self._marks) > 2 and now - self._marks[0][0] > 20:
            self._marks.pop(0)
        return self.value()

    def value(self) -> float:
        if not self._marks:
            return 0.0
        (t0, s0), (t1, s1) = self._marks[0], self._marks[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 else 0.0


def format_seconds(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _rate(steps_per_s: float) -> str:
    """Before the second report nothing is known."""
    return f"{steps_per_s:,.0f}/s" if steps_per_s else "–"
