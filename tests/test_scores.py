"""Published scores, aggregates by hand, protocols by name, and the table made of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from manyhands import table as tables
from manyhands.config import load_recipe, to_toml
from manyhands.envs.atari import AtariEnv
from manyhands.envs.snake import SnakeEnv
from manyhands.evaluate import evaluate_random, play_episodes
from manyhands.protocols import PROTOCOLS, evaluation_env, random_env
from manyhands.run import Run
from manyhands.scores import aggregate, disagreements, iqm, published
from manyhands.types import UsageError


def test_printed_normalised_scores_follow_from_the_printed_raw_ones():
    assert len(published()) == 2 * 49
    # Printed as 0.00 where there is nothing to divide by: DQN got what random play gets, or less than nothing.
    assert [(game, protocol, column, value) for game, protocol, column, value, _ in disagreements()] == [
        ("DoubleDunk", "human-starts", "gorila_to_dqn_printed", None),
        ("MontezumaRevenge", "null-op", "gorila_to_dqn_printed", None),
    ]


def test_normalised_by_hand():
    pong, pinball = published()["Pong", "null-op"], published()["VideoPinball", "human-starts"]
    assert pong.to_human(18.9) == pytest.approx(100 * 39.6 / 30)
    assert pong.to_human(pong.random) == 0 and pong.to_human(pong.human) == pytest.approx(100)
    assert pinball.human < pinball.random and pinball.to_human(pinball.gorila) == pytest.approx(1904.87, abs=0.01)
    assert published()["Asterix", "human-starts"].to_dqn(3324.70) == pytest.approx(2670.44, abs=0.01)  # counted from 0


def test_gorila_beats_dqn_as_often_as_the_paper_says():
    better = {
        protocol: sum(row.gorila > row.dqn for (_, p), row in published().items() if p == protocol)
        for protocol in ("human-starts", "null-op")
    }
    assert better == {"human-starts": 41, "null-op": 31}


def test_aggregates_by_hand():
    assert iqm(np.array([1.0, 2, 3, 4, 100])) == 3.0  # one left out at each end
    told = aggregate([[50.0, 70.0], [100.0, 200.0], [0.0, 40.0]])
    assert told["median"][0] == 60.0  # of the means 60, 150, 20
    assert told["mean"][0] == pytest.approx(230 / 3)
    assert told["iqm"][0] == pytest.approx((40 + 50 + 70 + 100) / 4)
    assert told["optimality_gap"][0] == pytest.approx((40 + 0 + 80) / 3)
    assert all(low <= value <= high for value, low, high in told.values())
    assert told["mean"][1] < told["mean"][0] < told["mean"][2]
    alone = aggregate([[50.0], [80.0]])["mean"]
    assert alone == (65.0, 65.0, 65.0)


def test_protocols_are_what_they_say():
    env = AtariEnv(id="ALE/Breakout-v5", life_loss=True).resolved()
    played = {name: evaluation_env(env, name) for name in PROTOCOLS}
    assert all(not e.life_loss and e.reward_clip == 0 for e in played.values())
    assert {n: (e.sticky_actions, e.noop_max, e.max_frames) for n, e in played.items()} == {
        "null-op": (0.0, 30, 18_000),
        "human-starts": (0.0, 0, 108_000),
        "sticky": (0.25, 0, 108_000),
        "ba3c": (0.0, 30, 108_000),
        "accelerated": (0.0, 30, 108_000),
        "plain": (0.0, 30, 108_000),
    }
    assert PROTOCOLS["ba3c"].episodes == 50 and PROTOCOLS["ba3c"].actions == "greedy"
    assert random_env("Breakout", "null-op").frame_skip == 6
    with pytest.raises(UsageError, match="use plain"):
        evaluation_env(SnakeEnv(), "sticky")


class Counting:
    """Simulator i's episodes are 3 + i steps long and give a point a step."""

    def __init__(self, simulators):
        self.at, self.length = np.zeros(simulators, int), 3 + np.arange(simulators)
        self.reset = np.zeros(simulators, bool)

    def play(self):
        reset = self.reset
        self.at = np.where(reset, 0, self.at + 1)
        ended = self.at == self.length
        self.reset = ended
        return np.where(reset, 0.0, 1.0), ended, np.zeros(len(ended), bool), reset


def test_a_number_of_steps_gives_the_episodes_that_end_within_them():
    # 5 slots of 4 simulators: lengths 3, 4, 5 end once; 6 does not, and tells what it has.
    assert play_episodes(Counting(4), 4, 99, steps=20) == [(3.0, 3, False), (4.0, 4, False), (5.0, 5, False), (5.0, 5, True)]
    assert len(play_episodes(Counting(2), 2, 3)) == 6


def test_random_play_gets_what_was_published():
    assault = evaluate_random("Assault", episodes=12)
    assert abs(assault.mean - published()["Assault", "null-op"].random) < 60  # three standard errors
    assert assault.actions == "random" and assault.episodes == 12


def write_run(folder, game, step, **scores):
    recipe = load_recipe("pong-ppo", {"env": {"id": f"ALE/{game}-v5"}})
    (folder / "eval").mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(recipe))
    for actions, mean in scores.items():
        about = {"mean": mean, "standard_deviation": 1.0, "episodes": 30, "actions": actions, "epsilon": 0.0}
        (folder / "eval" / f"null-op-{actions}.json").write_text(json.dumps({**about, "checkpoint_step": step}))
    return Run.open(folder)


def test_a_table_of_seeds_and_games(tmp_path):
    runs = [
        write_run(tmp_path / "a", "Pong", 100, sampled=9.3, greedy=21.0),  # the protocol samples
        write_run(tmp_path / "b", "Pong", 100, sampled=-20.7),
        write_run(tmp_path / "c", "Breakout", 100, sampled=31.8),
        write_run(tmp_path / "d", "Adventure", 100, sampled=1.0),  # not among the 49
    ]
    told = tables.table(runs)
    assert told["games"]["Pong"]["score"] == pytest.approx(-5.7)
    assert told["games"]["Pong"]["normalised_runs"] == pytest.approx([100, 0])
    assert told["games"]["Adventure"]["normalised"] is None
    assert told["together"]["ours"]["median"][0] == pytest.approx(75)  # of 50 and 100
    dqn = [published()[game, "null-op"].dqn_printed for game in ("Pong", "Breakout")]
    assert told["together"]["dqn"]["median"][0] == pytest.approx(sum(dqn) / 2, abs=0.01)
    tables.draw(told, tmp_path / "table.png")
    assert (tmp_path / "table.png").stat().st_size > 5000
    assert "2 games" in tables.show_together(told)
    with pytest.raises(UsageError, match="manyhands eval"):
        tables.table(runs, "ba3c")
