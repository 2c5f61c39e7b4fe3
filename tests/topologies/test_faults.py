"""Learners that are killed, runs that are interrupted: reported within seconds, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from manyhands.config import load_recipe
from manyhands.maths import random
from manyhands.run import Run
from tests.processes import alive, children, command, descendants, shared_memory, start_run, wait_for

LATER = ("cartpole-ppo-sync", "cartpole-a3c", "cartpole-a3c-units", "cartpole-async-dqn", "cartpole-ga3c", "cartpole-ba3c")
TOPOLOGIES = ["cartpole-appo", *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)]
SYNCHRONOUS = {"cartpole-ppo-sync", "cartpole-ba3c"}


def steps(run_dir):
    return Run.open(run_dir).metrics()[-1]["step"]


def saved(run_dir):
    return json.loads((run_dir / "checkpoints" / "latest" / "manifest.json").read_text())["step"]


def interrupt(process):
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=20)[1]


@pytest.mark.parametrize("recipe", TOPOLOGIES)
def test_a_killed_learner(recipe, tmp_path):
    shared, run_dir = shared_memory(), tmp_path / "run"
    process = start_run(recipe, run_dir)
    wait_for(lambda: saved(run_dir) > 0)
    everybody = descendants(process.pid)
    victim = children(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    if recipe in SYNCHRONOUS:
        errors = process.communicate(timeout=10)[1]
        assert process.returncode == 1 and f"(process {victim}) was ended by SIGKILL" in errors
        assert "cannot go on without it" in errors and "Traceback" not in errors
    else:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "warning" in line)
        assert time.monotonic() - killed < 10
        assert f"(process {victim}) was ended by SIGKILL" in line and "replaced" in line
        wait_for(lambda: len(children(process.pid)) == 2 and victim not in children(process.pid))
        everybody = descendants(process.pid)
        before = steps(run_dir)
        wait_for(lambda: steps(run_dir) > before + 3000)  # it goes on
        assert Run.open(run_dir).metrics()[-1]["replaced_learners"] == 1
        interrupt(process)
        assert process.returncode == 130
    wait_for(lambda: not alive(everybody), 10)
    assert shared_memory() <= shared
    step = saved(run_dir)
    assert step >= 4000
    assert command("resume", run_dir, "--total-steps", step + 1500, "--quiet").wait(60) == 0
    assert steps(run_dir) >= step + 1500


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cartpole-ppo-sync", "cartpole-appo"])
def test_a_learner_that_is_killed_before_it_has_begun(recipe, tmp_path):
    run_dir = tmp_path / "run"
    options = ("--run-dir", run_dir, "--total-steps", 4000, "--report.every-steps", 500)
    process = command("train", recipe, *options, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: len(children(process.pid)) == 2, 30)
    victim = children(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    errors = process.communicate(timeout=60)[1]
    assert f"(process {victim}) was ended by SIGKILL" in errors and "Traceback" not in errors
    if recipe in SYNCHRONOUS:
        assert process.returncode == 1 and time.monotonic() - killed < 15 and "start again" in errors
    else:
        assert process.returncode == 0 and steps(run_dir) >= 4000 and "replaced" in errors


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        ("cartpole-appo", "once"),
        ("cartpole-ppo-sync", "killed"),
        pytest.param("cartpole-ppo-sync", "once", marks=SLOW),
        pytest.param("cartpole-appo", "killed", marks=SLOW),
    ],
)
def test_an_interrupted_team_leaves_nothing_behind(recipe, how, tmp_path):
    shared, run_dir = shared_memory(), tmp_path / "run"
    process = start_run(recipe, run_dir, "--env.workers", 1)
    everybody = descendants(process.pid)
    assert len(everybody) == 4  # two learners with a simulator process each
    begin = time.monotonic()
    if how == "killed":
        process.kill()
        process.wait(10)
    else:
        assert "Traceback" not in interrupt(process)
        assert process.returncode == 130 and saved(run_dir) >= 1000
    wait_for(lambda: not alive(everybody), 15)
    assert time.monotonic() - begin < {"once": 10, "killed": 15}[how]
    assert shared_memory() <= shared


@pytest.mark.slow
def test_after_the_last_restart_the_others_go_on_and_without_anybody_the_run_ends(tmp_path):
    run_dir = tmp_path / "run"
    process = start_run("cartpole-a3c-units", run_dir, "--store.restarts", 0)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    wait_for(lambda: len(children(process.pid)) == 1)
    before = steps(run_dir)
    wait_for(lambda: steps(run_dir) > before + 3000)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    errors = process.communicate(timeout=10)[1]
    assert process.returncode == 1 and "1 go on without it" in errors and "every learner was lost" in errors


@pytest.mark.slow
def test_learners_killed_again_and_again_are_replaced_also_while_reporting(tmp_path):
    run_dir = tmp_path / "run"
    process = start_run("cartpole-a3c-units", run_dir, "--store.restarts", 50, "--checkpoint.every-steps", 1000)
    for kill in range(4):
        wait_for(lambda: len(children(process.pid)) == 2)
        os.kill(children(process.pid)[kill % 2], signal.SIGKILL)
        time.sleep(1.5)
    wait_for(lambda: len(children(process.pid)) == 2)
    before = steps(run_dir)
    wait_for(lambda: steps(run_dir) > before + 3000)
    interrupt(process)
    assert process.returncode == 130 and Run.open(run_dir).metrics()[-1]["replaced_learners"] == 4


@pytest.mark.slow
def test_a_frozen_learner_keeps_nobody_waiting(tmp_path):
    run_dir = tmp_path / "run"
    process = start_run("cartpole-a3c-units", run_dir)
    everybody = descendants(process.pid)
    frozen = children(process.pid)[0]
    os.kill(frozen, signal.SIGSTOP)
    before = saved(run_dir)
    wait_for(lambda: saved(run_dir) > before + 8000)  # two checkpoints without it
    begin = time.monotonic()
    interrupt(process)
    assert process.returncode == 130 and time.monotonic() - begin < 15
    wait_for(lambda: not alive(everybody), 5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cartpole-ppo-sync", "cartpole-appo"])
def test_a_second_interrupt_and_a_sigterm(recipe, tmp_path):
    process = start_run(recipe, tmp_path / "one")
    everybody = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.02)
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == 130 and time.monotonic() - begin < 3
    wait_for(lambda: not alive(everybody), 3)
    process = start_run(recipe, tmp_path / "two")
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does: to everybody
    process.communicate(timeout=20)
    assert process.returncode == 130 and saved(tmp_path / "two") >= 1000


@pytest.mark.parametrize("recipe", ["cartpole-ppo-sync", pytest.param("cartpole-appo", marks=SLOW)])
def test_a_learner_that_raises_shows_its_own_traceback(recipe, tmp_path):
    """Also where it is the other rank, which the first one knows only by a broken connection."""
    script = tmp_path / "raises.py"
    script.write_text(
        "import sys, manyhands as mh\n"
        "from tests.conftest import Corridor\n"
        "BROKEN = int(sys.argv[2])\n"
        "class Broken(Corridor):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        self._broken = getattr(self, '_broken', None) or seed == BROKEN\n"
        "        return super().reset(seed=seed)\n"
        "    def step(self, action):\n"
        "        if self._broken and self._episode > 20: raise ValueError('the ball is gone')\n"
        "        return super().step(action)\n"
        "try:\n"
        "    mh.train(sys.argv[3], env={'make': lambda: Broken(4), 'workers': 0}, run_dir=sys.argv[1], quiet=True)\n"
        "except mh.RunError as error:\n"
        "    sys.exit(str(error))\n"
    )
    per_learner = load_recipe(recipe).sampler.num_envs
    seed = random.env_seed(0, random.ENV, per_learner, 0)  # the first simulator of the second learner
    process = subprocess.run(
        [sys.executable, script, tmp_path / "run", str(seed), recipe], env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode == 1 and "the ball is gone" in process.stderr and "in step" in process.stderr
