"""Whole runs: the same twice, resumed as if never stopped – also after a kill –, damaged checkpoints, full disks, Ctrl-C."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands import checkpoint
from manyhands.run import Run
from tests.conftest import Corridor
from tests.processes import alive, children, command, shared_memory, wait_for

SMALL = {
    "env": {"board": 5, "patience": 20},
    "network": {"hidden": [32]},
    "sampler": {"num_envs": 8, "horizon": 16},
    "memory": {"epochs": 2, "minibatches": 2},
    "total_steps": 12_000,
    "checkpoint": {"every_steps": 1000},
    "report": {"every_steps": 500, "tensorboard": False},
    "threads": 1,
}
TIMES = ("time_s", "steps_per_s")


def train(run_dir, **changes):
    return mh.train("snake", run_dir=run_dir, quiet=True, **{**SMALL, **changes})


def final_parameters(run):
    return checkpoint.load_newest(run.checkpoints, print)[0]["team"]["store"]["parameters"]


def rows(run):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in run.metrics()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train(tmp_path_factory.mktemp("reference") / "run")


def test_the_run_directory_is_the_whole_record(reference):
    run = reference
    assert {p.name for p in run.directory.iterdir()} == {"recipe.toml", "metrics.jsonl", "checkpoints"}
    last = run.metrics()[-1]
    assert last["step"] >= 12_000 and last["frames"] == last["step"] and last["updates"] > 100
    for key in ("return_mean", "return_max", "episodes", "loss", "entropy", "kl", "learning_rate", *TIMES):
        assert last[key] is not None, key
    manifest = json.loads((run.checkpoints / "latest" / "manifest.json").read_text())
    assert manifest["environments"] == "continue mid-episode" and manifest["identity"]["algorithm"] == "ppo"
    assert len(list(run.checkpoints.glob("step-*"))) in (2, 3)  # two newest, and the best
    assert (run.checkpoints / "best").resolve().is_dir()


def test_same_seed_same_run_other_seed_other_run(reference, tmp_path):
    again = train(tmp_path / "again")
    assert rows(again) == rows(reference)
    assert torch.equal(final_parameters(again), final_parameters(reference))
    assert rows(train(tmp_path / "other", seed=1)) != rows(reference)


@pytest.mark.parametrize("kind", [pytest.param("serial", marks=pytest.mark.slow), "alternating"])
def test_other_samplers_learn_the_same(reference, tmp_path, kind):
    """Random numbers are keyed by simulator and slot; only the order of floating-point sums may differ."""
    run = train(tmp_path / kind, sampler={**SMALL["sampler"], "kind": kind})
    for mine, theirs in zip(rows(run)[:2], rows(reference)[:2], strict=True):
        assert mine["episodes"] == theirs["episodes"] and mine["return_mean"] == theirs["return_mean"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_resumed_equals_uninterrupted(reference, tmp_path):
    """Stopped at a third by a smaller total; schedules run on the recipe's own total."""
    run = train(tmp_path / "run", total_steps=4000, rule={"anneal": "none"})
    longer = mh.resume(run, total_steps=12_000, quiet=True)
    whole = train(tmp_path / "whole", rule={"anneal": "none"})
    assert torch.equal(final_parameters(longer), final_parameters(whole))
    # The shorter run reported once more, at its own end.
    common = [r for r in rows(longer) if r["step"] in {w["step"] for w in rows(whole)}]
    assert len(common) > 8 and common[-1]["episodes"] == rows(whole)[-1]["episodes"]


@pytest.mark.parametrize("kill_after", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed_equals_uninterrupted(reference, tmp_path, kill_after):
    run_dir = tmp_path / "run"
    recipe = tmp_path / "small.toml"
    recipe.write_text((reference.directory / "recipe.toml").read_text())
    process = command("train", recipe, "--run-dir", run_dir, "--quiet")
    checkpoints = run_dir / "checkpoints"
    wait_for(lambda: checkpoints.exists() and len(list(checkpoints.glob("step-*"))) >= kill_after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert command("resume", run_dir, "--quiet").wait() == 0
    run = Run.open(run_dir)
    assert torch.equal(final_parameters(run), final_parameters(reference))
    assert rows(run) == rows(reference)


def test_environments_without_a_state_start_new_episodes(tmp_path):
    options = {"report": {"tensorboard": False}, "checkpoint": {"every_steps": 500}, "quiet": True}
    run = mh.train("cartpole-ppo", env={"workers": 1}, run_dir=tmp_path / "run", total_steps=2000, **options)
    manifest = json.loads((run.checkpoints / "latest" / "manifest.json").read_text())
    assert manifest["environments"] == "start new episodes"
    longer = mh.resume(run, total_steps=4000, quiet=True)
    steps = [row["step"] for row in longer.metrics()]
    assert steps == sorted(steps) and steps[-1] >= 4000


def test_custom_environment_network_and_algorithm(tmp_path):
    from manyhands.algos.actor_critic import ActorCritic

    class Doubled(ActorCritic):
        pass

    made = []

    def network(spec):
        made.append(spec)
        return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU())

    run = mh.train(
        "cartpole-a2c", env=lambda: Corridor(5), network=network, algorithm=Doubled(entropy_coef=0.1), quiet=True,
        run_dir=tmp_path / "run", total_steps=600, report={"every_steps": 100, "tensorboard": False},
    )  # fmt: skip
    assert made[0].frame == (2,) and run.evaluate(episodes=3).mean == 15.0
    with pytest.raises(mh.UsageError, match="custom env"):
        mh.open_run(run.directory).evaluate(episodes=1)
    again = mh.open_run(run.directory, env=lambda: Corridor(5), network=network, algorithm=Doubled())
    assert again.evaluate(episodes=2, actions="greedy").returns == [15.0, 15.0]


@pytest.mark.parametrize("name", ["reward", "answers"])
def test_what_acting_gives_besides_must_not_be_named_like_what_samplers_write_down(name, tmp_path):
    from manyhands.algos.actor_critic import ActorCritic

    class Careless(ActorCritic):
        def act(self, net, obs, epsilon, noise):
            action, extras = super().act(net, obs, epsilon, noise)
            return action, {**extras, name: extras["value"]}

    with pytest.raises(mh.UsageError, match=f"act\\(\\) of Careless gives {name} beside the action"):
        mh.train("cartpole-a2c", algorithm=Careless(), quiet=True, run_dir=tmp_path / "run", total_steps=600)


def test_a_run_knows_its_return_when_it_ends(reference):
    assert reference.return_mean == reference.metrics()[-1]["return_mean"] is not None


def test_an_existing_directory_is_refused(reference):
    with pytest.raises(mh.UsageError, match="manyhands resume"):
        train(reference.directory)


def copy_of(run, tmp_path):
    shutil.copytree(run.directory, tmp_path / "copy", symlinks=True)
    return Run.open(tmp_path / "copy")


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", ["tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(reference, tmp_path, file, how):
    run = copy_of(reference, tmp_path)
    newest = (run.checkpoints / "latest").resolve()
    damage(newest / file, how)
    warnings: list[str] = []
    _, manifest = checkpoint.load_newest(run.checkpoints, warnings.append)
    assert manifest["step"] < int(newest.name[5:]) and len(warnings) == 1 and newest.name in warnings[0]


def test_nothing_is_started_from_scratch_when_all_are_damaged(reference, tmp_path):
    run = copy_of(reference, tmp_path)
    for path in run.checkpoints.glob("step-*"):
        damage(path / "tensors.safetensors", "flipped")
    with pytest.raises(mh.UsageError, match="every checkpoint is damaged"):
        mh.resume(run, total_steps=90_000, quiet=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"hidden": [16]}}, "parameters is"),
        (
            {"algorithm": {"name": "actor-critic"}, "memory": {"epochs": 1}},
            "algorithm is 'ppo' there, 'actor-critic' here",
        ),
        ({"env": {"board": 6}}, r"observation is \[2, 10, 10\] there, \[2, 12, 12\] here"),
    ],
)
def test_a_checkpoint_of_another_kind_names_what_differs(reference, tmp_path, changes, message):
    run = copy_of(reference, tmp_path)
    other = train(tmp_path / "other", **{**changes, "total_steps": 300})
    shutil.rmtree(other.checkpoints)
    shutil.copytree(run.checkpoints, other.checkpoints, symlinks=True)
    with pytest.raises(mh.UsageError, match=message):
        mh.resume(other, total_steps=90_000, quiet=True)


def test_a_full_disk_stops_no_training_and_is_not_called_success(tmp_path):
    """Files may not grow beyond 40 kB: checkpoints fail, training goes on and says so, and the end is no exit 0."""
    train(tmp_path / "first", total_steps=300)
    process = command(
        "train", tmp_path / "first" / "recipe.toml", "--run-dir", tmp_path / "run", "--total-steps", 4000, "--quiet",
        stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)),
    )  # fmt: skip
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "not saved" in errors and "training goes on" in errors and "Traceback" not in errors
    assert Run.open(tmp_path / "run").metrics()[-1]["step"] >= 4000
    assert not list((tmp_path / "run" / "checkpoints").glob(".writing*"))


def test_a_run_that_died_at_once_can_be_resumed(reference, tmp_path):
    """There is a checkpoint of step 0, and resuming from it is the same as never having died."""
    run = copy_of(reference, tmp_path)
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(train(tmp_path / "young", total_steps=1).checkpoints / "latest", ignore_errors=True)
    young = Run.open(tmp_path / "young")
    (first,) = [p for p in young.checkpoints.glob("step-*") if p.name.endswith("0" * 12)]
    run.checkpoints.mkdir()
    shutil.copytree(first, run.checkpoints / first.name)
    mh.resume(run, quiet=True)
    assert torch.equal(final_parameters(run), final_parameters(reference))


class Roulette(gymnasium.Env):
    """Random, with an array in its state."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.sums = np.zeros(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sums = np.zeros(2)
        return self.sums.astype(np.float32), {}

    def step(self, action):
        self.sums = self.sums + self.np_random.random(2)
        return (self.sums % 1).astype(np.float32), float(self.sums.copy()[action] % 1), bool(self.sums[0] > 9), False, {}

    def get_state(self):
        return {"sums": self.sums}

    def set_state(self, state):
        self.sums = state["sums"]


@pytest.mark.slow
def test_a_random_environment_that_offers_its_state_resumes_exactly(tmp_path):
    def go(name, steps, workers):
        return mh.train(
            "cartpole-ppo", env={"make": Roulette, "workers": workers}, run_dir=tmp_path / name, total_steps=steps, quiet=True,
            rule={"anneal": "none"}, report={"tensorboard": False, "every_steps": 1000}, sampler={"num_envs": 5, "horizon": 32},
        )  # fmt: skip

    whole = go("whole", 3000, 0)
    part = go("part", 1000, 2)
    part = mh.resume(mh.open_run(part.directory, env=Roulette), total_steps=3000, quiet=True)
    assert torch.equal(final_parameters(part), final_parameters(whole))


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_simulator_that_hangs(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import time, sys, manyhands as mh\n"
        "from tests.conftest import Corridor\n"
        "class Sleepy(Corridor):\n"
        "    def step(self, action):\n"
        "        if self._episode > 200: time.sleep(600)\n"
        "        return super().step(action)\n"
        "run = mh.train('cartpole-ppo', env=lambda: Sleepy(4), run_dir=sys.argv[1], report={'every_steps': 100})\n"
        "sys.exit(130 if run.interrupted else 0)\n"
    )
    root = str(Path(__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, script, tmp_path / "run"], env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    size = -1
    while size != metrics.stat().st_size:  # until nothing moves any more
        size = metrics.stat().st_size
        time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10 and process.returncode == 130 and "Traceback" not in errors
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "latest" / "manifest.json").read_text())
    assert manifest["step"] > 0


@pytest.mark.parametrize("how", ["once", "twice", "killed"])
def test_interrupts_leave_nothing_behind(tmp_path, how):
    run_dir = tmp_path / "run"
    process = command(
        "train", "cartpole-ppo", "--run-dir", run_dir, "--total-steps", 10_000_000, "--env.workers", 2,
        "--report.every-steps", 1000, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    shared = shared_memory()
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").stat().st_size > 0)
    simulators = children(process.pid)
    assert len(simulators) == 2
    begin = time.monotonic()
    if how == "killed":
        process.send_signal(signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
        if how == "twice":
            time.sleep(0.02)
            os.killpg(process.pid, signal.SIGINT)
    code = process.wait(15)
    wait_for(lambda: not alive(simulators), 15)
    seconds = time.monotonic() - begin
    assert code == {"once": 130, "twice": 130, "killed": -signal.SIGKILL}[how]
    assert seconds < {"once": 10, "twice": 3, "killed": 15}[how]
    assert shared_memory() <= shared
    if how == "once":
        manifest = json.loads((run_dir / "checkpoints" / "latest" / "manifest.json").read_text())
        assert manifest["step"] >= 1000
        assert command("resume", run_dir, "--total-steps", manifest["step"] + 1000, "--quiet").wait() == 0


def test_nan_rewards_never_reach_the_parameters(tmp_path):
    class Poison(Corridor):
        def step(self, action):
            obs, _, terminated, truncated, info = super().step(action)
            return obs, float("nan"), terminated, truncated, info

    with pytest.raises(mh.RunError, match="not finite"):
        mh.train(
            "cartpole-ppo", env={"make": lambda: Poison(5), "workers": 0}, run_dir=tmp_path / "run", quiet=True,
            report={"tensorboard": False},
        )  # fmt: skip


def test_learning_from_what_acting_computed_changes_nothing(tmp_path):
    """One update a rollout: batched sampling keeps the convolutions of acting, alternating computes them again."""
    once = {"memory": {"epochs": 1, "minibatches": 1}, "total_steps": 1500, "checkpoint": {"every_steps": 10_000}}
    sampler = {"num_envs": 8, "horizon": 16}
    runs = [train(tmp_path / kind, **once, sampler={**sampler, "kind": kind}) for kind in ("batched", "alternating")]
    one, two = map(final_parameters, runs)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


REPLAY = {
    "algorithm": {"name": "dqn", "double": True, "target_period": 300},
    "exploration": {"over": 2000},
    "memory": {
        "name": "replay", "capacity": 2000, "batch": 16, "intensity": 4.0, "warmup_steps": 500, "n_step": 3, "prioritized": True
    },
    "sampler": {"num_envs": 4, "horizon": 8},
    "total_steps": 3000,
}  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param("batched", marks=pytest.mark.slow), "alternating"])
def test_with_its_replay_saved_a_run_resumes_exactly(tmp_path, kind):
    changes = {**REPLAY, "sampler": {**REPLAY["sampler"], "kind": kind}, "checkpoint": {"every_steps": 1000, "replay": True}}
    whole = train(tmp_path / "whole", **changes)
    part = train(tmp_path / "part", **changes)
    before, newest = sorted(part.checkpoints.glob("step-*"))[-2:]
    shutil.rmtree(newest)
    assert json.loads((before / "manifest.json").read_text())["replay"] == "saved"
    assert (before / "team.hands.0.memory.frames.bin").stat().st_size == (
        500 + 3 + 1
    ) * 4 * 100  # slots, n, stack - 1; 10×10 pixels
    resumed = mh.resume(part.directory, quiet=True)
    assert torch.equal(final_parameters(whole), final_parameters(resumed))
    assert rows(whole) == rows(resumed)


def test_without_its_replay_a_run_says_so_and_goes_on(tmp_path, capfd):
    run = train(tmp_path / "run", **{**REPLAY, "total_steps": 2000})
    manifest = json.loads((run.checkpoints / "latest" / "manifest.json").read_text())
    assert manifest["replay"].startswith("not saved")
    before = run.metrics()[-1]
    assert before["replay"] > 0 and before["epsilon"] < run.metrics()[0]["epsilon"] and 0 < before["beta"] <= 1
    with pytest.raises(mh.UsageError, match=r"filling it takes 500 steps .* only 400 are left"):
        mh.resume(run.directory, total_steps=before["step"] + 400, quiet=True)
    assert command("resume", run.directory, "--total-steps", 4000, stderr=subprocess.STDOUT).wait(60) == 0
    assert "the replay was not saved" in capfd.readouterr().out
    after = run.metrics()[-1]
    # The first 500 steps pay for nothing, each later one for 4 of a batch's 16 samples.
    assert after["updates"] - before["updates"] == (after["step"] - before["step"] - 500) * 4 // 16


def test_a_run_directory_is_read_with_care(tmp_path):
    run = train(tmp_path / "run", **{**REPLAY, "total_steps": 1000, "algorithm": {"name": "categorical-dqn"}})
    recipe = run.directory / "recipe.toml"
    whole = recipe.read_text()
    recipe.write_text(whole.replace("atoms = 51", 'atoms = 51\nloss_kind = "huber"'))  # as earlier versions wrote it
    assert mh.open_run(run.directory).recipe == run.recipe
    for broken in (whole[:-20] + "[[", "nonsense = 3\n"):
        recipe.write_text(broken)
        with pytest.raises(mh.UsageError):
            mh.open_run(run.directory)


def test_what_is_hardly_meant_is_said(tmp_path, capfd):
    train(tmp_path / "run", **{**REPLAY, "exploration": {"over": 100_000}})
    assert "ε is still 0.9" in capfd.readouterr().err


def test_a_run_ends_when_its_games_are_good_enough(tmp_path):
    run = train(tmp_path / "run", total_steps=10_000_000, stop_at_return=-5.0, report={"window": 20})
    last = run.metrics()[-1]
    assert not run.interrupted and last["step"] == run.steps < 10_000_000 and last["episodes"] >= 20
    assert json.loads((run.checkpoints / "latest" / "manifest.json").read_text())["finished"]
    with pytest.raises(mh.UsageError, match="its games reached -5"):
        mh.resume(run, quiet=True)
    assert mh.resume(run, stop_at_return=100.0, total_steps=run.steps + 100, quiet=True).steps > run.steps


def test_a_limit_in_minutes_ends_a_run_for_good(tmp_path):
    run = train(tmp_path / "run", total_steps=10_000_000, limit_minutes=0.02)
    last = run.metrics()[-1]
    assert not run.interrupted and last["step"] == run.steps < 10_000_000 and last["time_s"] >= 1.2
    with pytest.raises(mh.UsageError, match=r"given 0\.02 minutes"):
        mh.resume(run, quiet=True)
    longer = mh.resume(run, limit_minutes=0.03, quiet=True)
    assert longer.steps > run.steps and longer.metrics()[-1]["time_s"] >= 1.8


def test_a_longer_run_says_what_becomes_of_its_learning_rate(tmp_path, capfd):
    part = mh.train("cartpole-ppo", total_steps=1024, quiet=True, run_dir=tmp_path / "run", report={"tensorboard": False})
    assert part.recipe.rule.anneal == "linear"
    done = rows(part)[-1]["step"]
    mh.resume(part, total_steps=4 * done, quiet=True)
    assert "goes on at 75% of its start, not 0%" in capfd.readouterr().err
