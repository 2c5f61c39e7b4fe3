"""Start states: recorded, found again, and played on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import manyhands as mh
from manyhands import cli, record
from manyhands.envs.atari import AtariEnv, AtariGroup
from manyhands.envs.starts import LETTERS, Starts, StartsGroup, bare, start_at
from manyhands.types import UsageError

PONG = AtariEnv(id="ALE/Pong-v5").resolved()


def letters(seed: int, count: int) -> str:
    return "".join(LETTERS[a] for a in np.random.default_rng(seed).integers(0, 6, count))


def starts(*states) -> Starts:
    return Starts(PONG.id, PONG.frame_skip, "a test", "any", states)


def test_a_game_goes_on_as_if_it_had_never_stopped():
    actions = letters(0, 120)
    group = AtariGroup(bare(PONG), 1)
    group.reset([7])
    rewards, frames = [], []
    for letter in actions:
        group.send(np.array([LETTERS.index(letter)]))
        step = group.recv()
        rewards.append(float(step.reward[0]))
        frames.append(step.obs.copy())
    group.close()
    before = 70
    start = start_at(PONG, 7, actions[:before])
    assert start.score == sum(rewards[:before])
    again = StartsGroup(PONG, starts(start), 1)
    begin = again.reset([99])
    assert begin.first.all() and begin.reward.tolist() == [0.0] and np.array_equal(begin.obs, frames[before - 1])
    for t in range(before, len(actions)):
        again.send(np.array([LETTERS.index(actions[t])]))
        step = again.recv()
        assert float(step.reward[0]) == rewards[t] and np.array_equal(step.obs, frames[t]) and not step.first[0]
    again.close()


def test_each_simulator_has_every_nth_state_and_begins_the_next_after_an_end():
    states = [start_at(PONG, seed, letters(seed, 10 + seed)) for seed in range(3)]
    group = StartsGroup(PONG, starts(*states), 2)
    first = group.reset([0, 0])
    group._over = [True, False]  # as after an end
    group.send(np.zeros(2, int))
    step = group.recv()
    assert step.first.tolist() == [True, False] and step.reward[0] == 0.0
    third = StartsGroup(PONG, starts(states[2]), 1)
    assert np.array_equal(step.obs[0], third.reset([0]).obs[0]) and not np.array_equal(first.obs[0], step.obs[0])
    group.close()
    third.close()


def test_what_has_changed_is_noticed(tmp_path):
    start = start_at(PONG, 3, letters(3, 90))
    starts(start).save(tmp_path / "Pong.json")
    assert Starts.load(tmp_path / "Pong.json") == starts(start)
    other = "a" if start.actions[40] != "a" else "c"
    for changed in (
        replace(start, sha256="0" * 64),
        replace(start, score=start.score + 1),
        replace(start, actions=start.actions[:40] + other * 20 + start.actions[60:]),
    ):
        group = StartsGroup(PONG, starts(changed), 1)
        with pytest.raises(UsageError, match="start state 0 does not look as it did"):
            group.reset([0])
        group.close()
    with pytest.raises(UsageError, match="of ALE/Pong-v5, not of ALE/Boxing-v5"):
        starts(start).check(AtariEnv(id="ALE/Boxing-v5"))
    with pytest.raises(UsageError, match="4 frames a decision, the agent has 2"):
        starts(start).check(replace(PONG, frame_skip=2))
    with pytest.raises(UsageError, match="record-starts"):
        Starts.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"starts": 1}')
    with pytest.raises(UsageError, match="not what"):
        Starts.load(tmp_path / "bad.json")


@pytest.mark.timeout(120)
def test_an_agent_records_and_is_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "LONGEST", 50)
    run = mh.train(
        "pong-ppo", run_dir="run", total_steps=100, device="cpu", quiet=True, network={"torso": "nips"},
        sampler={"num_envs": 2, "horizon": 25, "decorrelate_steps": 0}, memory={"epochs": 1, "minibatches": 1},
    )  # fmt: skip
    assert cli.record_starts(["Pong", "--run", "run", "--number", "3"]) == 0
    assert "starts/Pong.json: 3 start states of ALE/Pong-v5 by pong-ppo at step 100" in capsys.readouterr().out
    kept = Starts.load(tmp_path / "starts" / "Pong.json")
    assert len({state.seed for state in kept.states}) == 3 and all(1 <= len(state.actions) <= 50 for state in kept.states)
    shortest = min(len(state.actions) for state in kept.states)
    assert len({state.actions[:shortest] for state in kept.states}) > 1 or shortest < 5  # other games, not one again and again
    monkeypatch.setattr("manyhands.envs.starts.MOST_FRAMES", 600)  # games of Pong are long
    assert cli.evaluate([str(run.directory), "--protocol", "human-starts", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["episodes"] == 3 and told["truncated"] == 3 and "not public" in told["starts"]
    # The cap counts from the recording's beginning.
    assert told["steps"] == [150 - len(state.actions) for state in kept.states]
    with pytest.raises(UsageError, match="--starts is for"):
        run.evaluate(starts="starts/Pong.json")


PERSON = """
import threading, time
import pygame
from manyhands import cli

def leave():
    while not pygame.display.get_init() or pygame.display.get_surface() is None:
        time.sleep(0.05)
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_d))
    time.sleep(4)
    pygame.event.post(pygame.event.Event(pygame.QUIT))

threading.Thread(target=leave, daemon=True).start()
raise SystemExit(cli.record_starts(["Pong", "--number", "2", "--out", "mine.json"]))
"""


@pytest.mark.timeout(120)
def test_a_person_plays_in_a_window(tmp_path):
    pytest.importorskip("pygame")
    environment = {**os.environ, "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", PERSON], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    kept = Starts.load(tmp_path / "mine.json")
    assert len(kept.states) == 2 and kept.by.startswith("a person")
    assert any(set(state.actions) != {"a"} for state in kept.states)  # a key was down
