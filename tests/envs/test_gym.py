"""Gymnasium groups, inline and in worker processes: autoreset, failures, hangs, kills, spaces, saved states."""

import os
import signal
import time

import gymnasium
import numpy as np
import pytest

from manyhands.envs.gym import GymEnv
from manyhands.envs.workers import WorkerGroup
from manyhands.types import RunError, UsageError
from tests.conftest import Corridor


def workers(factory, num_envs=3, processes=2, timeout_s=20.0, restarts=2):
    return WorkerGroup(lambda n: GymEnv(id="custom").make(n, factory=factory), num_envs, processes, timeout_s, restarts, "custom")


def rows(group, slots):
    """(obs, reward, terminated, truncated, first) of the first simulator, slot by slot."""
    group.reset([0] * group.num_envs)
    result = []
    for _ in range(slots):
        group.send(np.zeros(group.num_envs, np.int64))
        s = group.recv()
        result.append((s.obs[0].tolist(), float(s.reward[0]), bool(s.terminated[0]), bool(s.truncated[0]), bool(s.first[0])))
    return result


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("where", ["inline", "workers"])
def test_the_true_last_observation_comes_before_the_reset(where, end):
    def factory():
        return Corridor(2, end)

    group = GymEnv(id="custom").make(1, factory=factory) if where == "inline" else workers(factory, 1, 1)
    over = (end == "terminated", end == "truncated")
    assert rows(group, 4) == [
        ([1.0, 0.0], 1.0, False, False, False),
        ([2.0, 0.0], 2.0, *over, False),
        ([0.0, 1.0], 0.0, False, False, True),  # only a reset: the action was ignored
        ([1.0, 1.0], 1.0, False, False, False),
    ]
    group.close()


def test_workers_equal_inline():
    inline = GymEnv(id="CartPole-v1").make(5)
    spread = WorkerGroup(lambda n: GymEnv(id="CartPole-v1").make(n), 5, 2, 20.0, 0, "CartPole-v1")
    seeds = [11, 12, 13, 14, 15]
    assert np.array_equal(inline.reset(seeds).obs, spread.reset(seeds).obs)
    for actions in np.random.default_rng(0).integers(0, 2, (60, 5)):
        inline.send(actions), spread.send(actions)
        a, b = inline.recv(), spread.recv()
        for name in ("obs", "reward", "terminated", "truncated", "first"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name
    inline.close(), spread.close()


class Fails(Corridor):
    def step(self, action):
        if self._position == 1:
            raise ZeroDivisionError("the third wheel came off")
        return super().step(action)


def test_a_failure_shows_the_childs_own_traceback():
    group = workers(Fails)
    group.reset([41, 42, 43])
    group.send(np.zeros(3, np.int64))
    group.recv()
    group.send(np.zeros(3, np.int64))
    with pytest.raises(RunError) as error:
        group.recv()
    text = str(error.value)
    assert "the third wheel came off" in text and "seed 41" in text and "in step" in text
    group.close()


class Hangs(Corridor):
    """The first process to reach position 1 hangs; it leaves a mark so that its successor does not."""

    mark = ""

    def step(self, action):
        if self._position == 1 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            time.sleep(600)
        return super().step(action)


def test_a_hanging_worker_is_ended_and_replaced(tmp_path):
    mark = str(tmp_path / "hung")

    def factory():
        env = Hangs(5)
        env.mark = mark
        return env

    group = workers(factory, num_envs=1, processes=1, timeout_s=2.0)
    group.reset([1])
    pid = group._children[0].pid
    for _ in range(2):
        group.send(np.zeros(1, np.int64))
        step = group.recv()
    assert step.first[0] and step.obs[0].tolist() == [0.0, 0.0]  # its simulator answers with a reset
    assert group.replaced == 1 and group._children[0].pid != pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    group.send(np.zeros(1, np.int64))
    assert group.recv().reward[0] == 1.0
    group.close()


def test_a_killed_worker_is_replaced_and_retries_are_bounded():
    group = workers(lambda: Corridor(50), num_envs=4, processes=2, restarts=1)
    group.reset([1, 2, 3, 4])
    os.kill(group._children[1].pid, signal.SIGKILL)
    group.send(np.zeros(4, np.int64))
    step = group.recv()
    assert step.first.tolist() == [False, False, True, True]
    os.kill(group._children[1].pid, signal.SIGKILL)
    group.send(np.zeros(4, np.int64))
    with pytest.raises(RunError, match="SIGKILL"):
        group.recv()
    group.close()


def test_close_leaves_no_process_and_may_be_called_twice():
    group = workers(lambda: Corridor(5))
    pids = [child.pid for child in group._children]
    group.reset([1, 2, 3])
    group.send(np.zeros(3, np.int64))  # still pending
    group.close()
    group.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("where", ["inline", "workers"])
def test_environments_that_offer_their_state_continue(where):
    def make():
        factory = lambda: gymnasium.wrappers.TimeLimit(Corridor(50), 4)  # noqa: E731
        return GymEnv(id="custom").make(3, factory=factory) if where == "inline" else workers(factory)

    one, two = make(), make()
    one.reset([1, 2, 3])
    for _ in range(2):
        one.send(np.zeros(3, np.int64))
        one.recv()
    two.load(one.state())
    for _ in range(4):
        one.send(np.zeros(3, np.int64)), two.send(np.zeros(3, np.int64))
        a, b = one.recv(), two.recv()
        assert np.array_equal(a.obs, b.obs) and np.array_equal(a.truncated, b.truncated) and np.array_equal(a.first, b.first)
    one.close(), two.close()


def test_environments_that_do_not_say_so():
    group = GymEnv(id="CartPole-v1").make(1)
    group.reset([0])
    assert group.state() is None
    group.close()


class Spaces(gymnasium.Env):
    def __init__(self, observation, action):
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


def spec(observation, action=None):
    env = Spaces(observation, action or gymnasium.spaces.Discrete(3))
    return GymEnv(id="custom").make(1, factory=lambda: env).spec


def test_observations_of_every_supported_shape():
    box = gymnasium.spaces.Box
    assert spec(box(0, 255, (12, 10, 3), np.uint8)).frame == (3, 12, 10)
    assert spec(box(0, 255, (3, 12, 10), np.uint8)).frame == (3, 12, 10)
    assert spec(box(0, 255, (12, 10), np.uint8)).frame == (1, 12, 10)
    assert spec(box(-1, 1, (4, 2), np.float64)).frame == (8,)


def test_unsupported_spaces_name_the_remedy():
    box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    with pytest.raises(UsageError, match="Box actions"):
        spec(box, box)
    with pytest.raises(UsageError, match="FlattenObservation"):
        spec(gymnasium.spaces.Dict({"a": box}))
    with pytest.raises(UsageError, match="colours"):
        spec(gymnasium.spaces.Box(0, 255, (7, 9, 5), np.uint8))


def test_unknown_id_suggests_the_nearest():
    with pytest.raises(UsageError, match="CartPole-v1"):
        GymEnv(id="CartPole-v11").check()
    with pytest.raises(UsageError, match="did you mean 'CartPole-v1'"):
        GymEnv(id="Cartpole-v1").check()


def test_a_worker_lost_between_steps_is_replaced_and_answers_with_a_reset():
    group = workers(lambda: Corridor(50), num_envs=4, processes=2)
    group.reset([1, 2, 3, 4])
    group.send(np.zeros(4, np.int64))
    group.recv()
    os.kill(group._children[0].pid, signal.SIGKILL)
    assert group.state() is None  # nothing exact to save this time
    group.send(np.zeros(4, np.int64))
    assert group.recv().first.tolist() == [True, True, False, False]
    assert group.state() is not None and group.replaced == 1
    group.close()


def test_a_limit_applies_to_factories_too():
    group = GymEnv(id="custom", max_episode_steps=2).make(1, factory=lambda: Corridor(50))
    assert [row[3] for row in rows(group, 2)] == [False, True]
