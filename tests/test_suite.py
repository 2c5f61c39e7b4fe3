"""Many games and seeds: which games, in which order, and that a suite goes on where it was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands import suite as suites
from manyhands.types import UsageError

from .processes import wait_for

SMALL = [
    "--total-steps", "400", "--sampler.num-envs", "4", "--sampler.horizon", "25", "--memory.minibatches", "1", "--memory.epochs",
    "1", "--sampler.decorrelate-steps", "0", "--network.torso", "nips", "--device", "cpu",
]  # fmt: skip


def test_lists_of_games():
    assert len(suites.games_of("all49")) == 49 and len(suites.games_of("paac12")) == 12 and len(suites.games_of("ba3c6")) == 6
    assert suites.games_of("Pong, Breakout") == ["Pong", "Breakout"]
    with pytest.raises(UsageError, match="did you mean 'ALE/Pong-v5'"):
        suites.games_of("Pong,Pnog")


def test_a_run_is_begun_or_gone_on_with(tmp_path):
    plan = suites.Plan("pong-ppo", ("--device", "cpu"), "null-op", 3, share=1, parallel=2)
    job = suites.Job("Pong", 7, tmp_path / "Pong-7")
    assert plan.training(job)[:2] == ["train", "pong-ppo"] and plan.training(job)[-5:-3] == ["--seed", "7"]
    (job.directory / "checkpoints" / "step-000000000050").mkdir(parents=True)
    assert plan.training(job)[:2] == ["resume", str(job.directory)] and not plan.trained(job)
    last = job.directory / "checkpoints" / "step-000000000100"
    last.mkdir()
    (last / "manifest.json").write_text('{"finished": true}')
    assert plan.trained(job)
    assert plan.evaluation(job) == ["eval", str(job.directory), "--protocol", "null-op", "--episodes", "3", "--json"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_suite_is_stopped_goes_on_and_ends_in_a_table(tmp_path):
    out = tmp_path / "suite"
    options = ["--games", "Pong,Freeway", "--seeds", "1", "--parallel", "2", "--episodes", "1", "--out", str(out), "--json"]
    command = [sys.executable, "-m", "manyhands", "suite", "pong-ppo", *options, *SMALL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    wait_for(lambda: (out / "Pong-0" / "recipe.toml").exists(), 60)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130 and "goes on" in process.stderr.read()
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told["games"]) == {"Pong", "Freeway"} and told["games"]["Pong"]["score"] <= -10
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and "training" not in again.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nobody_trains_on_when_a_suite_is_killed(tmp_path, how):
    """The same command then goes on, and must be alone with the run."""
    out = tmp_path / "suite"
    command = [sys.executable, "-m", "manyhands", "suite", "pong-ppo", "--games", "Pong", "--out", str(out), *SMALL]
    process = subprocess.Popen([*command, "--total-steps", "100000"], stderr=subprocess.DEVNULL)
    wait_for(lambda: (out / "Pong-0" / "checkpoints" / "step-000000000000").exists(), 60)
    (training,) = [pid for pid in processes() if str(out / "Pong-0") in command_of(pid)]
    process.send_signal(how)
    process.wait(30)
    wait_for(lambda: training not in processes(), 2)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path):
    (tmp_path / "Pong-0").mkdir()
    (tmp_path / "Pong-0" / "something").write_text("not a run")
    options = ["--games", "Pong,Freeway", "--episodes", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "manyhands", "suite", "pong-ppo", *options, *SMALL], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and "Pong-0 failed" in done.stderr and "Freeway" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_suite_on_a_cluster_goes_on_when_a_machine_is_lost(cluster, tmp_path):
    """Two runs at once on four raylets. What Ray had started for one of them is killed, as with its machine."""
    out = tmp_path / "suite"
    options = ["--games", "Pong,Freeway", "--parallel", "2", "--episodes", "1", "--out", str(out), "--json"]
    steps = ["--total-steps", "2000", "--checkpoint.every-steps", "200", "--threads", "1", "--env.threads", "1"]
    command = [sys.executable, "-m", "manyhands", "suite", "pong-ppo", *options, *SMALL, *steps, "--address", cluster.address]
    with (tmp_path / "told").open("w") as told:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
    wait_for(lambda: (out / "Pong-0" / "checkpoints" / "step-000000000200").exists(), 120)
    (training,) = [pid for pid in processes() if str(out / "Pong-0") in command_of(pid) and "suite" not in command_of(pid)[:4]]
    os.kill(parent_of(training), signal.SIGKILL)
    wait_for(lambda: training not in processes(), 30)  # nobody trains beside its successor
    result, _ = process.communicate(timeout=240)
    words = (tmp_path / "told").read_text()
    assert process.returncode == 0, words
    assert set(json.loads(result.splitlines()[-1])["games"]) == {"Pong", "Freeway"}
    assert "Pong-0: its machine is lost" in words and "Freeway-0: its machine is lost" not in words


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
