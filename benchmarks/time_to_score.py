"""Trains a recipe until the mean return of the last 100 training episodes reaches a score, and says how long that took: from
starting the command, with everything that has to be imported, built and captured.

    python benchmarks/time_to_score.py RECIPE --score 18 20 [--seeds 0 1 2] [--out folder] [--limit-s 590] [-- OPTIONS]

Writes curve, times, steps and seed of each run to OUT/RECIPE-SEED.json, and all curves that are there to OUT/RECIPE.png; the
run's folder is beside them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclass(frozen=True)
class Options:
    recipe: tyro.conf.Positional[str]
    """A recipe's name or file."""
    score: list[float]
    """The mean returns to reach; it stops at the highest."""
    seeds: list[int] = field(default_factory=lambda: [0])
    """One run each, one after the other."""
    limit_s: float = 1800.0
    """Give up after so many seconds, for each run."""
    out: Path = Path("time-to-score")
    """Where the results go."""
    episodes: int = 30
    """Of the evaluation afterwards (Atari: null-op starts); 0: none."""
    actions: Literal["sampled", "greedy"] = "sampled"
    """In that evaluation."""


def rows_of(run: Path) -> list[dict[str, Any]]:
    """What is written so far; the last line may not be whole yet."""
    found = []
    if (run / "metrics.jsonl").exists():
        for text in (run / "metrics.jsonl").read_text().splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                break
    return found


def train(options: Options, seed: int, more: list[str]) -> dict[str, Any]:
    name = Path(options.recipe).stem
    run = options.out / f"{name}-{seed}"
    if run.exists():
        sys.exit(f"{run} exists already: give another --out, or remove it")
    command = [sys.executable, "-m", "manyhands", "train", options.recipe, "--seed", str(seed), "--run-dir", str(run), "--quiet"]
    begin = time.time()
    errors = options.out / f"{name}-{seed}.err"  # not shown: it would say "interrupted" when enough was reached
    with errors.open("w") as file:
        more_words = ["--report.every-steps", "20000", "--report.tensorboard", "False", *more]
        process = subprocess.Popen([*command, *more_words], stderr=file)
    reached: dict[str, dict[str, float]] = {}
    first_report: float | None = None
    alive = True
    try:
        while alive and time.time() - begin < options.limit_s and len(reached) < len(options.score):
            time.sleep(0.25)
            alive = process.poll() is None  # asked first: what it wrote until then is looked at
            rows = rows_of(run)
            first_report = first_report or (round(time.time() - begin, 1) if rows else None)
            for row in rows[-5:]:
                for score in options.score:
                    full = row["episodes"] >= 100 and row["return_mean"] is not None
                    if str(score) not in reached and full and row["return_mean"] >= score:
                        reached[str(score)] = {"seconds": round(time.time() - begin, 1), "steps": row["step"]}
                        print(f"{name}, seed {seed}: {score:g} after {_told(reached[str(score)])}", flush=True)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait()
    if not alive and process.returncode:
        said = errors.read_text().strip().splitlines()
        sys.exit(f"{name}, seed {seed}: the training ended by itself, exit {process.returncode}: {said[-1] if said else ''}")
    rows = rows_of(run)
    curve = [[row["step"], row["time_s"], row["return_mean"]] for row in rows]
    result = {"recipe": options.recipe, "seed": seed, "options": more, "reached": reached, "curve": curve}
    result["started_to_first_report_s"] = first_report
    result["steps_per_s"] = rows[-1]["step"] / rows[-1]["time_s"] if rows else None
    if options.episodes and rows:
        arguments = [str(run), "--episodes", str(options.episodes), "--actions", options.actions, "--json"]
        done = subprocess.run([sys.executable, "-m", "manyhands", "eval", *arguments], capture_output=True, text=True)
        result["evaluation"] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-500:]
    (options.out / f"{name}-{seed}.json").write_text(json.dumps(result, indent=1))
    return result


def _told(moment: dict[str, float]) -> str:
    return f"{moment['seconds']:g} s and {moment['steps']:,} steps"


def draw(options: Options) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    name = Path(options.recipe).stem
    curves = {}
    for path in sorted(p for p in options.out.glob(f"{name}-*.json") if p.stem.removeprefix(f"{name}-").isdigit()):
        result = json.loads(path.read_text())
        rows = [(seconds, mean) for _, seconds, mean in result["curve"] if mean is not None]
        if rows:
            curves[f"seed {result['seed']}"] = zip(*rows, strict=True)
    if not curves:
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for label, curve in curves.items():
        axes.plot(*curve, label=label)
    for score in options.score:
        axes.axhline(score, color="tab:gray", linewidth=0.8, linestyle=":")
    axes.set(xlabel="seconds of training", ylabel="return, mean of the last 100 games", title=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.out / f"{name}.png", dpi=110)


def main() -> int:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    options = tyro.cli(Options, args=words[:at], description=f"{__doc__}")
    if not options.score:
        sys.exit("--score: give at least one")
    options.out.mkdir(parents=True, exist_ok=True)
    missed = False
    for seed in options.seeds:
        result = train(options, seed, words[at + 1 :])
        reached, evaluation = result["reached"], result.get("evaluation")
        missed |= len(reached) < len(options.score)
        line = ", ".join(f"{float(score):g} after {_told(moment)}" for score, moment in reached.items()) or "nothing reached"
        if isinstance(evaluation, dict):
            line += f"; evaluated: {evaluation['mean']:.2f}"
        elif evaluation:
            line += f"; the evaluation failed: {evaluation}"
        print(f"{options.recipe}, seed {seed}: {line}", flush=True)
    draw(options)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
