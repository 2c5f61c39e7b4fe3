"""The judge: scores the newest parameters while the others learn, keeps the best, and is replaced when it is killed."""

import json
import os
import signal
import time
from dataclasses import dataclass

import pytest

import manyhands as mh
from manyhands.algos.dqn import DQN
from manyhands.run import Run
from tests.processes import start_run, wait_for

from .test_cluster_faults import find, find_or_none, last, stop

QUICK = {"exploration": {"over": 500}, "memory": {"warmup_steps": 300}, "report": {"every_steps": 200, "tensorboard": False}}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_best_judged_parameters_are_kept_and_the_last_are_judged_too(tmp_path):
    judged = {"every_updates": 100, "episodes": 10, "actions": "greedy"}
    run = mh.train("gorila-snake", run_dir=tmp_path / "run", quiet=True, total_steps=6000, evaluation=judged, **QUICK)
    scores = {row["eval_updates"]: row["eval_return"] for row in run.metrics() if "eval_return" in row}
    row = run.metrics()[-1]
    assert len(scores) >= 3 and row["eval_updates"] == row["updates"] and row["eval_step"] == row["step"]
    best = run.directory / "checkpoints" / "best"
    manifest = json.loads((best / "manifest.json").read_text())
    assert best.resolve().name.startswith("judged-") and manifest["return_mean"] >= max(scores.values())
    more = Run.open(run.directory).evaluate(checkpoint="best", episodes=10, actions="greedy")
    assert more.checkpoint_step == manifest["step"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_judge_that_is_killed_is_replaced_and_a_resume_knows_the_best(tmp_path):
    run_dir = tmp_path / "run"
    how = ("--evaluation.every-updates", 50, "--evaluation.episodes", 5, "--memory.warmup-steps", 200)
    process = start_run("gorila-snake", run_dir, *how, report_every=200)
    wait_for(lambda: "eval_return" in last(run_dir), 60)
    victim = find(process, "the judge")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: find_or_none(process, "the judge") not in (None, victim), 30)
    before = last(run_dir)["eval_updates"]
    wait_for(lambda: last(run_dir)["eval_updates"] > before, 60)
    errors = stop(process)
    assert "the judge (process" in errors and "replaced" in errors and "Traceback" not in errors
    best = json.loads((run_dir / "checkpoints" / "best" / "manifest.json").read_text())["return_mean"]
    from manyhands.checkpoint import judged_best

    assert judged_best(run_dir / "checkpoints") == best


@dataclass(frozen=True)
class Unhurried(DQN):
    """Gradients that take a fixed time, and no core."""

    def loss(self, net, target, batch, progress):
        time.sleep(0.1)
        return super().loss(net, target, batch, progress)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_learners_are_not_slower_for_being_judged(tmp_path):
    rates, judgements = {}, 0
    for every in (0, 10):
        judged = {"every_updates": every, "episodes": 5}
        run = mh.train(
            "gorila-snake", algorithm=Unhurried(), run_dir=tmp_path / str(every), quiet=True, total_steps=1600, evaluation=judged,
            **QUICK,
        )  # fmt: skip
        rows = [row for row in run.metrics() if row["updates"]]
        rates[every] = (rows[-1]["updates"] - rows[0]["updates"]) / (rows[-1]["time_s"] - rows[0]["time_s"])
        judgements = len({row["eval_updates"] for row in rows if "eval_updates" in row})
    assert judgements >= 3 and rates[10] >= 0.9 * rates[0], (judgements, rates)
