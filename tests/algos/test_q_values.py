"""Every way of value learning on small problems whose optimal values are known, by the real sampler, replay and learner.

n-step returns are not corrected for random play, so the variants that use them are tried where all policies are worth the same.
"""

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from manyhands.algos.categorical_dqn import CategoricalDQN
from manyhands.algos.dqn import DQN
from manyhands.envs.gym import GymEnv
from manyhands.learner import Learner
from manyhands.memory.replay import Replay, ReplayConfig
from manyhands.nets.flat import flatten
from manyhands.nets.heads import Network
from manyhands.samplers.lockstep import LockstepSampler
from manyhands.stores.local import LocalStore
from manyhands.stores.rules import Adam

CPU = torch.device("cpu")
GAMMA = 0.8
TOLERANCE = 0.06  # of values between -1 and 1

# problem[state][action] = (next state, possible rewards, terminated); the first state is where episodes begin
CHAIN = [  # right, right, right to +1; left ends at once with 0.3
    [(0, [0.3], True), (1, [0.0], False)],
    [(0, [0.0], False), (2, [0.0], False)],
    [(1, [0.0], False), (0, [1.0], True)],
]
CLIFF = [  # along the edge for -0.1 a step: one wrong action falls off with -1, the goal gives +1
    [(1, [-0.1], False), (0, [-1.0], True)],
    [(0, [-1.0], True), (2, [-0.1], False)],
    [(3, [-0.1], False), (0, [-1.0], True)],
    [(0, [-1.0], True), (0, [1.0], True)],
]
LOTTERY = [  # actions do not matter, rewards are drawn
    [(1, [0.0, 0.5], False), (1, [0.0, 0.5], False)],
    [(2, [0.0, 0.4], False), (2, [0.0, 0.4], False)],
    [(0, [-0.5, 0.5], True), (0, [-0.5, 0.5], True)],
]


class Problem(gymnasium.Env):
    def __init__(self, table):
        self.table = table
        self.observation_space = gymnasium.spaces.Box(0, 1, (len(table),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(len(self.table)))  # anywhere: every state is visited often
        return self._obs(), {}

    def step(self, action):
        self.state, rewards, terminated = self.table[self.state][int(action)]
        return self._obs(), float(self.np_random.choice(rewards)), terminated, False, {}

    def _obs(self):
        return np.eye(len(self.table), dtype=np.float32)[self.state]


def optimal(table):
    q = np.zeros((len(table), 2))
    for _ in range(200):
        q = np.array([[np.mean(r) + (not end) * GAMMA * q[s].max() for s, r, end in actions] for actions in table])
    return torch.tensor(q, dtype=torch.float32)


class Table(nn.Module):
    """Features of a state that every head can tell apart."""

    def __init__(self, states):
        super().__init__()
        self.layer = nn.Linear(states, 16)

    def forward(self, x):
        return self.layer(x).relu()


def learned(table, algorithm, updates=1000, **memory):
    torch.manual_seed(0)
    group = GymEnv(id="custom").make(8, factory=lambda: Problem(table))
    sampler = LockstepSampler([group], 8, GAMMA, 0, CPU)
    config = ReplayConfig(capacity=20_000, batch=64, intensity=16.0, warmup_steps=500, **memory)
    steps = 500 + updates * 4
    model = flatten(Network(Table(len(table)), algorithm.head(16, 2)))
    replay = Replay(config, sampler.spec, 8, CPU, CPU, 0, steps, pauses=9)
    store = LocalStore(model, Adam(learning_rate=1e-2, anneal="linear"), steps)
    learner = Learner(algorithm, model, sampler, replay, store, steps, explore=lambda clock: torch.ones(8))
    for _ in learner.run():
        if learner.clock.updates >= updates:
            break
    learner.close()
    with torch.no_grad():
        return algorithm.values(model.net(torch.eye(len(table)))), model


def dqn(**options):
    return DQN(gamma=GAMMA, target_period=25, target_unit="updates", **options)


def categorical(**options):
    return CategoricalDQN(gamma=GAMMA, target_period=25, target_unit="updates", v_min=-3, v_max=3, **options)


PRIORITIZED = {"prioritized": True, "alpha": 0.5}
ONE_STEP = {
    "dqn": (dqn(), {}),
    "squared": (dqn(loss_kind="squared"), {}),
    "double": (dqn(double=True), {}),
    "dueling": (dqn(dueling=True), {}),
    "prioritized": (dqn(), PRIORITIZED),
    "categorical": (categorical(), {}),
    "categorical, double, dueling, prioritized": (categorical(double=True, dueling=True), PRIORITIZED),
}


# Each way on one problem for CI, on both, and all of them together, in `make test-all`.
CASES = [
    pytest.param(name, table, id=f"{name}-{where}", marks=[pytest.mark.slow] if (i + j) % 2 or "," in name else [])
    for i, name in enumerate(ONE_STEP)
    for j, (where, table) in enumerate((("chain", CHAIN), ("cliff", CLIFF)))
]


@pytest.mark.parametrize(("name", "table"), CASES)
def test_converges_to_the_optimal_values(name, table):
    algorithm, memory = ONE_STEP[name]
    values, _ = learned(table, algorithm, **memory)
    torch.testing.assert_close(values, optimal(table), rtol=0, atol=TOLERANCE)


N_STEP = {
    "1-step": (dqn(loss_kind="squared"), {}),  # huber would find something between mean and median
    "3-step": (dqn(loss_kind="squared"), {"n_step": 3}),
    "categorical": (categorical(), {}),
    "ε-rainbow": (categorical(double=True, dueling=True), {"n_step": 3, **PRIORITIZED}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in ("categorical", "ε-rainbow") else []) for n in N_STEP]
)
def test_random_rewards_are_averaged(name):
    algorithm, memory = N_STEP[name]
    values, _ = learned(LOTTERY, algorithm, **memory)
    torch.testing.assert_close(values, optimal(LOTTERY), rtol=0, atol=2 * TOLERANCE)


def test_categorical_learns_the_distribution_not_only_its_mean():
    """The last state pays -0.5 or 0.5, each half of the time."""
    algorithm = categorical(atoms=61)
    _, model = learned(LOTTERY, algorithm)
    with torch.no_grad():
        p = model.net(torch.eye(3))[2, 0].softmax(-1)
    support = torch.linspace(-3, 3, 61)
    for value in (-0.5, 0.5):
        assert float(p[(support - value).abs() < 0.06].sum()) == pytest.approx(0.5, abs=0.1)


def test_acts_greedily_but_for_epsilon():
    class Fixed(nn.Module):
        def forward(self, obs):
            return torch.tensor([[0.0, 2.0, 1.0]]).expand(len(obs), 3)

    noise = torch.tensor([[0.05, 0.0], [0.05, 0.99], [0.3, 0.0], [0.3, 0.0]])
    action, _ = DQN().act(Fixed(), torch.zeros(4, 1), torch.tensor([0.1, 0.1, 0.1, 1.0]), noise)
    assert action.tolist() == [0, 2, 1, 0]


def test_the_target_follows_in_its_own_unit():
    from manyhands.learner import Target
    from manyhands.types import Clock

    model = flatten(nn.Linear(1, 1))
    for unit, other in (("steps", "updates"), ("updates", "steps")):
        target = Target(model, DQN(target_period=10, target_unit=unit))
        before = model.parameters.clone()
        model.parameters.add_(1.0)
        target.follow(Clock(**{unit: 9, other: 99}))
        torch.testing.assert_close(next(target.net.parameters()).flatten(), before[:1])
        target.follow(Clock(**{unit: 10, other: 0}))
        torch.testing.assert_close(next(target.net.parameters()).flatten(), model.parameters[:1])
