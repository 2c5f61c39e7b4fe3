"""The global replay: proportions, the limiter, priorities of slots that are no more, shards that come and go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manyhands.hosts.inline import InlineHost
from manyhands.hosts.process import GaveUp, give_up_at
from manyhands.memory.remote import AHEAD_BATCHES, RemoteReplay
from manyhands.memory.replay import ReplayConfig
from manyhands.memory.server import SENT, ReplayServer
from manyhands.types import EnvSpec, Rollout, Seat

SPEC = EnvSpec("numbers", (1,), "float32", 1, 2)
CPU = torch.device("cpu")


def rollout(start: int, slots: int, simulators: int = 1) -> Rollout:
    """Simulators that count: the observation is the number of the slot, the reward too."""
    numbers = torch.arange(start, start + slots + 1).float().unsqueeze(1).expand(-1, simulators)
    flags = torch.zeros(slots, simulators, dtype=torch.bool)
    return Rollout(
        obs=numbers.unsqueeze(-1).clone(),
        first=torch.zeros(slots + 1, simulators, dtype=torch.bool),
        action=torch.zeros(slots, simulators, dtype=torch.int64),
        reward=numbers[:-1].clone(),
        discount=torch.full((slots, simulators), 0.9),
        cut=flags,
        weight=torch.ones(slots, simulators),
        extras={},
        version=torch.empty(0),
        steps=slots * simulators,
        stack=1,
    )


def config(**changes) -> ReplayConfig:
    return ReplayConfig(**{"capacity": 1000, "batch": 32, "intensity": 4.0, "warmup_steps": 10, **changes})


class Shards:
    """Replay servers of this process, and whoever uses them."""

    def __init__(self, memory: ReplayConfig, shards: int, actors: int) -> None:
        self.memory, self.host, self.shards = memory, InlineHost(), shards
        self.actors = actors
        for number in range(shards):
            self.start(number, 0)

    def start(self, number: int, life: int, before: tuple[int, int] = (0, 0)) -> None:
        own = (self.memory.share(self.actors), SPEC, 1, 10_000, number, life, before)
        self.host.start(ReplayServer, *own, name=f"replay {number}", door=f"replay {number}")

    def server(self, number: int) -> ReplayServer:
        return self.host._doors[f"replay {number}"].component

    def fill(self, rank: int, what: Rollout, sequence: int = 0) -> None:
        """As an actor would that waits for nobody."""
        arrays = {name: getattr(what, name).numpy() for name in SENT}
        self.server(rank % self.shards).add(rank, 0, sequence, arrays, what.steps)

    def user(self, seat: Seat) -> RemoteReplay:
        places = tuple(self.host.address(f"replay {number}", "") for number in range(self.shards))
        return RemoteReplay(self.memory, places, seat, CPU, 7, 10_000, lambda: 200)


def actor(rank: int, life: int = 0) -> Seat:
    return Seat(rank, 2, life, learns=False)


LEARNER = Seat(0, 1, acts=False)


def test_draws_are_in_proportion_to_what_each_shard_has():
    shards = Shards(config(capacity=4000, intensity=1e6), 2, 2)
    shards.fill(0, rollout(0, 900))
    shards.fill(1, rollout(10_000, 300))
    learner = shards.user(LEARNER)
    drawn = torch.cat([batch.obs for _ in range(200) if (batch := learner.next()) is not None])
    assert len(drawn) == 200 * 32
    share = (drawn < 10_000).float().mean().item()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / len(drawn)) ** 0.5
    assert len(drawn[drawn < 10_000].unique()) > 850  # all over each shard


def test_prioritized_draws_follow_the_priorities_of_all_shards_together():
    shards = Shards(config(capacity=400, intensity=1e6, prioritized=True, alpha=1.0), 2, 2)
    shards.fill(0, rollout(0, 100))
    shards.fill(1, rollout(1000, 100))
    learner = shards.user(LEARNER)
    for _ in range(200):  # what has been seen gets 3 on the first shard, 1 on the second
        batch = learner.next()
        learner.feedback(batch.keys, torch.where(batch.obs[:, 0] < 1000, 3.0, 1.0))
    drawn, weights = [], []
    for _ in range(300):
        batch = learner.next()
        drawn.append(batch.obs[:, 0])
        weights.append(batch.weight)
    drawn, weights = torch.cat(drawn), torch.cat(weights)
    share = (drawn < 1000).float().mean().item()
    assert abs(share - 0.75) < 0.03
    rare, common = weights[drawn >= 1000].mean(), weights[drawn < 1000].mean()
    beta = 0.4 + 0.6 * 200 / 10_000
    assert rare.item() == pytest.approx(1.0, abs=1e-3) and common.item() == pytest.approx(3**-beta, rel=0.02)


def test_the_capacity_does_not_depend_on_the_number_of_actors():
    for actors in (1, 2, 4):
        shards = Shards(config(capacity=200, intensity=1e6), 2, actors)
        for rank in range(actors):
            for start in range(0, 400, 50):
                shards.fill(rank, rollout(start, 50), start)
        assert sum(shards.server(number).report()["size"] for number in range(2)) == 200


def test_learners_wait_until_the_data_has_paid_and_the_ratio_is_kept():
    shards = Shards(config(), 2, 2)
    one, two, learner = shards.user(actor(0)), shards.user(actor(1)), shards.user(LEARNER)
    assert learner.next() is None
    batches = 0
    for start in range(0, 200, 10):
        one.add(rollout(start, 10))
        two.add(rollout(start, 10))
        while learner.next() is not None:
            batches += 1
    assert batches == int(4.0 * (400 - 10) / 32)


def test_actors_wait_when_they_are_too_far_ahead():
    shards = Shards(config(), 1, 1)
    user = shards.user(Seat(0, 1, learns=False))
    room = 10 + AHEAD_BATCHES * 32 / 4.0
    user.add(rollout(0, int(room)))
    give_up_at(0.0)
    try:
        with pytest.raises(GaveUp):
            user.add(rollout(int(room), 5))
    finally:
        give_up_at(float("inf"))


def test_a_rollout_that_is_sent_twice_is_added_once():
    server = ReplayServer(config(), SPEC, 1, 1000, 0, 0)
    arrays = {name: getattr(rollout(0, 20), name).numpy() for name in SENT}
    for _ in range(2):
        told = server.add(0, 0, 1, arrays, 20)
    assert told["added"] == 20
    assert server.add(0, 1, 1, arrays, 20)["added"] == 40  # another life's first


def test_priorities_of_overwritten_slots_and_of_another_life_are_left_alone():
    server = ReplayServer(config(capacity=20, prioritized=True, warmup_steps=5, batch=8), SPEC, 1, 1000, 0, 3)
    for sequence in range(2):
        arrays = {name: getattr(rollout(10 * sequence, 10), name).numpy() for name in SENT}
        server.add(0, 0, sequence, arrays, 10)
    told = server.sample(8)["arrays"]
    mass = server.report()["mass"]
    given = (told["actor"], told["keys"], told["slots"], np.full(8, 100.0))
    server.feedback(2, *given)
    assert server.report()["mass"] == mass
    for sequence in range(2, 5):  # everything drawn above is overwritten
        arrays = {name: getattr(rollout(10 * sequence, 10), name).numpy() for name in SENT}
        server.add(0, 0, sequence, arrays, 10)
    mass = server.report()["mass"]
    server.feedback(3, *given)
    assert server.report()["mass"] == mass


def test_a_shard_that_was_replaced_is_drawn_from_again_and_the_ratio_goes_on():
    shards = Shards(config(), 2, 2)
    one, two, learner = shards.user(actor(0)), shards.user(actor(1)), shards.user(LEARNER)
    one.add(rollout(0, 40))
    two.add(rollout(1000, 40))
    drawn = sum(1 for _ in range(100) if learner.next() is not None)
    old = shards.server(1).report()
    shards.start(1, 1, (old["added"], old["drawn"]))
    learner = shards.user(Seat(0, 1, 1, acts=False))  # the learner was lost with it
    learner._callers[1] = None  # a connection to a process would have broken
    two._lines.close()
    two.add(rollout(1040, 40))
    batches = [batch for _ in range(100) if (batch := learner.next()) is not None]
    assert drawn + len(batches) == int(4.0 * (120 - 10) / 32)
    assert torch.cat([batch.obs for batch in batches]).max() >= 1040  # the new one's
