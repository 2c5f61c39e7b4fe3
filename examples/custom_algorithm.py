"""A network and an algorithm of your own, as objects:  python examples/custom_algorithm.py

The algorithm changes one term of actor-critic – a Huber loss for the value – and everything around it stays.
"""

from dataclasses import dataclass

import torch
from torch import nn

import manyhands as mh
from manyhands.algos.actor_critic import ActorCritic
from manyhands.maths.policy import weighted_mean


@dataclass(frozen=True)
class HuberActorCritic(ActorCritic):
    def loss(self, net, target, batch, progress):
        plain = super().loss(net, target, batch, progress)
        _, value = net(batch.obs)
        huber = nn.functional.smooth_l1_loss(value, batch.value_target, reduction="none")
        return mh.Loss(plain.value + weighted_mean(huber, batch.weight), plain.metrics)


def network(spec: mh.EnvSpec) -> nn.Module:
    """A torso: from observations [N, *spec.obs] to features [N, F]. The algorithm adds its head."""
    return nn.Sequential(nn.Linear(spec.obs[0], 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())


if __name__ == "__main__":
    torch.set_num_threads(1)
    run = mh.train(
        "cartpole-a2c",
        network=network,
        algorithm=HuberActorCritic(value_coef=0.0, entropy_coef=0.001),
        name="custom-algorithm",
        total_steps=100_000,
    )
    print(run.evaluate(episodes=30).mean)
