"""The judge: plays with the newest parameters, in a process of its own, while the others go on learning."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from manyhands.build import Custom, find_device, make_group, make_model
from manyhands.config import Recipe
from manyhands.evaluate import Player, play_episodes, unstick
from manyhands.protocols import default_protocol, evaluation_env
from manyhands.stores.servers import ServersConfig, ServersStore
from manyhands.types import EnvSpec, Places, Seat

SEAT = Seat(rank=1_000_000, learns=False)  # neither a learner nor an actor
AT_ONCE = 16  # simulators


class Judge:
    def __init__(self, recipe: Recipe, custom: Custom, places: Places, spec: EnvSpec) -> None:
        torch.set_num_threads(1)
        assert isinstance(recipe.store, ServersConfig)
        self._recipe, self._custom = recipe, custom
        self._algorithm = custom.algorithm or recipe.algorithm
        self._model = make_model(recipe, self._algorithm, spec, find_device(recipe.device), custom)
        self._store = ServersStore(self._model, recipe.rule, recipe.total_steps, recipe.store, SEAT, places)

    def score(self) -> dict[str, Any]:
        """The mean return of some episodes with the newest parameters, and these."""
        config = self._recipe.evaluation
        clock = self._store.refresh()
        env = evaluation_env(self._recipe.env, default_protocol(self._recipe.env))
        simulators = min(config.episodes, AT_ONCE)
        group = make_group(env, simulators, self._model.parameters.device, self._custom.env)
        try:
            fire = unstick(env, self._algorithm, config.actions)
            player = Player(self._algorithm, self._model, group, config.actions, 0.0, clock.updates, fire)
            played = play_episodes(player, simulators, math.ceil(config.episodes / simulators))[: config.episodes]
        finally:
            group.close()
        returns = [episode[0] for episode in played]
        parameters = self._model.parameters.cpu().numpy()
        return {"updates": clock.updates, "steps": clock.steps, "mean": statistics.fmean(returns), "parameters": parameters}

    def close(self) -> None:
        self._store.close()
