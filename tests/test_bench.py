"""bench measures what it says: the same simulators, in as many processes, told the same actions again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from manyhands.bench import Part, Together, bench
from manyhands.build import Custom
from manyhands.config import load_recipe

STEP_S = 0.004
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FEW: dict = {"sampler": {"num_envs": 2, "horizon": 4}, "env": {"workers": 0}, "memory": {"epochs": 1, "minibatches": 1}}


class Sleeper(gymnasium.Env):
    """A step takes its time, whatever else the machine does; what it is told is remembered."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    told: list[int] = []  # noqa: RUF012 – of all of them, in the order of their steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(STEP_S)
        self.told.append(int(action))
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(("recipe", "processes"), [("cartpole-ppo", 1), ("cartpole-appo", 2)])
def test_simulators_alone_are_as_many_processes_as_the_team(recipe, processes):
    result = bench(load_recipe(recipe, FEW), Custom(env=Sleeper), 1.0)
    assert result["learners"] == processes
    alone = result["simulator_only_steps_per_s"]
    # One process steps its simulators one after the other. (On a busy machine sleeping takes longer, never shorter.)
    assert (processes - 0.9) / STEP_S < alone < processes / STEP_S
    assert result["sampling_only_steps_per_s"] < 1.2 * alone
    assert abs(sum(result["time"].values()) - 1) < 0.01


def test_what_acting_computed_while_nothing_was_learned_is_forgotten():
    """A2C on a CPU learns from what the layers gave when it acted."""
    result = bench(load_recipe("paac-pong", {"device": "cpu", **FEW}), Custom(), 0.3)
    assert result["steps_per_s"] > 0 and result["sampling_only_steps_per_s"] > 0


def test_the_phases_take_turns_and_only_training_learns(monkeypatch):
    asked, turn = [], Part.turn

    def noted(part, phase, seconds):
        before = part._learner.clock.updates
        measured = turn(part, phase, seconds)
        asked.append((phase, part._learner.clock.updates > before))
        return measured

    monkeypatch.setattr(Part, "turn", noted)
    bench(load_recipe("cartpole-ppo", FEW), Custom(env=Sleeper), 0.3)
    assert asked == [("train", True), ("sample", False), ("simulate", False)] * 3


def test_a_team_rests_between_its_turns():
    team = Together(load_recipe("cartpole-appo", FEW), Custom(env=Sleeper))
    try:
        for _ in range(2):
            measured = team.turn(1.0)
            # Who tells of a call's steps tells of some before the turn.
            assert 0.1 * 2 / STEP_S < measured.rate < 1.4 * 2 / STEP_S
            rested = team._team.clock
            time.sleep(0.5)
            assert team._team.settle() == [] and team._team.clock == rested
    finally:
        team.close()


def test_simulators_alone_are_told_what_they_were_told_before():
    part = Part(load_recipe("cartpole-ppo", FEW), Custom(env=Sleeper), 0, 1)
    try:
        Sleeper.told.clear()
        part.turn("sample", 0.5)
        sampled = list(Sleeper.told)
        Sleeper.told.clear()
        part.turn("simulate", 0.3)
    finally:
        part.close()
    assert 0 < sum(sampled) < len(sampled), "the policy tosses a coin"
    assert len(Sleeper.told) > 20 and Sleeper.told == np.resize(sampled, len(Sleeper.told)).tolist()


def test_settings_are_compared_in_turns():
    def compare(*settings):
        command = [sys.executable, BENCHMARKS / "compare.py", "cartpole-ppo", *settings]
        return subprocess.run([*command, "--seconds", "0.05", "--turns", "2", "--json"], capture_output=True, text=True)

    done = compare("sampler.num-envs=2", "sampler.num-envs=4 env.workers=0")
    assert done.returncode == 0, done.stderr
    few, more = (json.loads(done.stdout)[name] for name in ("sampler.num-envs=2", "sampler.num-envs=4 env.workers=0"))
    assert (few["simulators"], more["simulators"]) == (2, 4)
    assert few["steps_per_s"] > 0 and few["fraction_of_simulator"] < 1
    for settings, said in (
        (("threads=1", "threads=2"), "give them in --common"),
        (("", ""), "give different settings"),
        (("", "sampler.num-env=2"), "did you mean"),
    ):
        refused = compare(*settings)
        assert refused.returncode == 2 and said in refused.stderr and "Traceback" not in refused.stderr


def test_pauses_are_told_of_each_phase():
    command = [sys.executable, BENCHMARKS / "pauses.py", "cartpole-ppo", "--more", "sampler.kind=alternating", "env.workers=0"]
    done = subprocess.run([*command, "--seconds", "0.3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    phases = re.split(r"^(train|sample|simulate): .* steps/s$", done.stdout, flags=re.MULTILINE)[1:]
    assert phases[::2] == ["train", "sample", "simulate"]
    shares = [dict(re.findall(r"(\w+) .* ms, +([\d.]+)%", text)) for text in phases[1::2]]
    for share in shares:
        assert 50 < sum(map(float, share.values())) < 100.5
    train, _, simulate = (float(share.get("between", 0)) for share in shares)
    assert train > 5 > simulate, "it learns between two rollouts"
