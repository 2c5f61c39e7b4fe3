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
