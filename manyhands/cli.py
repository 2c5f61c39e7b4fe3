"""The command line. Wrong input: one line, exit 2, nothing started. Exit 0 only if the work was done."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from manyhands.types import RunError, UsageError

INTERRUPTED = 130


def _program(command: str) -> str:
    return f"manyhands {command}"


# -- commands that take a recipe ---------------------------------------------------------------------------------------


def _recipe_and_options(command: str, arguments: list[str], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """RECIPE, overrides of its keys, and the command's own options, which are taken out first."""
    from manyhands.config import load_recipe, override, recipe_names

    words, own = _take_options(arguments, options)
    shown = ", ".join(f"--{name.replace('_', '-')}" for name in options)
    if not words or words[0].startswith("-"):
        usage = (
            f"usage: {_program(command)} RECIPE [--section.key value ...]   (and: {shown})\n"
            f"recipes: {', '.join(recipe_names())}\n"
            f"'{_program(command)} RECIPE --help' lists every key of a recipe"
        )
        if words and words[0] in ("--help", "-h"):
            print(usage)
            sys.exit(0)
        raise UsageError(usage.splitlines()[0])
    return override(load_recipe(words[0]), words[1:], f"{_program(command)} {words[0]}", shown), own


def _take_options(arguments: list[str], options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Options with a bool default are switches; the others take a value of their default's type."""
    values = dict(options)
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, attached = word.partition("=")
        name = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        if name not in options:
            rest.append(word)
        elif isinstance(options[name], bool):
            if attached not in ("", "true", "false"):
                raise UsageError(f"{word}: {flag} is a switch, it takes no value")
            values[name] = attached != "false"
        else:
            value = attached if equals else next(words, None)
            if value is None:
                raise UsageError(f"{flag} needs a value")
            try:
                values[name] = type(options[name])(value)
            except ValueError:
                raise UsageError(f"{flag} {value}: must be a number") from None
    return rest, values


def train(arguments: list[str]) -> int:
    """Train a recipe into a run directory."""
    from manyhands import run as runs
    from manyhands.build import Custom
    from manyhands.config import to_toml

    recipe, own = _recipe_and_options("train", arguments, {"run_dir": "", "dry_run": False, "quiet": False, "json": False})
    recipe = dataclasses.replace(recipe, env=recipe.env.resolved())
    if own["dry_run"]:
        from manyhands.build import describe
        from manyhands.config import to_dict

        about = describe(recipe, Custom())
        if own["json"]:
            print(json.dumps({"recipe": to_dict(recipe), **about}))
        else:
            print(to_toml(recipe))
            print(_show_plan(about))
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
    replay = f", replay {mib['replay']:,.0f} on {about['replay_device']}" if mib["replay"] else ""
    shape = "×".join(map(str, about["observation"]))
    return (
        f"# network: {about['parameters']:,} parameters, from {shape} to {about['actions']} actions, on {about['device']}\n"
        f"# updates: {each}{about[f'updates_per_{per}']:g} per {per}, {about['samples_per_update']:,} samples each\n"
        f"# memory: {each}about {sum(mib.values()):,.0f} MiB (rollouts {mib['rollout']:,.0f}, parameters and optimiser "
        f"{mib['parameter']:,.0f}, network inputs {mib['input']:,.0f}{replay}), beside activations and the simulators"
    )


def _finished(run: Any, quiet: bool) -> int:
    rows = run.metrics()
    if not quiet:
        mean = rows[-1].get("return_mean") if rows else None
        shown = "no finished episode yet" if mean is None else f"return {mean:.2f}"
        word = "stopped" if run.interrupted else "done"
        print(f"{word}: {run.steps:,} steps, {shown}; everything is in {run.directory}", file=sys.stderr)
    if run.interrupted:
        if not quiet:
            print(f"continue with: manyhands resume {run.directory}", file=sys.stderr)
        return INTERRUPTED
    return 0


def bench(arguments: list[str]) -> int:
    """Measure a recipe: steps/s, the share of simulator-only speed, and where the time goes."""
    from manyhands import bench as benches
    from manyhands.build import Custom

    recipe, own = _recipe_and_options("bench", arguments, {"seconds": 15.0, "json": False, "picture": ""})
    _check_picture("--picture", own["picture"])
    result = benches.bench(recipe, Custom(), own["seconds"])
    if own["picture"]:
        from manyhands.plot import bars

        bars(result, Path(own["picture"]))
    print(json.dumps(result) if own["json"] else benches.show(result))
    return 0


PLAN_OPTIONS: dict[str, Any] = {
    "learners": "1,2,4,8,16,32,64", "cores": 0, "learners_per_machine": 0, "gbit": 10.0, "latency_ms": 0.1, "steps": 5e7,
    "measured": "", "save": "", "out": "", "recommend": False, "json": False,
}  # fmt: skip


def plan(arguments: list[str]) -> int:
    """Predict a recipe's speed with more learners or machines, from times that are measured here."""
    from manyhands import machine
    from manyhands.plan.measure import measure
    from manyhands.plan.model import Machines, Measured
    from manyhands.plan.show import check_plannable, draw, show
    from manyhands.plan.show import plan as predict

    recipe, own = _recipe_and_options("plan", arguments, PLAN_OPTIONS)
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
    _check_picture("--out", own["out"])
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
            print("measuring learners, and what meeting costs them; half a minute or so", file=sys.stderr)
        measured = measure(recipe, threads)
    if own["save"]:
        measured.save(Path(own["save"]))
    result = predict(measured, recipe, learners, machines, own["steps"])
    if own["out"]:
        draw(result, Path(own["out"]))
    print(json.dumps(result) if own["json"] else show(result))
    return 0


def study(arguments: list[str]) -> int:
    """Answer a question that a paper asks: trains or measures variants, writes JSON and a picture."""
    from manyhands import machine
    from manyhands.studies.catalogue import STUDIES
    from manyhands.studies.study import Desk, save

    words, own = _take_options(arguments, {"quick": False, "out": "", "quiet": False})
    if not words or words[0] in ("--help", "-h"):
        print("usage: manyhands study NAME [--quick] [--out FOLDER] [--quiet]   (--quick: small, on two cores, a minute or so)")
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


def _check_picture(option: str, path: str) -> None:
    """Before the work whose picture it is."""
    if path and Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"{option} {path}: the name must end in .png, .svg or .pdf")
    if path and not Path(path).parent.is_dir():
        raise UsageError(f"{option} {path}: no folder {Path(path).parent}")


SUITE_OPTIONS: dict[str, Any] = {
    "games": "ba3c6", "seeds": 1, "parallel": 1, "address": "", "out": "", "protocol": "null-op", "episodes": 0, "picture": "",
    "json": False,
}  # fmt: skip


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

    recipe, own = _recipe_and_options("suite", arguments, SUITE_OPTIONS)
    words, _ = _take_options(arguments, SUITE_OPTIONS)
    if own["seeds"] < 1 or own["parallel"] < 1 or own["episodes"] < 0:
        raise UsageError("--seeds and --parallel must be at least 1, --episodes not negative")
    if own["protocol"] not in PROTOCOLS or own["protocol"] == PLAIN:
        raise UsageError(f"--protocol {own['protocol']}: must be one of {', '.join(name for name in PROTOCOLS if name != PLAIN)}")
    games = suites.games_of(own["games"])
    _check_picture("--picture", own["picture"])
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


# -- commands that take a run directory ----------------------------------------------------------------------------------

RunDirectory = Annotated[Path, tyro.conf.Positional]
ProtocolName = Literal["null-op", "human-starts", "sticky", "ba3c", "accelerated", "plain"]


@dataclass(frozen=True)
class ResumeOptions:
    run: RunDirectory
    """A run directory."""
    total_steps: int | None = None
    """Go on to this many steps instead of the recipe's."""
    limit_minutes: float | None = None
    """Go on for this many minutes of training in all instead of the recipe's; 0: no limit."""
    device: str | None = None
    """Another device than the recipe's."""
    quiet: bool = False
    """Print nothing but warnings."""


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


def _options(cls: Any, command: str, arguments: list[str], about: str) -> Any:
    from manyhands.config import check_flags, normalised, parse

    flags = {"--" + f.name.replace("_", "-"): f.type for f in dataclasses.fields(cls)} | {"--help": None, "-h": None}
    # --json and --quiet are switches: FlagConversionOff (which recipes need) would ask for a value.
    switches = {"--" + f.name for f in dataclasses.fields(cls) if f.type == "bool"}
    words: list[str] = []
    for word in normalised(arguments):
        if word.startswith("--") and word not in flags:
            check_flags([word], flags)
        words += [word, "True"] if word in switches else [word]
    if not words:
        asked = dataclasses.fields(cls)[0].name.upper()
        raise UsageError(f"usage: {_program(command)} {asked}   ('{_program(command)} --help' explains)")
    return parse(cls, words, _program(command), description=about)


def resume(arguments: list[str]) -> int:
    """Continue a run from its newest checkpoint."""
    from manyhands import run as runs

    options = _options(ResumeOptions, "resume", arguments, resume.__doc__ or "")
    run = runs.Run.open(options.run)
    return _finished(runs.resume(run, options.total_steps, options.quiet, options.device, options.limit_minutes), options.quiet)


def evaluate(arguments: list[str]) -> int:
    """Let a trained agent play whole episodes, and write the scores to the run directory."""
    from manyhands.run import Run

    o = _options(EvalOptions, "eval", arguments, evaluate.__doc__ or "")
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
            warn=_warn,
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


def random_player(arguments: list[str]) -> int:
    """Let a random player, ten actions a second, play an Atari game: what scores are counted from."""
    from manyhands.evaluate import evaluate_random

    o = _options(RandomOptions, "random", arguments, random_player.__doc__ or "")
    result = evaluate_random(o.game, o.protocol, o.episodes, o.seed)
    print(json.dumps(dataclasses.asdict(result)) if o.json else _show_evaluation(result))
    return 0


def record_starts(arguments: list[str]) -> int:
    """Record start states of an Atari game, from a trained agent or from you, for the human-starts protocol."""
    from manyhands.envs.atari import AtariEnv
    from manyhands.envs.starts import default_path
    from manyhands.record import by_agent, by_person
    from manyhands.run import Run

    o = _options(StartsOptions, "record-starts", arguments, record_starts.__doc__ or "")
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


def table(arguments: list[str]) -> int:
    """Evaluated runs of Atari games in one table: raw, normalised, beside the published scores."""
    from manyhands import table as tables
    from manyhands.run import Run

    o = _options(TableOptions, "table", arguments, table.__doc__ or "")
    _check_picture("--out", str(o.out or ""))
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


def play(arguments: list[str]) -> int:
    """Film one episode from the real screen."""
    from manyhands.evaluate import record
    from manyhands.run import Run

    o = _options(PlayOptions, "play", arguments, play.__doc__ or "")
    run = Run.open(o.run).on(o.device)
    video = o.video or run.directory / "play.mp4"
    score, steps = record(run, video, o.actions, o.seed, o.max_steps, o.fps, o.checkpoint, _warn)
    print(f"{video}: {steps:,} steps, score {score:g}")
    return 0


def plot(arguments: list[str]) -> int:
    """Draw learning curves, the mean and spread over seeds."""
    from manyhands.plot import plot as draw
    from manyhands.run import Run

    o = _options(PlotOptions, "plot", arguments, plot.__doc__ or "")
    print(draw([Run.open(path) for path in o.runs], o.out, o.x, o.y))
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


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "play": play,
    "random": random_player,
    "record-starts": record_starts,
    "table": table,
    "plot": plot,
    "bench": bench,
    "plan": plan,
    "study": study,
    "suite": suite,
    "recipes": recipes,
}


def _usage() -> str:
    lines = ["usage: manyhands COMMAND ...", ""]
    lines += [f"  {name:<13} {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "'manyhands COMMAND --help' explains each"])


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _dispatch(arguments)
    except UsageError as error:
        print(f"manyhands: {error}", file=sys.stderr)
        code = 2
    except RunError as error:
        print(f"manyhands: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("manyhands: interrupted", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # `manyhands recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from manyhands import __version__

        print(f"manyhands {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        import difflib

        near = difflib.get_close_matches(arguments[0], COMMANDS, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(COMMANDS)})"
        raise UsageError(f"no command {arguments[0]!r}{hint}")
    return command(arguments[1:])
