"""train, resume, bench, recipes."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.commands.options import INTERRUPTED, Options, RunDirectory, check_picture, options_of, recipe_and_options
from manyhands.types import UsageError

TRAIN_OPTIONS: Options = {
    "run_dir": ("", "where everything goes; runs/RECIPE-SEED if not given"),
    "dry_run": (False, "print the resolved recipe, the network's size and the memory needed, and start nothing"),
    "quiet": (False, "print nothing but warnings"),
    "json": (False, "print one JSON object"),
}


def train(arguments: list[str]) -> int:
    """Train a recipe into a run directory."""
    from manyhands import run as runs
    from manyhands.build import Custom
    from manyhands.config import to_toml

    recipe, own = recipe_and_options("train", arguments, TRAIN_OPTIONS)
    recipe = dataclasses.replace(recipe, env=recipe.env.resolved())
    if own["dry_run"]:
        from manyhands.build import describe, doubts
        from manyhands.config import to_dict

        about = describe(recipe, Custom())
        if own["json"]:
            print(json.dumps({"recipe": to_dict(recipe), **about}))
        else:
            print(to_toml(recipe))
            print("\n".join([_show_plan(about), *(f"# doubtful: {doubt}" for doubt in doubts(recipe))]))
        return 0
    directory = Path(own["run_dir"] or f"runs/{recipe.name}-{recipe.seed}")
    run = runs.start(recipe, directory, quiet=own["quiet"] or own["json"])
    if own["json"]:
        print(json.dumps({"run_dir": str(run.directory), "steps": run.steps, "interrupted": run.interrupted}))
    return _finished(run, own["quiet"] or own["json"])


def _show_plan(about: dict[str, Any]) -> str:
    mib = {key: about.get(f"{key}_bytes", 0) / 2**20 for key in ("rollout", "parameter", "input", "replay")}
    per = "rollout" if "updates_per_rollout" in about else "step"
    each = "" if about["learners"] == 1 else f"each of {about['learners']} learners: "
    apart, saved = about.get("replay_servers", 0), about.get("checkpoint_replays", 0) * mib["replay"]
    kept = mib.pop("replay") if apart else mib["replay"]
    replay = f", replay {kept:,.0f} on {about['replay_device']}" if kept and not apart else ""
    shape = "×".join(map(str, about["observation"]))
    return (
        f"# network: {about['parameters']:,} parameters, from {shape} to {about['actions']} actions, on {about['device']}\n"
        f"# updates: {each}{about[f'updates_per_{per}']:g} per {per}, {about['samples_per_update']:,} samples each\n"
        f"# memory: {each}about {sum(mib.values()):,.0f} MiB (rollouts {mib['rollout']:,.0f}, parameters and optimiser "
        f"{mib['parameter']:,.0f}, network inputs {mib['input']:,.0f}{replay}), beside activations and the simulators"
        + (f"\n# replay: {apart} servers with about {kept:,.0f} MiB each" if apart else "")
        + (f"\n# disk: up to {saved:,.0f} MiB for the replays of checkpoints" if saved else "")
    )


@dataclass(frozen=True)
class ResumeOptions:
    run: RunDirectory
    """A run directory."""
    total_steps: int | None = None
    """Go on to this many steps instead of the recipe's."""
    limit_minutes: float | None = None
    """Go on for this many minutes of training in all instead of the recipe's; 0: no limit."""
    stop_at_return: float | None = None
    """Go on until the last training games have this mean instead of the recipe's; inf: whatever they have."""
    device: str | None = None
    """Another device than the recipe's."""
    quiet: bool = False
    """Print nothing but warnings."""


def resume(arguments: list[str]) -> int:
    """Continue a run from its newest checkpoint."""
    from manyhands import run as runs

    options = options_of(ResumeOptions, "resume", arguments, resume.__doc__ or "")
    run = runs.Run.open(options.run)
    limits = (options.limit_minutes, options.stop_at_return)
    return _finished(runs.resume(run, options.total_steps, options.quiet, options.device, *limits), options.quiet)


def _finished(run: Any, quiet: bool) -> int:
    if not quiet:
        shown = "no finished episode yet" if run.return_mean is None else f"return {run.return_mean:.2f}"
        word = "stopped" if run.interrupted else "done"
        print(f"{word}: {run.steps:,} steps, {shown}; everything is in {run.directory}", file=sys.stderr)
    if run.interrupted:
        if not quiet:
            print(f"continue with: manyhands resume {run.directory}", file=sys.stderr)
        return INTERRUPTED
    return 0


BENCH_OPTIONS: Options = {
    "seconds": (15.0, "of training, in three turns of at least one rollout"),
    "picture": ("", "a .png, .svg or .pdf file of where the time goes"),
    "json": (False, "print one JSON object"),
}


def bench(arguments: list[str]) -> int:
    """Measure a recipe: steps/s, the share of simulator-only speed, and where the time goes."""
    from manyhands import bench as benches
    from manyhands.build import Custom

    recipe, own = recipe_and_options("bench", arguments, BENCH_OPTIONS)
    check_picture("--picture", own["picture"])
    if not 0 < own["seconds"] < float("inf"):
        raise UsageError(f"--seconds {own['seconds']:g}: must be a positive number")
    result = benches.bench(recipe, Custom(), own["seconds"], lambda line: print(line, file=sys.stderr))
    if own["picture"]:
        from manyhands.plot import bars

        bars(result, Path(own["picture"]))
    print(json.dumps(result) if own["json"] else benches.show(result))
    return 0


def recipes(arguments: list[str]) -> int:
    """List the recipes."""
    from rich.console import Console
    from rich.table import Table

    from manyhands.config import load_recipe, recipe_names

    if arguments and arguments != ["--json"]:
        if arguments[0] in ("--help", "-h"):
            print("usage: manyhands recipes [--json]")
            return 0
        raise UsageError(f"unexpected argument {arguments[0]!r}: manyhands recipes takes only --json")
    loaded = [load_recipe(name) for name in recipe_names()]
    if arguments:
        print(json.dumps([{"name": r.name, "description": r.description, "total_steps": r.total_steps} for r in loaded]))
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", style="bold", no_wrap=True)
    table.add_column("what, where, how long")
    for recipe in loaded:
        table.add_row(recipe.name, recipe.description)
    Console().print(table)
    return 0
