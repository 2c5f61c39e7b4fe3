"""Studies: that all are there, that they go on after an interruption, and that what they compute is what they say."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from manyhands import cli
from manyhands.build import Custom, make_learner
from manyhands.config import load_recipe
from manyhands.studies import gradients
from manyhands.studies.catalogue import STUDIES
from manyhands.studies.curves import trained
from manyhands.studies.study import Desk, Finding, Study, draw, save
from manyhands.types import UsageError

NAMES = [
    "timing-vs-size", "serial-vs-workers", "environments-sweep", "time-usage", "datapoints-vs-width", "datapoints-vs-shards",
    "sync-vs-async", "speedup-vs-workers", "batch-size", "gradient-saturation", "update-norms", "secondary-learner",
    "staleness", "adam-epsilon", "learning-rate", "simulators-per-core", "appo-sync-period",
]  # fmt: skip


def test_every_study_is_there(capsys):
    assert set(STUDIES) == set(NAMES)
    assert cli.study([]) == 2 and cli.study(["--help"]) == 0
    assert "gradient-saturation" in capsys.readouterr().out
    with pytest.raises(UsageError, match="did you mean 'staleness'"):
        cli.study(["stalenes"])


@pytest.mark.parametrize(
    "finding",
    [
        Finding("x", "y", {"one": [[1, 2], [3, 4]], "two": [[1, 1], [2, 2]]}, log="xy", level=1.5),
        Finding("x", "y", {f"{a}, {b}": [[1, 2], [2, 3]] for a in "abc" for b in "de"} | {"g, h": [[1, 1]]}),
        Finding("x", "y", {"one": [[0, 0.3], [1, 0.4]], "two": [[0, 0.7], [1, 0.6]]}, kind="bars", labels=["p", "q"]),
    ],
)
def test_findings_are_saved_and_drawn(finding, tmp_path):
    study = Study("a paper", "a question", lambda desk: finding)
    told, picture = save("name", study, finding, Desk(tmp_path, True, print), {"cores": 2})
    saved = json.loads(told.read_text())
    assert saved["series"] == finding.series and saved["quick"] and saved["paper"] == "a paper"
    assert picture.stat().st_size > 5000
    draw("title", finding, tmp_path / "again.svg")


def test_a_variant_is_trained_once_and_finished_if_it_was_begun(tmp_path):
    said = []
    desk = Desk(tmp_path, True, said.append)
    run = trained(desk, "rate 1/2", "cartpole-ppo", {"threads": 1}, 2000)
    assert run.steps >= 2000 and run.directory.name == "rate-1-2"
    trained(desk, "rate 1/2", "cartpole-ppo", {"threads": 1}, 2000)
    assert len(said) == 1
    assert trained(desk, "rate 1/2", "cartpole-ppo", {"threads": 1}, 4000).steps >= 4000
    assert "going on" in said[1]


def test_halves_of_a_batch_that_is_its_half_twice_say_the_same():
    learner = make_learner(load_recipe("cartpole-ppo", {"device": "cpu", "algorithm": {"normalise_advantage": False}}), Custom())
    halves = gradients.Halves(learner)
    batches = []
    plain = learner._gradient
    learner._gradient = lambda batch, *more: (batches.append(batch), plain(batch, *more))[1]
    try:
        for rollout in learner.run():
            if rollout is not None:
                break
        batch = batches[0]
        half = gradients._half(batch)
        twice = replace(half, **{name: torch.cat([x, x]) for name, x in vars(half).items() if isinstance(x, torch.Tensor)})
        halves(twice, 0.0, [])
        assert halves.cosines == pytest.approx([1.0], abs=1e-5)
        before = learner.model.gradient.clone()
        halves(batch, 0.0, [])
        plain(batch, 0.0, [])
        assert halves.cosines[1] < 1 and not torch.equal(before, learner.model.gradient)
    finally:
        learner.close()


def test_a_secondary_learner_uses_as_many_samples_and_changes_only_itself():
    recipe = load_recipe("cartpole-dqn", {"device": "cpu", "memory": {"batch": 32, "warmup_steps": 200}, "total_steps": 2000})
    learner = make_learner(recipe, Custom())
    follower = gradients.Secondary(recipe, learner, 128)
    assert torch.equal(follower.model.parameters, learner.model.parameters)
    try:
        for rollout in learner.run():
            if rollout is not None and learner.clock.updates >= 40:
                break
        mine = learner.model.parameters.clone()
        follower.follow(40 * 32, 500)
        assert follower._store.clock.updates == math.floor(40 * 32 / 128)
        assert torch.equal(learner.model.parameters, mine) and not torch.equal(follower.model.parameters, mine)
    finally:
        learner.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_quick_studies(name, tmp_path):
    assert cli.study([name, "--quick", "--quiet", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "study.json").read_text())
    assert told["series"] and all(told["series"].values()) and (tmp_path / "study.png").stat().st_size > 10_000
