"""The sampler of a learner that has no simulators: others act for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from manyhands.types import EnvSpec, Policy, Rollout

PAUSE_S = 0.003  # when there is nothing to learn from yet


class IdleSampler:
    replaced_workers = 0

    def __init__(self, spec: EnvSpec | None) -> None:
        assert spec is not None
        self.spec = spec
        self.seconds = {"simulate": 0.0, "act": 0.0}
        self.epsilon = torch.zeros(0)

    def run(self, policy: Policy) -> Iterator[Rollout | None]:
        while True:
            yield None
            time.sleep(PAUSE_S)

    def state(self, mid_rollout: bool = False) -> dict:
        return {"continues": True}

    def load(self, state: dict) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing is open."""
