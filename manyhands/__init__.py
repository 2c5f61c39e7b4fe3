"""manyhands: deep reinforcement learning trained by as many hands as you have.

    import manyhands as mh
    run = mh.train("cartpole-ppo", env=lambda: MyEnv(), total_steps=200_000)
    run.evaluate(episodes=30).mean

Names load when they are first used: worker processes import this package without paying for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import gymnasium

from manyhands import machine

if TYPE_CHECKING:
    from manyhands.api import open_run, resume, train
    from manyhands.config import Recipe, load_recipe
    from manyhands.run import Run
    from manyhands.types import EnvSpec, Loss, PolicyBatch, Rollout, RunError, UsageError

machine.place_openmp()

__version__ = "0.1.0"

_HOMES = {
    "train": "api",
    "resume": "api",
    "open_run": "api",
    "Recipe": "config",
    "load_recipe": "config",
    "Run": "run",
    "EnvSpec": "types",
    "Loss": "types",
    "PolicyBatch": "types",
    "Rollout": "types",
    "RunError": "types",
    "UsageError": "types",
}
__all__ = sorted(_HOMES)


gymnasium.register("manyhands/Snake-v0", entry_point="manyhands.envs.snake:GymnasiumSnake")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"manyhands.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'manyhands' has no attribute {name!r}")
