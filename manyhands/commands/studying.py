"""plan, study, suite: what takes many runs, or foretells them."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path

from manyhands.commands.options import INTERRUPTED, Options, check_picture, explained, recipe_and_options, take_options
from manyhands.types import UsageError

PLAN_OPTIONS: Options = {
    "learners": ("1,2,4,8,16,32,64", "how many, with commas between them"),
    "learners_per_machine": (0, "0: all on one"),
    "cores": (0, "of a machine; 0: as many as here"),
    "gbit": (10.0, "gigabits a second between machines"),
    "latency_ms": (0.1, "between machines"),
    "steps": (5e7, "for which hours are predicted"),
    "measured": ("", "a file that --save wrote: measure nothing"),
    "save": ("", "a file for what was measured here"),
    "out": ("", "a .png, .svg or .pdf"),
    "recommend": (False, "try settings out here and say which is best"),
    "json": (False, "print one JSON object"),
}


def plan(arguments: list[str]) -> int:
    """Predict a recipe's speed with more learners or machines, from times that are measured here."""
    from manyhands import machine
    from manyhands.plan.measure import measure
    from manyhands.plan.model import Machines, Measured
    from manyhands.plan.show import check_plannable, draw, show
    from manyhands.plan.show import plan as predict

    recipe, own = recipe_and_options("plan", arguments, PLAN_OPTIONS)
    recipe = dataclasses.replace(recipe, env=recipe.env.resolved())
    if own["recommend"]:
        if own["measured"] or own["save"] or own["out"]:
            raise UsageError("--recommend tries things out here: it takes no --measured, --save or --out")
        from manyhands.plan import recommend as tried

        advice = tried.recommend(recipe, lambda line: print(line, file=sys.stderr))
        print(json.dumps(advice) if own["json"] else tried.show(advice))
        return 0
    try:
        learners = sorted({int(word) for word in own["learners"].split(",")})
    except ValueError:
        raise UsageError(f"--learners {own['learners']}: must be whole numbers with commas between them") from None
    if min(learners) < 1 or own["cores"] < 0 or own["learners_per_machine"] < 0 or own["gbit"] <= 0 or own["latency_ms"] < 0:
        raise UsageError("--learners must be at least 1, --gbit positive, the others not negative (--cores 0: as many as here)")
    if own["steps"] <= 0:
        raise UsageError(f"--steps {own['steps']:g}: must be positive")
    check_plannable(recipe)
    if own["save"] and (not Path(own["save"]).parent.is_dir() or Path(own["save"]).is_dir()):
        raise UsageError(f"--save {own['save']}: no such folder, or one itself")
    check_picture("--out", own["out"])
    known = Measured.load(Path(own["measured"])) if own["measured"] else None
    cores = own["cores"] or (known.cores if known else machine.cores())
    machines = Machines(cores, own["learners_per_machine"], own["gbit"] * 1e9 / 8, own["latency_ms"] * 1e-3)
    if known is not None:
        measured = known
        if measured.recipe != recipe.name:
            raise UsageError(f"--measured {own['measured']}: measured for {measured.recipe}, not for {recipe.name}")
    else:
        threads = {min(machines.threads(n), machine.cores()) for n in learners}
        if not own["json"]:
            print("measuring learners, and what meeting costs them; a minute or so", file=sys.stderr)
        measured = measure(recipe, threads)
    if own["save"]:
        measured.save(Path(own["save"]))
    result = predict(measured, recipe, learners, machines, own["steps"])
    if own["out"]:
        draw(result, Path(own["out"]))
    print(json.dumps(result) if own["json"] else show(result))
    return 0


STUDY_OPTIONS: Options = {
    "quick": (False, "small, on two cores, a minute or so"),
    "out": ("", "where JSON and picture go; studies/NAME if not given"),
    "quiet": (False, "print the paths only"),
}


def study(arguments: list[str]) -> int:
    """Answer a question that a paper asks: trains or measures variants, writes JSON and a picture."""
    from manyhands import machine
    from manyhands.studies.catalogue import STUDIES
    from manyhands.studies.study import Desk, save

    words, own = take_options(arguments, STUDY_OPTIONS)
    if not words or words[0] in ("--help", "-h"):
        print(f"usage: manyhands study NAME [OPTIONS]\n\n{explained(STUDY_OPTIONS)}\n")
        for name, about in STUDIES.items():
            print(f"  {name:<22} {about.about} ({about.paper})")
        return 0 if words else 2
    if words[0] not in STUDIES:
        import difflib

        near = difflib.get_close_matches(words[0], STUDIES, 1, 0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no study {words[0]!r}{hint} (there are: {', '.join(STUDIES)})")
    if len(words) > 1:
        raise UsageError(f"unexpected argument {words[1]!r}")
    chosen = STUDIES[words[0]]
    folder = Path(own["out"] or f"studies/{words[0]}{'-quick' * own['quick']}")
    folder.mkdir(parents=True, exist_ok=True)
    desk = Desk(folder, own["quick"], (lambda line: None) if own["quiet"] else lambda line: print(line, file=sys.stderr))
    for path in save(words[0], chosen, chosen.find(desk), desk, machine.describe()):
        print(path)
    return 0


SUITE_OPTIONS: Options = {
    "games": ("ba3c6", "names with commas between them, or a set of them"),
    "seeds": (1, "of each game"),
    "parallel": (1, "runs at once, which share the cores"),
    "address": ("", "of a Ray cluster to run on"),
    "out": ("", "where the runs go; suites/RECIPE if not given"),
    "protocol": ("null-op", "of the evaluation"),
    "episodes": (0, "of the evaluation; 0: the protocol's number"),
    "picture": ("", "a .png, .svg or .pdf of the table"),
    "json": (False, "print one JSON object"),
}


def suite(arguments: list[str]) -> int:
    """Train a recipe on many games and seeds, so many runs at once; evaluate each; one table in the end."""
    from rich.console import Console
    from rich.live import Live

    from manyhands import machine
    from manyhands import suite as suites
    from manyhands import table as tables
    from manyhands.envs.starts import Starts, default_path
    from manyhands.protocols import HUMAN, PLAIN, PROTOCOLS
    from manyhands.run import Run

    recipe, own = recipe_and_options("suite", arguments, SUITE_OPTIONS)
    words, _ = take_options(arguments, SUITE_OPTIONS)
    if own["seeds"] < 1 or own["parallel"] < 1 or own["episodes"] < 0:
        raise UsageError("--seeds and --parallel must be at least 1, --episodes not negative")
    if own["protocol"] not in PROTOCOLS or own["protocol"] == PLAIN:
        raise UsageError(f"--protocol {own['protocol']}: must be one of {', '.join(name for name in PROTOCOLS if name != PLAIN)}")
    games = suites.games_of(own["games"])
    check_picture("--picture", own["picture"])
    if own["protocol"] == HUMAN:
        for game in games:  # before anything is trained
            Starts.load(default_path(f"ALE/{game}-v5"))
    out = Path(own["out"] or f"suites/{recipe.name}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
    cluster = None
    if own["address"]:
        from manyhands.cluster.jobs import Cluster

        cluster = Cluster(own["address"], own["parallel"])
    share = cluster.share if cluster else max(machine.cores() // own["parallel"], 1)
    jobs = [suites.Job(game, seed, out / f"{game}-{seed}") for game in games for seed in range(own["seeds"])]
    given = suites.Plan(words[0], tuple(words[1:]), own["protocol"], own["episodes"], share, own["parallel"])
    console = Console(stderr=True)
    live = console.is_terminal and not own["json"]
    say = (lambda line: None) if live else lambda line: print(line, file=sys.stderr)
    queue = suites.Suite(jobs, given, say, cluster.launch if cluster else None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: every run saves what it has
    try:
        if live:
            with Live(console=console, refresh_per_second=2) as screen:
                queue.run(lambda now: screen.update(suites.progress(now)))
        else:
            queue.run(lambda now: None)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    finally:
        if cluster:
            cluster.close()
    done = [Run.open(job.directory) for job in jobs if job.state == suites.DONE]
    failed = [job for job in jobs if job.state == suites.FAILED]
    if done:
        result = tables.table(done, own["protocol"])
        if own["picture"]:
            tables.draw(result, Path(own["picture"]))
        if own["json"]:
            print(json.dumps(result))
        else:
            Console().print(tables.show(result))
            print(tables.show_together(result))
    for job in failed:
        print(f"manyhands: {job.name} failed: {job.reason} (see {out / job.name}.log)", file=sys.stderr)
    return 1 if failed else 0
