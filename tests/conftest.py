"""Small environments with known answers, and helpers shared by the tests."""

from __future__ import annotations

import os
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from tests import processes
from tests.gpu import gpu  # noqa: F401 – a fixture

torch.set_num_threads(1)


class Corridor(gymnasium.Env):
    """Walks 0, 1, 2 … whatever the action; reward t+1 at step t; ends as told. Observation: [position, episode]."""

    def __init__(self, length: int = 3, end: str = "terminated") -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._length, self._end = length, end
        self._episode, self._position = -1, 0

    def _obs(self) -> np.ndarray:
        return np.array([self._position, self._episode], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._position, self._episode = 0, self._episode + 1
        return self._obs(), {}

    def step(self, action):
        self._position += 1
        over = self._position == self._length
        return (
            self._obs(), float(self._position), over and self._end == "terminated", over and self._end == "truncated", {},
        )  # fmt: skip

    def get_state(self) -> dict:
        return {"position": self._position, "episode": self._episode}

    def set_state(self, state: dict) -> None:
        self._position, self._episode = state["position"], state["episode"]


class FixedPolicy:
    """Acts by a rule on the observation; its value of a state is 10 * position + episode."""

    version = 7
    stream = None

    def __init__(self, actions: int = 2) -> None:
        self.actions = actions
        self.batches: list[int] = []

    def act(self, obs, epsilon, noise):
        self.batches.append(len(obs))
        action = (noise[:, 0] * self.actions).long()
        value = obs.flatten(1).float()[:, 0] * 10 + obs.flatten(1).float()[:, 1]
        return action, {"value": value, "log_prob": torch.zeros(len(obs), device=obs.device)}


class Eventful:
    """A group whose simulators have rewards of their own and lose a life with every fifth answer."""

    def __init__(self, group):
        self._group, self._answers = group, 0

    def __getattr__(self, name):
        return getattr(self._group, name)

    def recv(self):
        step = self._group.recv()
        self._answers += 1
        reward = np.asarray(step.reward) * 1.5 + self._answers % 3
        lost = np.full(self.num_envs, self._answers % 5 == 0) & ~np.asarray(step.first)
        return replace(step, reward=reward.astype(np.float32), life_lost=lost)


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """Who makes a learner sets these for the whole process."""
    cudnn = torch.backends.cudnn
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    tf32, deterministic = cudnn.allow_tf32, cudnn.deterministic
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(products)
    cudnn.allow_tf32, cudnn.deterministic = tf32, deterministic


@pytest.fixture(autouse=True)
def nobody_stays_behind():
    """A test that fails leaves no run behind that would slow down the others."""
    yield
    while processes.started:
        process = processes.started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="session")
def cluster():
    """Four raylets on this machine, of which the first is the head."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_health_check_period_ms"] = "500"  # noqa: SIM112
    os.environ["RAY_health_check_failure_threshold"] = "3"  # noqa: SIM112
    common = {"num_cpus": 4, "object_store_memory": 80 * 2**20}
    started = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    started.more = [started.add_node(**common) for _ in range(3)]
    started.common = common
    yield started
    started.shutdown()
