"""What a run keeps is what its simulators showed, were told and gave – also while updates keep a GPU busy beside them."""

import gymnasium
import numpy as np
import pytest
import torch

from manyhands.build import Custom, make_learner
from manyhands.config import load_recipe
from tests.gpu import DEVICES, GPU, REAL

LOWEST, HIGHEST = 20, 60  # steps of a game


class Numbered(gymnasium.Env):
    """Every frame says which game it is of and which step of it; a reward says the step, and the action that was taken."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(6)
        self._game = self._step = 0

    def _frame(self):
        frame = np.full((84, 84), self._step, np.uint8)
        frame[0, :2] = self._game % 251, self._step
        return frame

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._game, self._step = self._game + 1, 0
        self._length = int(self.np_random.integers(LOWEST, HIGHEST))
        return self._frame(), {}

    def step(self, action):
        reward = 10.0 * self._step + float(action)
        self._step += 1
        return self._frame(), reward, self._step == self._length, False, {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("pong-dqn-512", "cpu"),
        pytest.param("pong-dqn-512", "cuda", marks=GPU),
        pytest.param("pong-rainbow-512", "cuda", marks=GPU),
    ],
)
def test_a_replay_holds_what_happened(name, device, monkeypatch):
    """All of it at the end, and each batch when it is drawn: what came last is drawn before the next rollout."""
    load = {"batch": 512, "intensity": 100.0} if device == "cuda" and REAL else {"batch": 16, "intensity": 0.5}
    changes = {
        "device": device,
        "network": {"torso": "nips"},
        "env": {"id": "CartPole-v1", "stack": 4, "workers": 0},
        "sampler": {"num_envs": 12, "horizon": 8, "decorrelate_steps": 0},
        "memory": {"capacity": 1000, "warmup_steps": 300, "device": device, **load},
        "exploration": {"over": 1000},
    }
    recipe = load_recipe(name, changes)
    learner = make_learner(recipe, Custom(env=Numbered))
    replay, drawn = learner.memory, []
    draw = replay.draw

    def look():
        batch = draw()
        parts = batch.obs[:, -1, 0, :2], batch.next_obs[:, -1, 0, :2], batch.next_obs[:, -1, -1, -1:], batch.discount
        drawn.append([x.clone() for x in parts])
        return batch

    monkeypatch.setattr(replay, "draw", look)
    try:
        for _ in learner.run():
            if learner.clock.steps > 1500:  # round the ring, with updates beside it
                break
        begin, end = replay._drawable()
        rows = torch.arange(begin, end, device=replay._device) % replay._length
        game, step, rest = replay._frames[rows].flatten(2)[:, :, [0, 1, -1]].cpu().long().unbind(-1)
        first, action, reward, discount, weight = (
            x[rows].cpu() for x in (replay._first, replay._action, replay._reward, replay._discount, replay._weight)
        )
    finally:
        learner.close()
    assert learner.clock.updates > 30 and (rest == step).all() and (first == (step == 0)).all()
    real = weight > 0
    assert torch.equal(reward[real], (10.0 * step + action)[real])
    goes_on = ~first[1:]
    assert (game[1:] == game[:-1])[goes_on].all() and (step[1:] == step[:-1] + 1)[goes_on].all()
    assert (game[1:] != game[:-1])[~goes_on].all() and (~real[:-1])[~goes_on].all()  # a game's last frame, then the next game
    ended = discount[:-1][real[:-1]] == 0
    assert ended.any() and torch.equal(ended, ~real[1:][real[:-1]])
    seen, seen_next, corner, discount = (torch.cat(parts).cpu() for parts in zip(*drawn, strict=True))
    assert torch.equal(corner, seen_next[:, 1:])  # whole frames
    goes_on = discount > 0
    assert (seen_next[:, 0] == seen[:, 0])[goes_on].all()
    assert (seen_next[:, 1] == seen[:, 1] + recipe.memory.n_step)[goes_on].all() and goes_on.sum() > 400


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_rollout_is_learned_from_as_it_happened(device, overlap, monkeypatch):
    """With γ = 0 the return that is learned is the reward, which says what the frame beside it and the action must be."""
    changes = {
        "device": device,
        "network": {"torso": "nips"},
        "env": {"id": "CartPole-v1", "stack": 4, "workers": 0},
        "sampler": {"num_envs": 12, "horizon": 8, "decorrelate_steps": 0},
        "algorithm": {"gamma": 0.0, "gae_lambda": 0.0},
        "memory": {"epochs": 2, "minibatches": 3, "overlap": overlap},
    }
    learner = make_learner(load_recipe("pong-ppo", changes), Custom(env=Numbered))
    learn, kept = learner._begin_update, []

    def look(batch):
        if device == "cuda":
            torch.cuda._sleep(3_000_000)  # the learner is late: by now others may have overwritten what it reads
        kept.append([x.clone() for x in (batch.weight, batch.obs[:, -1, 0, :2], batch.action, batch.value_target)])
        return learn(batch)

    monkeypatch.setattr(learner, "_begin_update", look)
    try:
        for _ in learner.run():
            if learner.clock.steps > 1000:
                break
    finally:
        learner.close()
    weight, label, action, target = (torch.cat(parts).cpu() for parts in zip(*kept, strict=True))
    real, (game, step) = weight > 0, label.long().unbind(-1)
    torch.testing.assert_close(target[real], (10.0 * step + action)[real], rtol=0, atol=0.01)  # A + v
    assert real.sum() > 1500 and len(game.unique()) > 1
