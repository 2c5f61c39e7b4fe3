import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.maths import policy, random, returns, schedules
from manyhands.maths.stacking import push, stacked, stacked_last


def test_n_step_returns_by_hand():
    # Rewards 1, 2, 3, gamma 0.5, values 10, 20, 30, bootstrap 40.
    reward = torch.tensor([[1.0], [2.0], [3.0]])
    value = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
    cut = torch.zeros(3, 1, dtype=torch.bool)
    advantage = returns.advantages(reward, torch.full((3, 1), 0.5), cut, value, lam=1.0)
    # R2 = 3 + 20 = 23, R1 = 2 + 11.5 = 13.5, R0 = 1 + 6.75 = 7.75
    assert (advantage + value[:3]).flatten().tolist() == [7.75, 13.5, 23.0]


def test_gae_by_hand():
    reward = torch.tensor([[1.0], [2.0]])
    value = torch.tensor([[4.0], [2.0], [8.0]])
    advantage = returns.advantages(reward, torch.full((2, 1), 0.5), torch.zeros(2, 1, dtype=torch.bool), value, lam=0.5)
    # delta1 = 2 + 4 - 2 = 4; delta0 = 1 + 1 - 4 = -2; A0 = -2 + 0.25 * 4 = -1
    assert advantage.flatten().tolist() == [-1.0, 4.0]


def test_termination_has_no_future_and_truncation_has():
    reward = torch.ones(2, 2)
    discount = torch.tensor([[0.0, 0.5], [0.5, 0.5]])  # simulator 0 terminates at step 0, simulator 1 is truncated
    cut = torch.tensor([[True, True], [False, False]])
    value = torch.tensor([[3.0, 3.0], [10.0, 10.0], [20.0, 20.0]])
    advantage = returns.advantages(reward, discount, cut, value, lam=1.0)
    # terminated: 1 - 3; truncated: 1 + 0.5 * 10 - 3; afterwards both: 1 + 0.5 * 20 - 10
    assert advantage.tolist() == [[-2.0, 3.0], [1.0, 1.0]]


def test_normalise_ignores_weightless_samples():
    x = torch.tensor([1.0, 3.0, 1000.0])
    result = returns.normalise(x, torch.tensor([1.0, 1.0, 0.0]))
    torch.testing.assert_close(result[:2], torch.tensor([-1.0, 1.0]))


def test_clipped_surrogate_by_hand():
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    assert policy.clipped_surrogate(ratio, advantage, 0.2).tolist() == pytest.approx([1.2, 0.5, -1.5, -0.8])


def test_sampling_inverts_the_distribution():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).expand(5, 3)
    noise = torch.tensor([0.0, 0.19, 0.21, 0.71, 0.9999999])
    assert policy.sample(logits, noise).tolist() == [0, 0, 1, 2, 2]


def test_entropy_and_log_prob_by_hand():
    log_probs = torch.log(torch.tensor([[0.25, 0.75]]))
    assert policy.entropy(log_probs).item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert policy.log_prob(log_probs, torch.tensor([1])).item() == pytest.approx(math.log(0.75))


def test_schedules():
    assert schedules.linear(1.0, 0.1, 0.5) == pytest.approx(0.55)
    assert schedules.linear(1.0, 0.0, 2.0) == 0.0
    assert schedules.scaled_rate(7e-4, "sqrt", 320, 80) == pytest.approx(14e-4)
    assert schedules.scaled_rate(7e-4, "linear", 320, 80) == pytest.approx(28e-4)


def test_keys_of_tensors_equal_keys_of_integers():
    simulator, slot = torch.tensor([0, 3, 12345]), torch.tensor([9, 2**40, 1])
    bits = random.uniform(5, random.ACT, simulator, slot, 3)
    for i in range(3):
        for d in range(3):
            state = random._mix((random.key(5, random.ACT) * random._GOLDEN + int(simulator[i]) + random._GOLDEN) & random._MASK)
            for word in (int(slot[i]), d):
                state = random._mix((state * random._GOLDEN + word + random._GOLDEN) & random._MASK)
            assert bits[i, d].item() == (state >> 40) * 2.0**-24


def test_uniform_is_uniform_and_uncorrelated():
    u = random.uniform(1, random.ACT, torch.arange(64).unsqueeze(0), torch.arange(2000).unsqueeze(1), 2)
    counts = torch.histc(u, 50, 0, 1)
    expected = u.numel() / 50
    assert ((counts - expected) ** 2 / expected).sum() < 95  # chi-squared with 49 degrees: p < 1e-4
    for a, b in ((u[..., 0], u[..., 1]), (u[1:, :, 0], u[:-1, :, 0]), (u[:, 1:, 0], u[:, :-1, 0])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.015


def test_env_seeds_differ_and_fit():
    seeds = {random.env_seed(0, random.ENV, i, 0) for i in range(10_000)}
    assert len(seeds) > 9_990 and max(seeds) < 2**31


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stacking_equals_a_naive_stack(data):
    """Against a list of frames that is cleared at every reset."""
    stack = data.draw(st.integers(1, 5))
    length, B = data.draw(st.integers(stack, 14)), data.draw(st.integers(1, 3))
    height = data.draw(st.sampled_from([1, 4]))  # 2 bytes a frame, and 8, which travel as one word
    frames = torch.arange(1, length * B + 1, dtype=torch.uint8).view(length, B, 1, 1, 1).expand(-1, -1, 2, height, 1).contiguous()
    first = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=B, max_size=B), min_size=length, max_size=length)))
    for b in range(B):
        history: list[int] = [0] * stack
        for t in range(length):
            history = [0] * stack if first[t, b] else history
            history = [*history[1:], int(frames[t, b, 0, 0])]
            if t >= stack - 1:
                # Before the first slot nothing is known: compare only what the rows hold.
                seen = stacked(frames, first, torch.tensor([t * B + b]), stack)[0]
                assert seen.shape == (2 * stack, height, 1)
                assert seen[::2, 0].flatten().tolist() == history
    rows = torch.arange(length * B)  # the first ones reach around the ring's end
    last = stacked_last(frames, first, rows, stack)
    assert torch.equal(last, stacked(frames, first, rows, stack))
    assert last.movedim(1, -1).is_contiguous()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pushing_frames_equals_stacking_them(data):
    stack, channels = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    length, B = data.draw(st.integers(stack, 10)), data.draw(st.integers(1, 3))
    frame = data.draw(st.sampled_from([(channels,), (channels, 2, 3)]))  # a vector, an image
    frames = torch.randint(1, 255, (length, B, *frame), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    first = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=B, max_size=B), min_size=length, max_size=length)))
    at = stack - 1
    rows = torch.arange(B)
    pushed = stacked(frames, first, at * B + rows, stack).movedim(1, -1).numpy().copy()
    for t in range(at + 1, length):
        out = np.full_like(pushed, 99)
        push(pushed, frames[t].numpy(), first[t].numpy(), out)
        pushed = out
        assert torch.equal(torch.from_numpy(pushed).movedim(-1, 1), stacked(frames, first, t * B + rows, stack))
