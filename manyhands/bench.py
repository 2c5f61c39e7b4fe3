"""Where a recipe's time goes, and how close it comes to the simulators alone.

Three phases on the same simulators: training; sampling without learning, whose actions are recorded; and the simulators by
themselves, told those actions again, resets included. They take turns: a machine that is slow for some seconds is slow for all
three. Where several processes sample, each does all three beside the others, on its share of the cores, and the rates are sums;
only the rate of training is then that of a real team, with what meeting costs, whose turn is the fourth.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any, Literal, get_args

import numpy as np
import torch

from manyhands import machine
from manyhands.build import Custom, check, device_of, doubts, find_device, make_learner
from manyhands.config import EvaluationConfig, Recipe, TopologyConfig
from manyhands.hosts.inline import InlineHost
from manyhands.hosts.process import ChildError, ChildLost, ProcessHost
from manyhands.memory.replay import ReplayConfig
from manyhands.samplers.pipelined import PipelinedSampler
from manyhands.stores.local import LocalConfig
from manyhands.team import Team
from manyhands.types import Host, RunError, Sampler, Seat

WARM_UPDATES = 5  # of each learner of a team, before it is measured
PATIENCE_S = 3600.0  # a replay on a CPU may take long to be warm
LONGEST_S = 10.0  # of what is not training
TURNS = 3  # of each phase


Phase = Literal["train", "sample", "simulate"]


@dataclass(frozen=True)
class Measured:
    steps: int
    seconds: float
    split: dict[str, float] = field(default_factory=dict)  # what the seconds were spent on

    def __add__(self, other: Measured) -> Measured:
        split = {name: self.split[name] + value for name, value in other.split.items()}
        return Measured(self.steps + other.steps, self.seconds + other.seconds, split)

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


class Part:
    """One process's simulators, in the three phases. It shares nothing with the others but the machine."""

    def __init__(self, recipe: Recipe, custom: Custom, rank: int, ranks: int) -> None:
        self._learner = make_learner(_alone(recipe, rank), custom, Seat(rank, ranks))
        self._rollouts = (item for item in self._learner.run() if item is not None)
        self._actions: list[torch.Tensor] = []
        while self._learner.clock.updates == 0:  # what is captured is captured then
            next(self._rollouts)
        begin = time.perf_counter()
        next(self._rollouts)
        self._rollout_s = time.perf_counter() - begin

    @property
    def sampler(self) -> Sampler:
        return self._learner.sampler

    def ready(self) -> float:
        """Who answers is there, and warm. How long a rollout took."""
        return self._rollout_s

    def turn(self, phase: Phase, seconds: float) -> Measured:
        return {"train": self._train, "sample": self._sample, "simulate": self._simulate}[phase](seconds)

    def _train(self, seconds: float) -> Measured:
        """With how the time is spent. Of work on a GPU it is the time this process spends on it: updates are launched and waited
        for by whoever needs their result next."""
        learner = self._learner
        learner.learning = True
        learner.reset_timers()
        measured = self._timed(seconds)
        split = {**learner.sampler.seconds, "learn": learner.learn_seconds}
        return replace(measured, split={**split, "other": max(measured.seconds - sum(split.values()), 0.0)})

    def _sample(self, seconds: float) -> Measured:
        self._learner.learning = False
        self._actions = []
        return self._timed(seconds, self._actions)

    def _simulate(self, seconds: float) -> Measured:
        """The same groups, told the actions of the last sampling again. (Where training goes on after it, the simulators have
        moved on meanwhile: that changes what is learned, not how fast.)"""
        sampler, actions = self._learner.sampler, torch.cat(self._actions).cpu()
        measure = _parts_alone if isinstance(sampler, PipelinedSampler) else _simulators_alone
        return measure(sampler, actions, seconds)

    def _timed(self, seconds: float, actions: list[torch.Tensor] | None = None) -> Measured:
        """Nobody waits for the GPU but at both ends."""
        _synchronise()
        steps, begin = 0, time.perf_counter()
        for rollout in self._rollouts:
            steps += rollout.steps
            if actions is not None:
                actions.append(rollout.action.clone())
            if time.perf_counter() - begin >= seconds:
                break
        _synchronise()
        return Measured(steps, time.perf_counter() - begin)

    def close(self) -> None:
        self._learner.close()


class Bench:
    """A recipe that is measured in turns, and at rest between them."""

    def __init__(self, recipe: Recipe, custom: Custom) -> None:
        self._recipe = recipe
        self._turns: list[dict[Phase, list[Measured]]] = []  # of each process
        self._teamwork: list[Measured] = []
        with ExitStack() as stack:
            self._ask, self.rollout_s = stack.enter_context(_parts(recipe, custom))
            self._team = stack.enter_context(closing(Together(recipe, custom))) if recipe.in_processes else None
            self.close = stack.pop_all().close

    def turn(self, train_s: float, other_s: float) -> None:
        self._teamwork += [self._team.turn(train_s)] if self._team else []
        lengths = {"train": train_s, "sample": other_s, "simulate": other_s}
        self._turns.append({phase: self._ask("turn", phase, lengths[phase]) for phase in get_args(Phase)})

    def result(self) -> dict[str, Any]:
        """Of all turns together."""
        trained, sampled, simulated = (
            [reduce(add, mine) for mine in zip(*(turn[phase] for turn in self._turns), strict=True)] for phase in get_args(Phase)
        )
        sampling, alone = (sum(part.rate for part in parts) for parts in (sampled, simulated))
        rate = reduce(add, self._teamwork).rate if self._teamwork else sum(part.rate for part in trained)
        shares = [{name: spent / part.seconds for name, spent in part.split.items()} for part in trained]
        recipe = self._recipe
        return {
            "recipe": recipe.name,
            "learners": recipe.topology.learners,
            "simulators": recipe.sampler.num_envs * recipe.actors,
            "device": str(find_device(recipe.device)),
            "steps_per_s": round(rate, 1),
            "sampling_only_steps_per_s": round(sampling, 1),
            "simulator_only_steps_per_s": round(alone, 1),
            "fraction_of_simulator": round(rate / alone, 4),
            "sampling_fraction_of_simulator": round(sampling / alone, 4),
            "time": {name: round(sum(share[name] for share in shares) / len(shares), 3) for name in shares[0]},
        }


def bench(recipe: Recipe, custom: Custom, seconds: float, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    short, sampler = min(seconds, LONGEST_S), recipe.sampler
    for doubt in doubts(recipe):
        say(f"warning: {doubt}")
    warmup = recipe.memory.warmup_steps if isinstance(recipe.memory, ReplayConfig) else 0
    random = f"{warmup:,} steps of random play (--memory.warmup-steps), then " if warmup else ""
    apart = f"up to {sampler.decorrelate_steps:,} random steps of each, " if sampler.decorrelate_steps else ""
    simulators = sampler.num_envs * recipe.actors
    say(f"warming up: {simulators:,} simulators, {apart}{random}two rollouts of {sampler.horizon * sampler.num_envs:,} steps")
    with closing(Bench(recipe, custom)) as measured:
        many = recipe.in_processes
        together = f"{recipe.topology.learners} learners together and each for itself, both" if many else "training"
        say(
            f"in {TURNS} turns of each, which end with a rollout: {together} for {seconds:g} s, "
            f"sampling without learning for {short:g} s, the simulators alone for {short:g} s"
        )
        if (rollout_s := measured.rollout_s) > seconds / TURNS:
            say(f"a rollout with its updates takes {rollout_s:.0f} s here: that will be about {TURNS * rollout_s:.0f} s or more")
        for _ in range(TURNS):
            measured.turn(seconds / TURNS, short / TURNS)
        return {**measured.result(), "seconds": seconds, "machine": machine.describe()}


@contextmanager
def _parts(recipe: Recipe, custom: Custom) -> Iterator[tuple[Callable[..., list[Any]], float]]:
    """What asks all of them for the same at the same time, and how long their rollouts take."""
    ranks = recipe.actors
    host: Host = ProcessHost() if ranks > 1 else InlineHost()
    threads = max(machine.cores() // ranks, 1)
    handles = [host.start(Part, recipe, custom, rank, ranks, name=f"simulators {rank}", threads=threads) for rank in range(ranks)]

    def ask(what: str, *arguments: Any) -> list[Any]:
        try:
            return [call.result() for call in [h.call(what, *arguments, timeout_s=PATIENCE_S) for h in handles]]
        except (ChildError, ChildLost) as error:
            last = str(error).strip().splitlines()[-1]
            raise RunError(f"the simulators of {recipe.name} could not be measured: {last}") from None

    try:
        yield ask, max(ask("ready"))
    finally:
        for handle in handles:
            handle.close(time.monotonic())


def _alone(recipe: Recipe, rank: int) -> Recipe:
    """One of those that sample, with a store of its own, where it would be in the team."""
    memory = replace(recipe.memory, shards=0) if isinstance(recipe.memory, ReplayConfig) else recipe.memory
    device = str(device_of(recipe, Seat(rank, recipe.actors)))
    topology = TopologyConfig(pin=recipe.topology.pin)
    return replace(
        recipe, device=device, memory=memory, store=LocalConfig(), topology=topology, evaluation=EvaluationConfig()
    )  # fmt: skip


class Together:
    """A real team, as train has it, which is at rest between its turns."""

    def __init__(self, recipe: Recipe, custom: Custom) -> None:
        spec, _ = check(recipe, custom)
        self._team = Team(recipe, custom, spec, lambda line: print(line, file=sys.stderr), None)
        self._progress = self._team.run()
        warm = WARM_UPDATES * recipe.topology.learners
        try:
            while self._team.clock.updates <= warm:
                next(self._progress)
            self._team.settle()
        except BaseException:
            self.close()
            raise

    def turn(self, seconds: float) -> Measured:
        """From when somebody has told of something new until somebody tells of something after the time is over."""
        rested = self._team.clock.steps
        while self._team.clock.steps == rested:
            next(self._progress)
        before, begin = self._team.clock.steps, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            next(self._progress)
        measured = Measured(self._team.clock.steps - before, time.perf_counter() - begin)
        self._team.settle()
        return measured

    def close(self) -> None:
        self._team.close()


def team_rate(recipe: Recipe, custom: Custom, seconds: float) -> float:
    """Steps per second of all learners, from when they have learned something."""
    with closing(Together(recipe, custom)) as team:
        return team.turn(seconds).rate


def _parts_alone(sampler: Any, actions: torch.Tensor, seconds: float) -> Measured:
    """The same for simulators that are served in parts: whoever is ready gets the next of those actions."""
    plan = actions.flatten().numpy()
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        ids, step = sampler.group.serve()
        steps += len(ids) - int(np.asarray(step.first).sum())
        sampler.group.answer(plan.take(range(steps, steps + len(ids)), mode="wrap"))
    return Measured(steps, time.perf_counter() - begin)


def _simulators_alone(sampler: Any, actions: torch.Tensor, seconds: float) -> Measured:
    """The same groups, kept as busy as they can be."""
    columns = actions.split([group.num_envs for group in sampler.groups], dim=1)
    plans = [[row.numpy().copy() for row in part] for part in columns]
    for group, plan in zip(sampler.groups, plans, strict=True):
        group.send(plan[0])
    slots, resets = 0, 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        slots += 1
        for group, plan in zip(sampler.groups, plans, strict=True):
            resets += int(torch.as_tensor(group.recv().first).sum())
            group.send(plan[slots % len(plan)])
    total = time.perf_counter() - begin
    for group in sampler.groups:
        group.recv()
    return Measured(slots * sampler.num_envs - resets, total)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _share(x: float) -> str:
    return f"{x:.0%}" if x >= 0.1 else f"{x:.1%}"


def show(result: dict[str, Any]) -> str:
    who = f" with {result['learners']} learners" if result["learners"] > 1 else ""
    lines = [
        f"{result['recipe']}{who}: {result['steps_per_s']:,.0f} steps/s, {_share(result['fraction_of_simulator'])} of the "
        f"simulators alone ({result['simulator_only_steps_per_s']:,.0f}); sampling without learning "
        f"{result['sampling_only_steps_per_s']:,.0f}, {_share(result['sampling_fraction_of_simulator'])}"
    ]
    if result["learners"] > 1:
        lines.append("time of a learner that trains beside the others, with a store of its own:")
    elif result["machine"]["gpu"]:
        lines.append("time of the process that serves the simulators (it launches updates in learn and waits for them in act):")
    for name, share in result["time"].items():
        lines.append(f"  {name:<9} {share:>6.1%}  {'█' * round(40 * share)}")
    m = result["machine"]
    gpu = f"{m['gpu'] or 'no GPU'}{' with MPS' if m.get('mps') else ''}"
    lines.append(f"on {m['cpu']}, {m['cores']} cores, {gpu}, torch {m['torch']}")
    return "\n".join(lines)
