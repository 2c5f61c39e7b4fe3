"""Served in whatever order: every simulator's pieces are what lock-step sampling sees of it."""

from functools import partial

import numpy as np
import pytest
import torch

from manyhands.envs.atari import AtariEnv
from manyhands.envs.gym import GymEnv
from manyhands.envs.partial import AnyOf, AtariPart
from manyhands.envs.workers import WorkerGroup
from manyhands.samplers.lockstep import LockstepSampler
from manyhands.samplers.pipelined import PipelinedSampler
from tests.conftest import Corridor, Eventful, FixedPolicy
from tests.gpu import GPU

CPU = torch.device("cpu")


class Seeded(Corridor):
    """Shows the seed of its first reset, so that simulators can be told apart, and is slower the larger it is."""

    def reset(self, *, seed=None, options=None):
        self._seed = getattr(self, "_seed", None) or seed
        return super().reset(seed=seed)

    def step(self, action):
        import time

        time.sleep(0.0005 * (self._seed % 5))
        return super().step(action)

    def _obs(self):
        return np.array([self._position, self._seed % 10_007], np.float32)


class ByObservation(FixedPolicy):
    """Acts by the random numbers it is given; also tells what it saw."""

    def act(self, obs, epsilon, noise):
        action, extras = super().act(obs, epsilon, noise)
        return action, {**extras, "seen": obs.flatten(1).float().sum(1), "noise": noise[:, 0].clone()}


def windows(rollout, T, H):
    """Each simulator's stretches of T slots: everything that is learned from, as bytes."""
    slots, B = rollout.action.shape
    result = []
    for b in range(B):
        for t in range(0, slots - T + 1, T):
            parts = [rollout.obs[H + t : H + t + T + 1, b], rollout.first[H + t + 1 : H + t + T + 1, b]]
            fields = (rollout.action, rollout.reward, rollout.discount, rollout.weight, *rollout.extras.values())
            parts += [x[t : t + T, b] for x in fields]
            result.append(b"".join(np.ascontiguousarray(x.cpu().numpy()).tobytes() for x in parts))
    return result


def workers(n, serve):
    make = partial(GymEnv(id="custom").make, factory=partial(Seeded, 5))
    return AnyOf([WorkerGroup(make, serve, 1, 10.0, 0, "seeded") for _ in range(0, n, serve)])


def check(group, reference, T, pieces, rollouts, policy=ByObservation, device="cpu", far=False):
    H = group.spec.stack - 1
    learned = {"reward_clip": 2.0, "life_loss": True}
    sampler = PipelinedSampler(group, T, pieces, 0.9, 7, torch.device(device), **learned)
    sampler._far |= far  # served as if the simulators were elsewhere than their frames
    stream = (r for r in sampler.run(policy()) if r is not None)
    told = [next(stream) for _ in range(rollouts)]
    found = [w for r in told for w in windows(r, T, H)]
    sampler.close()
    whole = LockstepSampler([reference], T * 6 * rollouts, 0.9, 7, CPU, **learned)
    expected = windows(next(r for r in whole.run(policy()) if r is not None), T, H)
    whole.close()
    assert len(set(expected)) == len(expected)
    assert len(set(found)) == len(found) == pieces * rollouts and set(found) <= set(expected)
    return told


def test_pieces_equal_lock_step_sampling():
    make = partial(GymEnv(id="custom").make, factory=partial(Seeded, 5))
    told = check(workers(6, 2), make(6), T=4, pieces=5, rollouts=8)
    episodes = [e for r in told for e in r.episodes]
    assert episodes and all(e.raw_return == 15 and e.steps == 5 for e in episodes)
    assert all(r.queue is not None and r.queue < 5 + 2 for r in told)  # bounded
    assert sum(r.steps for r in told) == sum(int(r.weight.sum()) for r in told)


@pytest.mark.parametrize(("device", "far"), [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=GPU)])
def test_emulators_are_served_in_parts(device, far):
    env = AtariEnv(id="ALE/Breakout-v5", noop_max=5, max_frames=200, life_loss=True).resolved()
    told = check(
        AtariPart(env, 4, 2), env.make(4), 5, pieces=3, rollouts=20, policy=lambda: ByObservation(4), device=device, far=far
    )
    assert told[0].obs.shape[2:] == (1, 84, 84)
    assert any(bool((r.weight == 0).any()) for r in told)  # resets were among them


def test_boards_that_step_later_than_they_are_asked_get_the_actions_that_are_noted():
    from manyhands.envs.snake import SnakeEnv, SnakeGroup

    env = SnakeEnv(board=5, patience=20, stack=3)
    group = AnyOf([Eventful(SnakeGroup(env, 2)) for _ in range(3)])
    check(group, Eventful(SnakeGroup(env, 6)), T=4, pieces=5, rollouts=8, policy=lambda: ByObservation(4), far=True)


@pytest.mark.slow
def test_a_group_that_is_lost_begins_anew(capfd):
    import os
    import signal

    make = partial(GymEnv(id="custom").make, factory=partial(Seeded, 50))
    group = AnyOf([WorkerGroup(make, 1, 1, 10.0, 1, "seeded") for _ in range(3)])
    sampler = PipelinedSampler(group, 4, 3, 0.9, 7, CPU)
    stream = (r for r in sampler.run(ByObservation()) if r is not None)
    next(stream)
    os.kill(group.groups[1]._children[0].pid, signal.SIGKILL)
    told = [next(stream) for _ in range(6)]
    sampler.close()
    assert sampler.replaced_workers == 1 and "SIGKILL" in capfd.readouterr().err
    resets = sum(int((r.weight == 0).sum()) for r in told)
    assert resets == 1
