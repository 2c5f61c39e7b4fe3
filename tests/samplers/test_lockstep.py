"""Rollouts of scripted environments whose returns are known, and the equality of serial, batched and alternating."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from manyhands.algos.actor_critic import ActorCritic
from manyhands.envs.atari import AtariEnv
from manyhands.envs.gym import GymEnv
from manyhands.envs.snake import SnakeEnv, SnakeGroup
from manyhands.maths.stacking import rollout_stacks, stacked
from manyhands.samplers.lockstep import LockstepSampler
from manyhands.samplers.serving import Beside
from manyhands.types import EnvSpec
from tests.conftest import Corridor, Eventful, FixedPolicy
from tests.gpu import DEVICES, GPU

CPU = torch.device("cpu")


def corridors(sizes, length, end):
    return [GymEnv(id="custom").make(n, factory=lambda: Corridor(length, end)) for n in sizes]


def rollouts(sampler, policy, count):
    full = (item for item in sampler.run(policy) if item is not None)
    return [copy.deepcopy(next(full)) for _ in range(count)]  # a rollout's buffers are used again


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_rollout_by_hand(end):
    """Episodes of two steps with rewards 1, 2, then a slot that only resets."""
    sampler = LockstepSampler(corridors([1], 2, end), horizon=6, gamma=0.5, seed=0, device=CPU)
    (r,) = rollouts(sampler, FixedPolicy(), 1)
    assert r.obs[:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert r.first[:, 0].tolist() == [True, False, False, True, False, False, True]
    assert r.reward[:, 0].tolist() == [1, 2, 0, 1, 2, 0]
    assert r.weight[:, 0].tolist() == [1, 1, 0, 1, 1, 0]
    assert r.cut[:, 0].tolist() == [False, True, True, False, True, True]
    last = 0.0 if end == "terminated" else 0.5
    assert r.discount[:, 0].tolist() == [0.5, last, 0.0, 0.5, last, 0.0]
    assert r.steps == 4 and [e.raw_return for e in r.episodes] == [3.0, 3.0] and r.episodes[0].steps == 2
    assert r.version.unique().tolist() == [7]


class OneValue(torch.nn.Module):
    """The policy's own value of a state, as FixedPolicy says it."""

    def forward(self, obs):
        return torch.zeros(len(obs), 2), obs[:, 0] * 10 + obs[:, 1]


@pytest.mark.parametrize(("end", "expected"), [("terminated", [2.0, 2.0]), ("truncated", [7.0, 12.0])])
def test_returns_at_an_end_by_hand(end, expected):
    """A truncated episode bootstraps from its true last observation (value 20), a terminated one from nothing."""
    sampler = LockstepSampler(corridors([1], 2, end), horizon=3, gamma=0.5, seed=0, device=CPU)
    (r,) = rollouts(sampler, FixedPolicy(), 1)
    batch = ActorCritic(gamma=0.5).prepare(OneValue(), r)
    # terminated: R1 = 2, R0 = 1 + 0.5*2 = 2; truncated: R1 = 2 + 0.5*20 = 12, R0 = 1 + 0.5*12 = 7
    assert batch.value_target[:2].tolist() == expected
    assert batch.weight.tolist() == [1, 1, 0]


def test_the_rollouts_end_bootstraps_and_the_next_goes_on():
    sampler = LockstepSampler(corridors([1], 50, "terminated"), horizon=2, gamma=0.5, seed=0, device=CPU)
    one, two = rollouts(sampler, FixedPolicy(), 2)
    batch = ActorCritic(gamma=0.5).prepare(OneValue(), one)
    # R1 = 2 + 0.5 * V(position 2) = 2 + 10, R0 = 1 + 0.5 * 12
    assert batch.value_target.tolist() == [7.0, 12.0]
    assert two.obs[:, 0, 0].tolist() == [2, 3, 4]


def snake_sampler(sizes, overlap=True, decorrelate=0, device="cpu", **options):
    groups = [SnakeGroup(SnakeEnv(board=5, patience=20, stack=3), n) for n in sizes]
    return LockstepSampler(groups, 16, 0.99, 3, torch.device(device), overlap=overlap, decorrelate_steps=decorrelate, **options)


@pytest.mark.parametrize(("sizes", "overlap"), [([1] * 5, False), ([3, 2], True), ([1] * 5, True)])
@pytest.mark.parametrize("decorrelate", [0, 9])
def test_serial_and_alternating_equal_batched(sizes, overlap, decorrelate):
    reference = rollouts(snake_sampler([5], decorrelate=decorrelate), FixedPolicy(4), 3)
    other = rollouts(snake_sampler(sizes, overlap, decorrelate), FixedPolicy(4), 3)
    for a, b in zip(reference, other, strict=True):
        for name in ("obs", "first", "action", "reward", "discount", "cut", "weight", "version"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert torch.equal(a.extras["value"], b.extras["value"])
        key = lambda e: (e.simulator, e.steps, e.raw_return)  # noqa: E731
        assert sorted(a.episodes, key=key) == sorted(b.episodes, key=key)


@pytest.mark.parametrize("device", DEVICES)
def test_simulators_elsewhere_than_their_frames_are_served_the_same(device):
    env = AtariEnv(id="ALE/Breakout-v5", noop_max=5, max_frames=200, life_loss=True).resolved()

    def sampled(far, device):
        sampler = LockstepSampler([env.make(3), env.make(2)], 8, 0.99, 3, torch.device(device))
        for buffer in sampler._buffers:
            buffer.far, buffer.stacks = far, None
        results = [
            {name: x.cpu().clone() for name, x in {**vars(r), **r.extras}.items() if isinstance(x, torch.Tensor)}
            for r in itertools.islice((r for r in sampler.run(FixedPolicy(4)) if r is not None), 12)
        ]
        sampler.close()
        return results

    reference = sampled(False, "cpu")
    assert any(bool(r["first"].any()) for r in reference[1:])  # games began
    for a, b in zip(reference, sampled(True, device), strict=True):
        assert a.keys() == b.keys() >= {"obs", "first", "action", "value"}
        for name in a:
            assert torch.equal(a[name], b[name]), name


def tensors(rollout):
    return {name: x.clone() for name, x in {**vars(rollout), **rollout.extras}.items() if isinstance(x, torch.Tensor)}


def same(a, b):
    return all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a.keys() - {"stacks"})  # those only CPUs have


def eventful_sampler(sizes, horizon, overlap, device="cpu", beside=False):
    env = SnakeEnv(board=5, patience=7, stack=3)
    there = torch.device(device)
    if beside:  # on the GPU, or what is compared with it
        groups = [replace(env, on_device=True).make(n, device=there) for n in sizes]
    else:
        groups = [Eventful(SnakeGroup(env, n)) for n in sizes]
    return LockstepSampler(groups, horizon, 0.9, 3, there, reward_clip=2.0, life_loss=True, overlap=overlap)


GROUPS = pytest.mark.parametrize(("sizes", "overlap"), [([3, 2], True), ([1, 1], False)])


@GROUPS
@pytest.mark.parametrize("horizon", [1, 2, 7])
@pytest.mark.parametrize(
    ("device", "beside"), [("cpu", False), pytest.param("cuda", False, marks=GPU), pytest.param("cuda", True, marks=GPU)]
)
def test_a_rollout_stays_what_it_is_until_the_next_but_one(device, beside, horizon, sizes, overlap):
    """And is the same wherever the simulators are."""
    count = max(6, 28 // horizon)
    reference = rollouts(eventful_sampler(sizes, horizon, overlap, beside=beside), Summing(4), count)
    sampler = eventful_sampler(sizes, horizon, overlap, device, beside)
    assert sampler.far == (device == "cuda" and not beside)
    held = before = None
    found = (r for r in sampler.run(Summing(4)) if r is not None)
    for expected, rollout in zip(reference, found, strict=False):
        assert held is None or same(before, tensors(held))
        held, before = rollout, tensors(rollout)
        assert same(tensors(expected), before)
        assert (expected.steps, expected.episodes) == (rollout.steps, rollout.episodes)
    assert sum(len(r.episodes) for r in reference) > 1


@GPU
@GROUPS
@pytest.mark.parametrize("horizon", [1, 2, 7])
def test_whoever_learns_waits_for_what_is_acted_aside(horizon, sizes, overlap):
    count = max(6, 28 // horizon)
    reference = rollouts(eventful_sampler(sizes, horizon, overlap), Summing(4), count)
    policy = Summing(4)
    policy.stream = torch.cuda.Stream()
    read, found = None, []
    for rollout in (r for r in eventful_sampler(sizes, horizon, overlap, "cuda").run(policy) if r is not None):
        found.append(tensors(rollout))
        torch.cuda._sleep(1_000)
        if read is not None:  # as the Actor does: the rollout before this one has been read
            policy.stream.wait_event(read)
        read = torch.cuda.Event()
        read.record()
        if len(found) == count:
            break
    assert all(same(tensors(a), b) for a, b in zip(reference, found, strict=True))


@pytest.mark.parametrize("horizon", [1, 2, 3, 5])
def test_horizons_shorter_than_the_stack(horizon):
    """What the policy sees does not depend on how the slots are cut into rollouts."""

    def seen(horizon, slots=30):
        observations = []

        class Watching(FixedPolicy):
            def act(self, obs, epsilon, noise):
                observations.append(obs.clone())
                return super().act(obs, epsilon, noise)

        groups = [SnakeGroup(SnakeEnv(board=5, patience=20, stack=4), 3)]
        items = LockstepSampler(groups, horizon, 0.99, 3, CPU).run(Watching(4))
        while len(observations) < slots:
            next(items)
        return torch.stack(observations[:slots])

    assert torch.equal(seen(horizon), seen(15))


def test_stacks_seen_by_the_policy_restart_with_episodes():
    seen = []

    class Watching(FixedPolicy):
        def act(self, obs, epsilon, noise):
            seen.append(obs.clone())
            return super().act(obs, epsilon, noise)

    results = rollouts(snake_sampler([4]), Watching(4), 3)
    for i, r in enumerate(results):
        gathered = rollout_stacks(replace(r, stacks=None), 0, 17)  # the last is what the bootstrap sees
        assert r.stacks is not None and torch.equal(rollout_stacks(r, 0, 17), gathered)
        for t in range(16):
            assert torch.equal(stacked(r.obs, r.first, (t + 2) * 4 + torch.arange(4), 3), seen[16 * i + t])
    fresh = torch.stack([results[2].first[t + 2] for t in range(16)])
    assert fresh.any()
    for t, b in fresh.nonzero().tolist():
        assert seen[32 + t][b, :2].sum() == 0 and seen[32 + t][b, 2].sum() > 0


def test_clipped_for_learning_reported_raw():
    sampler = LockstepSampler(corridors([2], 3, "terminated"), 4, 0.9, 0, CPU, reward_clip=1.0)
    (r,) = rollouts(sampler, FixedPolicy(), 1)
    assert r.reward.max() == 1.0 and [e.raw_return for e in r.episodes] == [6.0, 6.0]


def test_a_lost_life_cuts_without_a_reset():
    (group,) = corridors([1], 50, "terminated")
    receive = group.recv

    def recv():
        step = receive()
        step.life_lost[:] = step.obs[:, 0] == 2
        return step

    group.recv = recv
    sampler = LockstepSampler([group], 4, 0.5, 0, CPU, life_loss=True)
    (r,) = rollouts(sampler, FixedPolicy(), 1)
    assert r.cut[:, 0].tolist() == [False, True, False, False]
    assert r.discount[:, 0].tolist() == [0.5, 0.0, 0.5, 0.5]
    assert r.weight.sum() == 4 and not r.first[1:].any() and r.episodes == []


def test_a_replaced_simulator_cuts_what_came_before():
    (group,) = corridors([1], 50, "terminated")
    receive = group.recv
    calls = iter(range(100))

    def recv():  # as envs.workers answers when a worker was lost in slot 1
        if next(calls) == 1:
            return group.restart(np.array([True]))
        return receive()

    group.recv = recv
    sampler = LockstepSampler([group], 4, 0.5, 0, CPU)
    (r,) = rollouts(sampler, FixedPolicy(), 1)
    assert r.weight[:, 0].tolist() == [1, 0, 1, 1]
    assert r.cut[:, 0].tolist() == [True, True, False, False]
    assert r.discount[:, 0].tolist() == [0.5, 0.0, 0.5, 0.5]


def test_decorrelation_starts_games_at_different_points():
    sampler = LockstepSampler(corridors([64], 1000, "terminated"), 1, 0.9, 0, CPU, decorrelate_steps=30)
    (r,) = rollouts(sampler, FixedPolicy(), 1)
    positions = r.obs[0, :, 0]
    assert positions.min() >= 0 and positions.max() <= 30
    assert len(positions.unique()) > 20 and r.episodes == []


class Summing(FixedPolicy):
    """Its value says what it saw, all of it."""

    def act(self, obs, epsilon, noise):
        action, extras = super().act(obs, epsilon, noise)
        pixels = torch.arange(obs[0].numel(), device=obs.device).remainder(251)
        return action, {**extras, "value": (obs.flatten(1).long() * pixels).sum(1)}


@pytest.mark.parametrize(("device", "far"), [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=GPU)])
def test_state_continues_bit_for_bit(device, far):
    one, two = (snake_sampler([3, 2], device=device) for _ in range(2))
    for buffer in (*one._buffers, *two._buffers):
        buffer.far = far
    policy = Summing(4)
    source = (item for item in one.run(policy) if item is not None)
    for _ in range(3):
        next(source)
    two.load(one.state())
    for a, b in zip(source, rollouts(two, policy, 3), strict=False):
        for name in ("obs", "first", "action", "reward", "cut"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert torch.equal(a.extras["value"], b.extras["value"]) and a.episodes == b.episodes


@GPU
def test_simulators_on_the_gpu_are_shown_their_stacks_and_explore_as_told():
    """Two slots of the last two of four simulators."""

    class Exploring(FixedPolicy):
        def act(self, obs, epsilon, noise):
            return (noise[:, 0] < epsilon).long(), {"seen": obs.flatten(1).sum(1)}

    there, spec = torch.device("cuda"), EnvSpec("rows", (1, 2), "float32", 2, 2)
    frames = torch.arange(4.0 * 4 * 2).view(4, 4, 1, 2)  # slots, simulators, their frame
    first = torch.zeros(4, 4, dtype=torch.bool)
    first[2, 3] = True
    memory = {"obs": frames.to(there), "first": first.to(there), "action": torch.zeros(2, 4, dtype=torch.int64).to(there)}
    epsilon = torch.tensor([0.0, 0.0, 0.3, 0.6])
    serve = Beside(Exploring(), memory, torch.arange(2, 4).to(there), spec, epsilon.to(there))
    for slot, noise in enumerate((torch.tensor([[0.2, 0.0], [0.7, 0.0]]), torch.tensor([[0.4, 0.0], [0.5, 0.0]]))):
        actions = serve.act(slot, noise.to(there)).cpu().tolist()
        assert actions == [[1, 0], [0, 1]][slot] == memory["action"][slot].cpu().tolist()[2:]
        older = frames[slot, 2:].flatten(1).sum(1) * ~first[slot + 1, 2:]  # not from before a reset
        expected = frames[slot + 1, 2:].flatten(1).sum(1) + older
        assert memory["seen"][slot].cpu().tolist() == [0, 0, *expected.tolist()]
