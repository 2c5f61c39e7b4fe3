"""The Python interface: what `import manyhands as mh` offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from manyhands import run as runs
from manyhands.build import Custom
from manyhands.config import KINDS, load_recipe
from manyhands.envs.gym import Factory, GymEnv
from manyhands.run import Run
from manyhands.types import Algorithm, EnvSpec


def train(
    recipe: str,
    *,
    env: str | Factory | dict[str, Any] | None = None,
    network: Callable[[EnvSpec], nn.Module] | dict[str, Any] | None = None,
    algorithm: Algorithm | str | dict[str, Any] | None = None,
    run_dir: str | Path | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Train a recipe. Overrides are its keys: total_steps=1000, sampler={"num_envs": 4}.

    env may be a Gymnasium id, a function that makes a Gymnasium environment, or a table of settings; network a function
    from EnvSpec to a torso module, or a table; algorithm a name, an object (see manyhands.types.Algorithm), or a table.
    """
    tables: dict[str, Any] = dict(overrides)
    factory = None
    if isinstance(env, str):
        tables["env"] = {"id": env}
    elif isinstance(env, dict):
        tables["env"] = {k: v for k, v in env.items() if k != "make"}
        factory = env.get("make")
    elif env is not None:
        factory = env
    if factory is not None:
        tables["env"] = {"id": "custom", **tables.get("env", {})}
    if isinstance(network, dict):
        tables["network"] = network
    elif network is not None:
        tables["network"] = {"torso": "custom"}
    if isinstance(algorithm, str):
        algorithm = {"name": algorithm}
    if isinstance(algorithm, dict):
        tables["algorithm"] = algorithm
    resolved = load_recipe(recipe, tables)
    if type(algorithm) in KINDS["algorithm"].values():  # an ordinary one with other settings: the recipe can say it
        resolved, algorithm = replace(resolved, algorithm=algorithm), None  # type: ignore[arg-type]
    custom = Custom(
        env=factory,
        network=network if callable(network) else None,
        algorithm=None if isinstance(algorithm, dict) else algorithm,
    )
    if factory is not None and not isinstance(resolved.env, GymEnv):
        resolved = replace(resolved, env=GymEnv(id="custom"))
    if factory is not None:
        own = getattr(factory, "__name__", "")
        name = own if own.isidentifier() else "custom"
        resolved = replace(resolved, description=f"{resolved.name} on {name}", name=overrides.get("name", name))
    directory = Path(run_dir) if run_dir else Path("runs") / f"{resolved.name}-{resolved.seed}"
    return runs.start(resolved, directory, custom, quiet)


def open_run(
    directory: str | Path,
    *,
    env: Factory | None = None,
    network: Callable[[EnvSpec], nn.Module] | None = None,
    algorithm: Algorithm | None = None,
) -> Run:
    """A run from its directory; custom parts are passed again, since a directory holds data, not code."""
    return Run.open(directory, Custom(env, network, algorithm))


def resume(
    run: Run | str | Path,
    *,
    total_steps: int | None = None,
    quiet: bool = False,
    device: str | None = None,
    limit_minutes: float | None = None,
    stop_at_return: float | None = None,
    **custom: Any,
) -> Run:
    """Continue a run from its newest checkpoint."""
    opened = run if isinstance(run, Run) else open_run(run, **custom)
    return runs.resume(opened, total_steps, quiet, device, limit_minutes, stop_at_return)
