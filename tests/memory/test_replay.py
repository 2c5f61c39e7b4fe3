"""The replay against one that stores everything, and against numbers computed by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.memory.replay import Replay, ReplayConfig, choose_device, replay_bytes
from manyhands.types import EnvSpec, Rollout, UsageError
from tests.gpu import GPU

CPU = torch.device("cpu")
GAMMA = 0.5


class Story:
    """Random lives of B simulators, told in rollouts, with every observation remembered as a list of frame numbers."""

    def __init__(self, B, stack, seed):
        self.rng = np.random.default_rng(seed)
        self.B, self.stack = B, stack
        self.frames = [[b + 1] for b in range(B)]  # frame numbers, unique modulo 251 within what a ring holds
        self.firsts = [[True] for _ in range(B)]
        self.slots = [[] for _ in range(B)]  # (action, reward, discount, cut, weight)
        self.counter = B
        self.ended = [False] * B

    def step(self, b):
        self.counter += 1
        if self.ended[b]:
            slot, first, self.ended[b] = (0, 0.0, 0.0, True, 0.0), True, False
        else:
            end = self.rng.choice(["goes on", "goes on", "goes on", "terminated", "truncated", "life lost"])
            over = end in ("terminated", "life lost")
            slot = (int(self.rng.integers(4)), float(self.rng.integers(-3, 4)), 0.0 if over else GAMMA, end != "goes on", 1.0)
            first, self.ended[b] = False, end in ("terminated", "truncated")
        self.slots[b].append(slot)
        self.frames[b].append(self.counter % 251 + 1)
        self.firsts[b].append(first)

    def rollout(self, T):
        begin = len(self.slots[0])
        for _ in range(T):
            for b in range(self.B):
                self.step(b)
        H = self.stack - 1

        def window(rows):
            return torch.tensor([[rows[b][t] if t >= 0 else 0 for b in range(self.B)] for t in range(begin - H, begin + T + 1)])

        columns = [torch.tensor([[self.slots[b][begin + t][i] for b in range(self.B)] for t in range(T)]) for i in range(5)]
        action, reward, discount, cut, weight = columns
        return Rollout(
            obs=window(self.frames).to(torch.uint8).view(H + T + 1, self.B, 1, 1, 1).expand(-1, -1, 1, 2, 2).contiguous(),
            first=window(self.firsts).bool(),
            action=action,
            reward=reward.float(),
            discount=discount.float(),
            cut=cut.bool(),
            weight=weight.float(),
            extras={},
            version=torch.zeros(T, self.B, dtype=torch.int64),
            steps=int(weight.sum()),
            stack=self.stack,
        )

    def stack_at(self, b, t):
        seen = []
        for i in range(t, t - self.stack, -1):
            seen.append(self.frames[b][i])
            if self.firsts[b][i]:
                break
        return [0] * (self.stack - len(seen)) + seen[::-1]

    def transition(self, b, t, n):
        """(obs, action, reward, discount, next obs), from the whole story."""
        total, discount, k = 0.0, 1.0, t
        while True:
            _, reward, d, cut, _ = self.slots[b][k]
            total, discount, k = total + discount * reward, discount * d, k + 1
            if cut or k == t + n:
                return self.stack_at(b, t), self.slots[b][t][0], total, discount, self.stack_at(b, k)


def replay_of(story, capacity, n=1, prioritized=False, batch=64, **options):
    spec = EnvSpec("story", (1, 2, 2), "uint8", story.stack, 4)
    config = ReplayConfig(
        capacity=capacity, batch=min(batch, capacity), n_step=n, warmup_steps=1, prioritized=prioritized, **options
    )
    return Replay(config, spec, story.B, CPU, CPU, seed=0, total_steps=10_000)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_equals_a_replay_that_stores_everything(data):
    B, stack, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    slots = data.draw(st.integers(n + 6, 24))
    story = Story(B, stack, data.draw(st.integers(0, 1000)))
    prioritized = data.draw(st.booleans())
    replay = replay_of(story, slots * B, n, prioritized)
    for T in data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=14)):
        replay.add(story.rollout(T))
        total = len(story.slots[0])
        newest, oldest = total - n, max(total - n + 1 - slots, 0)
        fit = {(b, t) for b in range(B) for t in range(oldest, newest + 1) if story.slots[b][t][4]}
        assert len(replay) == max(newest + 1 - oldest, 0) * B
        if not fit:
            continue
        batch = replay.draw()
        drawn = set()
        for i in range(len(batch.keys)):
            if batch.weight[i] == 0:
                assert not prioritized  # all tries of a uniform draw hit resets
                continue
            row, b = divmod(int(batch.keys[i]), B)
            t = next(t for t in range(newest, oldest - 1, -1) if t % (slots + n + stack - 1) == row)
            drawn.add((b, t))
            obs, action, reward, discount, after = story.transition(b, t, n)
            assert batch.obs[i, :, 0, 0].tolist() == obs and batch.next_obs[i, :, 1, 1].tolist() == after
            assert int(batch.action[i]) == action and float(batch.reward[i]) == reward and float(batch.discount[i]) == discount
        assert drawn <= fit
        if prioritized:
            replay.feedback(batch.keys, batch.keys.float() % 5)  # equal keys, equal priorities


def uniform_story(length=400):
    story = Story(2, 1, 3)
    replay_args = story.rollout(length)
    return story, replay_args


def chi_square(observed, expected):
    return float(((observed - expected) ** 2 / expected).sum())


def test_uniform_draws_are_uniform():
    story, rollout = uniform_story(60)
    replay = replay_of(story, 120, batch=100)
    replay.add(rollout)
    valid = rollout.weight.flatten() > 0
    counts = torch.zeros(replay._length * 2)
    for _ in range(400):
        batch = replay.draw()
        counts += torch.bincount(batch.keys[batch.weight > 0], minlength=len(counts))
    n = int(valid.sum())
    assert counts[: len(valid)][~valid].sum() == 0
    # mean n - 1, deviation √(2(n - 1)): six deviations never happen by chance
    assert chi_square(counts[: len(valid)][valid], counts.sum() / n) < n + 6 * (2 * n) ** 0.5


def test_prioritized_draws_follow_priorities():
    story, rollout = uniform_story(60)
    replay = replay_of(story, 120, prioritized=True, batch=100, alpha=0.5)
    replay.add(rollout)
    keys = (rollout.weight.flatten() > 0).nonzero().squeeze(1)
    td = torch.arange(len(keys)).float() + 1
    replay.feedback(keys, td)
    counts = torch.zeros(replay._length * 2)
    for _ in range(400):
        counts += torch.bincount(replay.draw().keys, minlength=len(counts))
    expected = td.sqrt() / td.sqrt().sum() * 40_000
    n = len(keys)
    assert counts.sum() == counts[keys].sum()
    assert chi_square(counts[keys], expected) < n + 6 * (2 * n) ** 0.5  # stratified draws have less than a multinomial's


def test_importance_weights_by_hand():
    """Priorities 1 and 4, α = ½: drawn 1/3 and 2/3 of the time. β = 0.4 at the start: (2·1/3)^-0.4 and (2·2/3)^-0.4."""
    story = Story(1, 1, 0)
    story.step = lambda b: (
        story.slots[b].append((0, 1.0, GAMMA, False, 1.0)),
        story.frames[b].append(2),
        story.firsts[b].append(False),
    )
    replay = replay_of(story, 30, prioritized=True, batch=30, alpha=0.5, beta=0.4)
    rollout = story.rollout(2)
    replay.add(rollout)
    replay._steps = 0  # progress 0
    replay.feedback(torch.tensor([0, 1]), torch.tensor([1.0, 4.0]))
    batch = replay.draw()
    weights = {int(k): float(w) for k, w in zip(batch.keys, batch.weight, strict=True)}
    assert (batch.keys == 0).sum() == 10
    assert weights[0] == pytest.approx(1.0) and weights[1] == pytest.approx((4 / 3) ** -0.4 / (2 / 3) ** -0.4, rel=1e-4)


def test_n_step_sums_by_hand():
    """Rewards 1 2 3 …, γ = ½: three steps give 1 + 2/2 + 3/4; a termination at the second gives 1 + 2/2 and no bootstrap; a
    truncation there the same, bootstrapped with ¼ from the true last observation."""
    for end, discount in (("goes on", 0.125), ("terminated", 0.0), ("truncated", 0.25)):
        story = Story(1, 1, 0)
        cut = end != "goes on"
        script = [
            (0, 1.0, GAMMA, False, 1.0),
            (0, 2.0, 0.0 if end == "terminated" else GAMMA, cut, 1.0),
            (0, 0.0, 0.0, True, 0.0) if cut else (0, 3.0, GAMMA, False, 1.0),
            (0, 4.0, GAMMA, False, 1.0),
        ]

        def step(b, story=story, script=script):
            i = len(story.slots[b])
            story.slots[b].append(script[i])
            story.frames[b].append(i + 10)
            story.firsts[b].append(script[i][4] == 0)

        story.step = step
        replay = replay_of(story, 20, n=3)
        replay.add(story.rollout(4))
        batch = replay.draw()  # 20 of the two slots whose three steps are over
        i = (batch.keys == 0).nonzero()[0]
        assert float(batch.reward[i]) == (2.0 if cut else 2.75) and float(batch.discount[i]) == discount
        assert int(batch.next_obs[i].flatten()[0]) == (11 if cut else 12)


def test_training_intensity_is_exact_whatever_the_shape():
    for B, T, batch, intensity in ((1, 4, 32, 8.0), (3, 5, 7, 2.5), (16, 2, 512, 8.0), (4, 1, 8, 8.0)):
        story = Story(B, 1, 1)
        spec = EnvSpec("story", (1, 2, 2), "uint8", 1, 4)
        config = ReplayConfig(capacity=2000, batch=batch, intensity=intensity, warmup_steps=100)
        pauses = T + 1
        replay = Replay(config, spec, B, CPU, CPU, 0, 10_000, pauses)
        steps = taken = 0
        while steps < 1500:
            rollout = story.rollout(T)
            steps += rollout.steps
            replay.add(rollout)
            due = int(max(steps - 100, 0) * intensity / batch)
            for _ in range(pauses):
                while replay.next() is not None:
                    taken += 1
                    assert steps > 100
            assert taken == due


def test_a_simulator_that_begins_anew_without_a_reset_tears_nothing():
    """After a resume: the slots whose n steps would reach into the new life are not drawn."""
    for prioritized in (False, True):
        one, two = Story(1, 1, 0), Story(1, 1, 0)
        for story in (one, two):
            story.step = lambda b, s=story: (
                s.slots[b].append((0, 1.0, GAMMA, False, 1.0)),
                s.frames[b].append(len(s.frames[b]) + 1),
                s.firsts[b].append(False),
            )
        replay = replay_of(one, 40, n=3, prioritized=prioritized, batch=40)
        replay.add(one.rollout(10))
        replay.add(two.rollout(10))  # its first frame is a first one
        drawn = set()
        for _ in range(20):
            batch = replay.draw()
            drawn |= set(batch.keys[batch.weight > 0].tolist())
        assert drawn == set(range(7)) | set(range(10, 18))


def test_saved_and_loaded_it_draws_the_same(tmp_path):
    from manyhands import checkpoint

    story = Story(2, 3, 5)
    for prioritized in (False, True):
        spec = EnvSpec("story", (1, 2, 2), "uint8", 3, 4)
        config = ReplayConfig(capacity=60, batch=16, n_step=2, warmup_steps=1, prioritized=prioritized)
        one, two = (Replay(config, spec, 2, CPU, CPU, 0, 1000, 3, saved=True) for _ in range(2))
        for _ in range(12):
            one.add(story.rollout(4))
            batch = one.draw()
            one.feedback(batch.keys, batch.keys.float())
        checkpoint.save(tmp_path / str(prioritized), 1, {"memory": one.state()}, {}, 1, False)
        state, _ = checkpoint.load_newest(tmp_path / str(prioritized), print)
        two.load(state["memory"])
        more = story.rollout(4)
        for replay in (one, two):
            replay.add(more)
        a, b = one.draw(), two.draw()
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("obs", "keys", "weight", "next_obs", "reward"))
        assert one.owed == two.owed


def test_restarted_empty_it_waits_for_a_new_warm_up():
    story = Story(2, 1, 5)
    config = ReplayConfig(capacity=200, batch=8, intensity=4.0, warmup_steps=40)
    spec = EnvSpec("story", (1, 2, 2), "uint8", 1, 4)
    one, two = (Replay(config, spec, 2, CPU, CPU, 0, 1000) for _ in range(2))
    for _ in range(20):
        one.add(story.rollout(4))
        while one.next() is not None:
            pass
    two.load(one.state())
    steps = 0
    while two.owed == 0:
        rollout = story.rollout(1)
        steps += rollout.steps
        two.add(rollout)
    assert 41 <= steps <= 44


def test_a_million_atari_transitions_fit():
    spec = EnvSpec("ALE/Pong-v5", (1, 84, 84), "uint8", 4, 6)
    assert replay_bytes(ReplayConfig(), spec, 256) <= 7.5e9
    assert replay_bytes(ReplayConfig(prioritized=True, n_step=3), spec, 256) <= 7.5e9


def test_where_it_lies_and_that_it_is_refused():
    gpu = torch.device("cuda")
    free = {"cuda": 10, "cpu": 100}
    choose = lambda needed, device="auto", learner=gpu: choose_device(  # noqa: E731
        ReplayConfig(device=device), needed, learner, lambda d: free[d.type]
    )
    assert choose(8).type == "cuda" and choose(9).type == "cpu" and choose(8, learner=CPU).type == "cpu"
    with pytest.raises(UsageError, match=r"90 bytes.*lower it"):
        choose(90)
    with pytest.raises(UsageError, match="9 bytes"):
        choose(9, "cuda")
    with pytest.raises(UsageError, match="learner"):
        choose(1, "cuda", CPU)


def test_impossible_settings():
    for options, word in (
        ({"batch": 50, "capacity": 40, "warmup_steps": 10}, "memory.batch"),
        ({"warmup_steps": 50, "capacity": 40, "batch": 8}, "warmup_steps"),
        ({"intensity": 0.0}, "intensity"),
        ({"alpha": 1.5}, "alpha"),
        ({"n_step": 0}, "n_step"),
    ):
        with pytest.raises(UsageError, match=word):
            ReplayConfig(**options)
    with pytest.raises(UsageError, match="n_step"):
        ReplayConfig(capacity=40, batch=8, warmup_steps=8, n_step=10).check(4, 1)
    with pytest.raises(UsageError, match="one rollout"):
        ReplayConfig(capacity=40, batch=8, warmup_steps=8).check(4, 20)


@GPU
@pytest.mark.parametrize("prioritized", [False, True])
def test_on_a_gpu_it_draws_what_it_draws_on_a_cpu(prioritized):
    gpu = torch.device("cuda")
    spec = EnvSpec("story", (1, 2, 2), "uint8", 3, 4)
    config = ReplayConfig(capacity=60, batch=16, n_step=2, warmup_steps=1, prioritized=prioritized)
    one, two, story = Replay(config, spec, 2, CPU, CPU, 0, 1000), Replay(config, spec, 2, gpu, gpu, 0, 1000), Story(2, 3, 5)
    for _ in range(12):
        rollout = story.rollout(4)
        batches = []
        for replay in (one, two):
            replay.add(rollout)
            batches.append(replay.draw())
            replay.feedback(batches[-1].keys, batches[-1].keys.float())
        a, b = batches
        for name in ("obs", "action", "reward", "discount", "next_obs", "keys"):
            assert torch.equal(getattr(a, name), getattr(b, name).cpu()), name
        torch.testing.assert_close(a.weight, b.weight.cpu())


def steady(story, frames_from=1):
    """A life without ends: reward 1 in every slot, frames numbered."""

    def step(b):
        story.slots[b].append((0, 1.0, GAMMA, False, 1.0))
        story.frames[b].append(len(story.frames[b]) + frames_from)
        story.firsts[b].append(False)

    story.step = step
    return story


def test_a_priority_that_is_not_finite_spoils_nothing():
    replay = replay_of(steady(story := Story(1, 1, 0)), 30, prioritized=True, batch=10)
    replay.add(story.rollout(20))
    replay.feedback(torch.arange(4), torch.tensor([1.0, float("nan"), float("inf"), 2.0]))
    drawn = torch.cat([replay.draw().keys for _ in range(30)])
    assert set(drawn.tolist()) == set(range(20)) - {1, 2}
    assert replay.draw().weight.isfinite().all()


def test_a_simulator_lost_between_two_rollouts_ends_what_came_before():
    """Its reset is the first slot of the next rollout: the three steps before it are cut there, and bootstrapped."""
    story = steady(Story(1, 1, 0))
    replay = replay_of(story, 30, n=3, batch=20)
    replay.add(story.rollout(5))
    lost = story.rollout(5)
    lost.weight[0], lost.discount[0], lost.cut[0], lost.first[1] = 0.0, 0.0, True, True
    replay.add(lost)
    batches = [replay.draw() for _ in range(20)]
    for key, reward, discount, after in ((3, 1.5, 0.25, 6), (4, 1.0, 0.5, 6), (1, 1.75, 0.125, 5)):
        batch, i = next((b, i) for b in batches for i in range(20) if int(b.keys[i]) == key and b.weight[i] > 0)
        assert float(batch.reward[i]) == reward and float(batch.discount[i]) == discount
        assert int(batch.next_obs[i].flatten()[0]) == after


def test_begun_in_the_middle_of_an_episode_it_knows_the_frames_before():
    story = steady(Story(1, 4, 0))
    story.rollout(10)  # lived through before the replay was there
    replay = replay_of(story, 30, batch=20)
    replay.add(story.rollout(6))
    batch = replay.draw()
    for i in range(20):
        t = 10 + int(batch.keys[i])
        assert batch.obs[i, :, 0, 0].tolist() == story.stack_at(0, t)
