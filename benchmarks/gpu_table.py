"""One table of the algorithms of Accelerated Methods on Pong and Breakout: steps/s, how close that is to the simulators alone,
and the paper's own figures beside it.

    python benchmarks/gpu_table.py [--json] [--seconds 15] [--games Pong Breakout] [--only PPO A2C] [--out table.md]

Each row is one `manyhands bench` in a process of its own, of the recipe and with the options in ROWS below: PPO and APPO have the
paper's `nips` network, replays begin to learn after 5 000 steps, a lost life ends returns on Breakout and for Q-networks.
A3C and APPO have several learners on one GPU: start NVIDIA's Multi-Process Service first (nvidia-cuda-mps-control -d); a row
says whether it was there.
"""

from __future__ import annotations

import manyhands  # noqa: F401 – before torch: it chooses the OpenMP runtime, as in training

# isort: split
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from script import changed, run

from manyhands import machine
from manyhands.types import UsageError

STEPS = 50_000_000
WARM = ["--memory.warmup-steps", "5000"]  # updates begin early: the rate with them is what is asked for
# name -> (recipe, changes, the paper's hours for 50 M steps with 1 and 8 GPUs)
ROWS: dict[str, tuple[str, list[str], float | None, float]] = {
    "A2C": ("pong-a2c", [], 3.8, 0.59),
    "A2C, 128 simulators": ("pong-a2c", ["--sampler.num-envs", "128"], 3.8, 0.59),
    "A3C": ("pong-a3c-units", [], None, 0.65),
    "PPO": ("pong-ppo", ["--network.torso", "nips"], 4.4, 1.1),
    "PPO, overlapped": ("pong-ppo", ["--network.torso", "nips", "--memory.overlap", "True"], 4.4, 1.1),
    "APPO": ("pong-appo", ["--network.torso", "nips"], None, 0.71),
    "DQN-512": ("pong-dqn-512", WARM, 8.3, 2.6),
    "Categorical-2048": ("pong-categorical-2048", WARM, 10.7, 1.8),
    "ε-Rainbow-512": ("pong-rainbow-512", WARM, 14.1, 6.4),
}


@dataclass(frozen=True)
class Options:
    json: bool = False
    """Print one JSON object."""
    seconds: float = 15.0
    """Of training in each row."""
    games: list[str] = field(default_factory=lambda: ["Pong", "Breakout"])
    """Which games."""
    only: list[str] = field(default_factory=list)
    """Some of the rows, by name (upper and lower case and ε do not matter): A2C, "A2C, 128 simulators", A3C, PPO,
    "PPO, overlapped", APPO, DQN-512, Categorical-2048, Rainbow-512."""
    more: list[str] = field(default_factory=list)
    """Further options of every bench, e.g. env.workers=8."""
    out: Path | None = None
    """Also write the table there, as it grows."""


def measure(name: str, game: str, options: Options) -> dict[str, Any]:
    recipe, changes, _, _ = ROWS[name]
    more = [word for option in options.more for word in (f"--{option.partition('=')[0]}", option.partition("=")[2])]
    life = ["--env.life-loss", str(game == "Breakout" or "dqn" in recipe or "rainbow" in recipe or "categorical" in recipe)]
    arguments = [recipe, "--env.id", f"ALE/{game}-v5", *life, *changes, *more, "--seconds", str(options.seconds), "--json"]
    done = subprocess.run([sys.executable, "-m", "manyhands", "bench", *arguments], capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def line(name: str, game: str, row: dict[str, Any]) -> str:
    _, _, one, eight = ROWS[name]
    if "error" in row:
        return f"| {name} | {game} | {row['error']} | | | | |"
    rate = row["steps_per_s"]
    paper = f"{_rate(one) if one else '–'} / {_rate(eight)}"
    hours = f"{STEPS / rate / 3600:.2f} ({one or '–'} / {eight})"
    mps = " (MPS)" if row["learners"] > 1 and row["machine"].get("mps") else ""
    return (
        f"| {name}{mps} | {game} | {rate:,.0f} | "
        f"{row['fraction_of_simulator']:.0%} of {row['simulator_only_steps_per_s']:,.0f} | "
        f"{row['sampling_fraction_of_simulator']:.0%} | {paper} | {hours} |"
    )


def _rate(hours: float) -> str:
    return f"{STEPS / hours / 3600:,.0f}"


HEAD = (
    "| | game | steps/s | of the simulators alone | sampling only | the paper's steps/s, 1 / 8 GPUs | "
    "hours for 50 M steps (the paper's) |\n|---|---|---|---|---|---|---|"
)


def chosen(names: list[str]) -> list[str]:
    plain = {row.lower().removeprefix("ε-"): row for row in ROWS}
    wrong = [name for name in names if name.lower().removeprefix("ε-") not in plain]
    if wrong:
        raise UsageError(f"--only {wrong[0]}: no such row (there are: {'; '.join(ROWS)})")
    return [plain[name.lower().removeprefix("ε-")] for name in names] or list(ROWS)


def main(options: Options) -> int:
    rows = chosen(options.only)
    if not 0 < options.seconds < math.inf:
        raise UsageError(f"--seconds {options.seconds:g}: must be a positive number")
    for game in options.games:  # before an hour is spent
        for name in rows:
            changed(ROWS[name][0], [f"env.id=ALE/{game}-v5", *options.more]).env.check()
    if not torch.cuda.is_available():
        print("there is no GPU: these are a CPU's figures", file=sys.stderr)
    if options.out and not options.out.parent.is_dir():
        raise UsageError(f"--out {options.out}: no folder {options.out.parent}")
    results: dict[str, dict[str, Any]] = {}
    lines = [HEAD]
    for game in options.games:
        for name in rows:
            print(f"{name} on {game}", file=sys.stderr)
            results.setdefault(game, {})[name] = row = measure(name, game, options)
            lines.append(line(name, game, row))
            if options.out:
                options.out.write_text("\n".join(lines) + "\n")
            if not options.json:
                print("\n".join(lines[-2:] if len(lines) == 2 else lines[-1:]), flush=True)
    m = machine.describe()
    lines.append(f"\n(on {m['cpu']}, {m['cores']} cores, {m['gpu'] or 'no GPU'}, torch {m['torch']})")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    print(json.dumps({**results, "machine": m}) if options.json else lines[-1])
    return int(any("error" in row for of_game in results.values() for row in of_game.values()))


if __name__ == "__main__":
    run(main, Options, __doc__)
