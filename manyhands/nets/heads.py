"""Heads: from features to what an algorithm needs; and the network that joins a torso and a head."""

from typing import Any

import torch
from torch import Tensor, nn

from manyhands.types import EnvSpec


class PolicyValue(nn.Module):
    """Action logits and a state value on shared features."""

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.policy = nn.Linear(features, actions)
        self.value = nn.Linear(features, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(x), self.value(x).squeeze(-1)

    def orthogonal_gains(self) -> dict[nn.Module, float]:
        """A nearly uniform first policy; values of ordinary size."""
        return {self.policy: 0.01, self.value: 1.0}


class Q(nn.Module):
    """A value for each action."""

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.q = nn.Linear(features, actions)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x)

    def orthogonal_gains(self) -> dict[nn.Module, float]:
        return {self.q: 1.0}


class DuelingQ(nn.Module):
    """V(s) + A(s, a) - mean A. Each stream has a hidden layer as wide as the features, as published."""

    def __init__(self, features: int, actions: int, atoms: int = 1) -> None:
        super().__init__()
        self.value_hidden = nn.Linear(features, features)
        self.advantage_hidden = nn.Linear(features, features)
        self.value = nn.Linear(features, atoms)
        self.advantage = nn.Linear(features, actions * atoms)
        self._shape = (actions, atoms)

    def forward(self, x: Tensor) -> Tensor:
        value = self.value(self.value_hidden(x).relu()).unsqueeze(1)  # [N, 1, Z]
        advantage = self.advantage(self.advantage_hidden(x).relu()).unflatten(-1, self._shape)  # [N, A, Z]
        q = value + advantage - advantage.mean(1, keepdim=True)
        return q.squeeze(-1)  # [N, A], or [N, A, Z] with atoms

    def orthogonal_gains(self) -> dict[nn.Module, float]:
        return {self.value: 1.0, self.advantage: 1.0}


class CategoricalQ(nn.Module):
    """Logits of a return distribution for each action, [N, A, Z]."""

    def __init__(self, features: int, actions: int, atoms: int, dueling: bool) -> None:
        super().__init__()
        self.distribution = DuelingQ(features, actions, atoms) if dueling else nn.Linear(features, actions * atoms)
        self._shape = (actions, atoms)

    def forward(self, x: Tensor) -> Tensor:
        output = self.distribution(x)
        return output if output.dim() == 3 else output.unflatten(-1, self._shape)

    def orthogonal_gains(self) -> dict[nn.Module, float]:
        """Almost even distributions at first."""
        return {} if isinstance(self.distribution, DuelingQ) else {self.distribution: 0.01}


class Network(nn.Module):
    def __init__(self, torso: nn.Module, head: nn.Module, bf16: bool = False) -> None:
        """bf16: the torso computes in bfloat16."""
        super().__init__()
        self.torso = torso
        self.head = head
        self._bf16 = bf16

    def forward(self, obs: Tensor, results: list[Tensor] | None = None, known: list[Tensor] | None = None) -> Any:
        """results and known: see ConvTorso; other torsos have neither."""
        more = () if results is None and known is None else (results, known)
        if not self._bf16:
            return self.head(self.torso(obs, *more))
        with torch.autocast(obs.device.type, torch.bfloat16, cache_enabled=False):  # graphs must not keep weights that were
            features = self.torso(obs, *more)
        return self.head(features.float())


def feature_count(torso: nn.Module, spec: EnvSpec) -> int:
    with torch.no_grad():
        return torso(torch.zeros(1, *spec.obs, dtype=getattr(torch, spec.dtype))).shape[-1]


def initialise_orthogonal(net: nn.Module) -> None:
    """Orthogonal weights with gain √2, zero biases; a head may name other gains, a layer may start in its own way."""
    gains: dict[nn.Module, float] = {}
    for module in net.modules():
        own = getattr(module, "orthogonal_gains", None)
        if own is not None:
            gains.update(own())
    for module in net.modules():
        own_start = getattr(module, "initialise", None)
        if own_start is not None:
            own_start()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(module.weight, gains.get(module, 2**0.5))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
