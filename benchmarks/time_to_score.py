"""Trains a recipe until the mean return of the last 100 training episodes reaches a score, and says how long that took: from
starting the command, with everything that has to be imported, built and captured.

    python benchmarks/time_to_score.py RECIPE --score 18 20 [--seeds 0 1 2] [--out folder] [--limit-s 590] [-- OPTIONS]

Writes curve, times, steps and seed of each run to OUT/RECIPE-SEED.json, and all curves that are there to OUT/RECIPE.png, both
also after Ctrl-C; the run's folder is beside them. Seconds count from the command, in the curves too.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from script import run

from manyhands import machine
from manyhands.config import load_recipe
from manyhands.flags import override
from manyhands.types import UsageError


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


TELL_S = 30.0  # how often it says where it is
OURS = ("--seed", "--run-dir", "--json", "--dry-run")  # what it tells train itself, or could not do with


def check(options: Options, more: list[str]) -> None:
    if not options.score or not all(math.isfinite(score) for score in options.score):
        raise UsageError("--score: give numbers")
    if not 0 < options.limit_s < math.inf:
        raise UsageError(f"--limit-s {options.limit_s:g}: must be a positive number")
    if options.episodes < 0:
        raise UsageError(f"--episodes {options.episodes}: must not be negative")
    if len(set(options.seeds)) < len(options.seeds) or not options.seeds or min(options.seeds) < 0:
        raise UsageError(f"--seeds {' '.join(map(str, options.seeds))}: give different ones, none negative")
    for word in more:
        if word.partition("=")[0] in OURS:
            raise UsageError(f"{word}: not behind --; seeds are given by --seeds, folders by --out")
    override(load_recipe(options.recipe), more, options.recipe)
    taken = [place for seed in options.seeds if (place := folder(options, seed)).exists()]
    if taken:
        raise UsageError(f"{taken[0]} exists already: give another --out, or remove it")


def folder(options: Options, seed: int) -> Path:
    return options.out / f"{Path(options.recipe).stem}-{seed}"


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
    run = folder(options, seed)
    name = f"{Path(options.recipe).stem}, seed {seed}"
    command = [sys.executable, "-m", "manyhands", "train", options.recipe, "--seed", str(seed), "--run-dir", str(run), "--quiet"]
    begin = told = time.time()
    errors = run.with_name(f"{run.name}.err")  # not shown: it would say "interrupted" when enough was reached
    with errors.open("w") as file:
        more_words = ["--report.every-steps", "20000", "--report.tensorboard", "False", *more]
        process = subprocess.Popen([*command, *more_words], stderr=file, start_new_session=True)  # Ctrl-C reaches it through us
    reached: dict[str, dict[str, float]] = {}
    starting: float | None = None  # from the command to the clock of the run
    alive, interrupted = True, False
    try:
        while alive and time.time() - begin < options.limit_s and len(reached) < len(options.score):
            time.sleep(0.25)
            alive = process.poll() is None  # asked first: what it wrote until then is looked at
            rows = rows_of(run)
            if rows and starting is None:
                starting = max(time.time() - begin - rows[0]["time_s"], 0.0)
            for row in rows[-5:]:
                for score in options.score:
                    full = row["episodes"] >= 100 and row["return_mean"] is not None
                    if str(score) not in reached and full and row["return_mean"] >= score:
                        reached[str(score)] = {"seconds": round(time.time() - begin, 1), "steps": row["step"]}
                        print(f"{name}: {score:g} after {_told(reached[str(score)])}", flush=True)
            if time.time() - told > TELL_S:
                told = time.time()
                where = f"{rows[-1]['step']:,} steps, {_mean(rows[-1]['return_mean'])}" if rows else "no report yet"
                print(f"{name}: {where} after {told - begin:.0f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stop(process)
    if not alive and process.returncode:
        said = errors.read_text().strip().splitlines()
        sys.exit(f"{name}: the training ended by itself, exit {process.returncode}: {said[-1] if said else ''}")
    rows = rows_of(run)
    means = [row["return_mean"] for row in rows if row["return_mean"] is not None and row["episodes"] >= 100]
    result = {
        "recipe": options.recipe,
        "seed": seed,
        "options": more,
        "interrupted": interrupted,
        "reached": reached,
        "best": max(means, default=None),
        "curve": [[row["step"], round((starting or 0.0) + row["time_s"], 3), row["return_mean"]] for row in rows],
        "started_after_s": starting and round(starting, 1),
        "steps_per_s": round(rows[-1]["step"] / rows[-1]["time_s"], 1) if rows else None,
        "machine": machine.describe(),
    }
    if options.episodes and rows and not interrupted:
        arguments = [str(run), "--episodes", str(options.episodes), "--actions", options.actions, "--json"]
        done = subprocess.run([sys.executable, "-m", "manyhands", "eval", *arguments], capture_output=True, text=True)
        result["evaluation"] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-500:]
    run.with_name(f"{run.name}.json").write_text(json.dumps(result, indent=1))
    return result


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C again is one for it, too."""
    while process.poll() is None:
        try:
            process.send_signal(signal.SIGINT)
            process.wait()
        except KeyboardInterrupt:
            continue


def _mean(value: float | None) -> str:
    return "no game over yet" if value is None else f"mean return {value:.2f}"


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
            label = " ".join([f"seed {result['seed']}", *result["options"]])
            curves[label] = zip(*rows, strict=True)
    if not curves:
        return
    figure, axes = plt.subplots(figsize=(7, 4))
    for label, curve in curves.items():
        axes.plot(*curve, label=label, marker=".", markersize=3)
    for score in options.score:
        axes.axhline(score, color="tab:gray", linewidth=0.8, linestyle=":")
    axes.set(xlabel="seconds from starting the command", ylabel="return, mean of the last 100 games", title=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.out / f"{name}.png", dpi=110)


def summary(options: Options, result: dict[str, Any]) -> str:
    parts = ["interrupted"] if result["interrupted"] else []
    for score in options.score:
        moment = result["reached"].get(str(score))
        parts.append(f"{score:g} after {_told(moment)}" if moment else f"{score:g} not reached")
    if len(result["reached"]) < len(options.score):
        best = result["best"]
        parts.append("fewer than 100 games" if best is None else f"the best mean of 100 games was {best:.2f}")
    evaluation = result.get("evaluation")
    if isinstance(evaluation, dict):
        parts.append(f"evaluated: {evaluation['mean']:.2f}")
    elif evaluation:
        parts.append(f"the evaluation failed: {evaluation}")
    return f"{options.recipe}, seed {result['seed']}: {'; '.join(parts)}"


def main(options: Options, more: list[str]) -> int:
    check(options, more)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    options.out.mkdir(parents=True, exist_ok=True)
    missed = False
    for seed in options.seeds:
        result = train(options, seed, more)
        missed |= len(result["reached"]) < len(options.score) or isinstance(result.get("evaluation"), str)
        print(summary(options, result), flush=True)
        draw(options)
        if result["interrupted"]:
            return 130
    return int(missed)


if __name__ == "__main__":
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    run(partial(main, more=words[at + 1 :]), Options, __doc__, words[:at])
