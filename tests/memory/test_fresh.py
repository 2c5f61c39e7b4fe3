import torch

from manyhands.memory.fresh import FreshMemory
from manyhands.types import PolicyBatch, Rollout


def rollout(T=5, B=4, stack=1):
    H = stack - 1
    numbers = torch.arange((H + T + 1) * B, dtype=torch.float32).view(H + T + 1, B, 1)
    zeros = torch.zeros(T, B)
    return Rollout(
        obs=numbers, first=torch.zeros(H + T + 1, B, dtype=torch.bool), action=torch.arange(T * B).view(T, B),
        reward=zeros, discount=zeros, cut=zeros.bool(), weight=zeros + 1, extras={}, version=zeros.long(),
        steps=T * B, stack=stack,
    )  # fmt: skip


def prepare(r):
    x = r.action.flatten().float()
    return PolicyBatch(torch.empty(0), r.action.flatten(), x, x, x, x, r.weight.flatten())


def drain(memory):
    batches = []
    while (batch := memory.next()) is not None:
        batches.append(batch)
    return batches


def test_every_sample_once_per_epoch_with_its_own_observation():
    memory = FreshMemory(prepare, epochs=3, minibatches=4, seed=0)
    memory.add(rollout(stack=2))
    batches = drain(memory)
    assert len(batches) == 12
    orders = []
    for epoch in range(3):
        part = batches[4 * epoch : 4 * epoch + 4]
        order = torch.cat([b.action for b in part])
        assert sorted(order.tolist()) == list(range(20))
        orders.append(order.tolist())
        for b in part:
            # slot t's newest frame is row t + 1 of obs, the one before it row t
            assert b.obs[:, 1].tolist() == (b.action + 4).tolist() and b.obs[:, 0].tolist() == b.action.tolist()
            assert b.advantage.tolist() == b.action.tolist()
    assert orders[0] != orders[1] != orders[2]


def test_uneven_minibatches_lose_nothing():
    memory = FreshMemory(prepare, epochs=1, minibatches=3, seed=0)
    memory.add(rollout())
    assert sorted(x for b in drain(memory) for x in b.action.tolist()) == list(range(20))


def test_one_minibatch_keeps_the_order():
    memory = FreshMemory(prepare, epochs=1, minibatches=1, seed=0)
    memory.add(rollout())
    (batch,) = drain(memory)
    assert batch.action.tolist() == list(range(20))


def test_shuffles_continue_after_a_load():
    one, two = (FreshMemory(prepare, 1, 2, seed=3) for _ in range(2))
    one.add(rollout())
    drain(one)
    two.load(one.state())
    for m in (one, two):
        m.add(rollout())
    assert [b.action.tolist() for b in drain(one)] == [b.action.tolist() for b in drain(two)]


def test_overlapped_a_rollout_is_learned_from_evenly_while_the_next_is_sampled():
    memory = FreshMemory(prepare, epochs=2, minibatches=4, seed=0, pauses=5)
    reference = FreshMemory(prepare, epochs=2, minibatches=4, seed=0)
    for number in range(3):
        one = rollout()
        memory.add(one)
        assert drain(memory) == []  # everything of the rollout before is learned; the new one waits for the pauses
        reference.add(one)
        expected = [batch.action.tolist() for batch in drain(reference)]
        pauses = [[batch.action.tolist() for batch in drain(memory)] for _ in range(5)]
        assert [len(pause) for pause in pauses] == [2, 2, 1, 2, 1] and [x for pause in pauses for x in pause] == expected, number


def test_overlapped_fewer_updates_than_pauses_are_spread():
    memory = FreshMemory(prepare, epochs=1, minibatches=4, seed=0, pauses=8)
    memory.add(rollout())
    assert drain(memory) == [] and [len(drain(memory)) for _ in range(8)] == [1, 0] * 4


def test_overlapped_what_is_left_is_learned_before_the_next():
    memory = FreshMemory(prepare, epochs=2, minibatches=4, seed=0, pauses=5)
    memory.add(rollout())
    assert drain(memory) == [] and len(drain(memory)) == 2
    memory.add(rollout())
    assert len(drain(memory)) == 6 and len(drain(memory)) == 2


def test_overlapped_acting_is_behind_by_the_updates_of_one_rollout():
    from manyhands.build import Custom, make_learner
    from manyhands.config import load_recipe

    memory = {"overlap": True, "epochs": 2, "minibatches": 3}
    learner = make_learner(load_recipe("cartpole-ppo", {"sampler": {"num_envs": 2, "horizon": 8}, "memory": memory}), Custom())
    try:
        lags, acted, parameters = [], [], []
        for item in learner.run():
            if item is None:
                parameters.append(learner.actor._model.parameters.clone())
            else:
                assert all(torch.equal(p, parameters[0]) for p in parameters)  # updates in between do not reach whoever acts
                parameters.clear()
                acted.append(int(item.version.unique()))
                lags.append(learner.clock.updates - acted[-1])
            if len(acted) == 6:
                break
    finally:
        learner.close()
    # Rollout k is acted with the parameters after k - 1 rollouts of 6 updates; the first two with the initial ones.
    assert acted == [0, 0, 6, 12, 18, 24] and lags == [0, 6, 6, 6, 6, 6]
