"""Recipes: frozen dataclasses read from TOML, merged along `extends`, overridden by the command line, written to the run.

Recipes are data: they can name things that exist here, never import code. Unknown keys and wrong types fail at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w

from manyhands.algos.actor_critic import ActorCritic
from manyhands.algos.categorical_dqn import CategoricalDQN
from manyhands.algos.dqn import DQN, QLearning
from manyhands.algos.ppo import PPO
from manyhands.envs.atari import AtariEnv
from manyhands.envs.gym import GymEnv
from manyhands.envs.snake import SnakeEnv
from manyhands.memory.fresh import FreshConfig
from manyhands.memory.replay import ReplayConfig
from manyhands.nets.torsos import TORSOS
from manyhands.samplers.exploration import Exploration
from manyhands.stores.allreduce import AllReduceConfig
from manyhands.stores.chunks import SharedConfig
from manyhands.stores.local import LocalConfig
from manyhands.stores.rules import AdaGrad, Adam, RMSProp
from manyhands.stores.servers import ServersConfig
from manyhands.types import UsageError

# Sections of which there are several kinds, told apart by their `name`; the first is the default.
KINDS: dict[str, dict[str, type]] = {
    "algorithm": {"ppo": PPO, "actor-critic": ActorCritic, "dqn": DQN, "categorical-dqn": CategoricalDQN},
    "rule": {"adam": Adam, "rmsprop": RMSProp, "adagrad": AdaGrad},
    "memory": {"fresh": FreshConfig, "replay": ReplayConfig},
    "store": {"local": LocalConfig, "allreduce": AllReduceConfig, "shared": SharedConfig, "servers": ServersConfig},
}


@dataclass(frozen=True)
class NetworkConfig:
    torso: str = "nature"
    """nature, nips, impala (residual), snake, cells, ba3c (images) or mlp (vectors)."""
    hidden: tuple[int, ...] = ()
    """Sizes of the fully connected layers; empty: the torso's own."""
    init: Literal["orthogonal", "torch"] = "orthogonal"
    """How weights start."""

    def __post_init__(self) -> None:
        if self.torso not in TORSOS and self.torso != "custom":
            raise UsageError(f"network.torso = {self.torso!r}: no such torso{nearest(self.torso, TORSOS)}")
        if any(size < 1 for size in self.hidden):
            raise UsageError(f"network.hidden = {list(self.hidden)}: sizes must be at least 1")


@dataclass(frozen=True)
class SamplerConfig:
    kind: Literal["serial", "batched", "alternating", "pipelined"] = "batched"
    """serial: one simulator after the other; batched: all in lock-step; alternating: groups, one is served while the others step;
    pipelined: whoever is ready is served (GA3C, BA3C)."""
    num_envs: int = 8
    """Simulators of each learner."""
    horizon: int = 128
    """Slots of every simulator in a rollout."""
    decorrelate_steps: int = 0
    """Before training each simulator plays a random number of random steps, up to this, so that games are at different points."""
    groups: int = 0
    """alternating: how many groups; more of them hide resets better, each keeps its own threads. 0: two."""
    serve: int = 0
    """pipelined: simulators answered together; 0: a quarter of them."""
    pieces: int = 0
    """pipelined: finished pieces, of `horizon` slots of one simulator, in a rollout; 0: as many as there are simulators."""

    def __post_init__(self) -> None:
        for name, least in (
            ("num_envs", 1),
            ("horizon", 1),
            ("decorrelate_steps", 0),
            ("groups", 0),
            ("serve", 0),
            ("pieces", 0),
        ):
            if getattr(self, name) < least:
                raise UsageError(f"sampler.{name} = {getattr(self, name)}: must be at least {least}")
        if self.kind == "alternating" and self.num_envs < (self.groups or 2):
            raise UsageError(
                f"sampler.kind = 'alternating' has {self.groups or 2} groups: set sampler.num_envs to at least {self.groups or 2}"
            )
        if self.kind != "alternating" and self.groups:
            raise UsageError(f"sampler.groups is for sampler.kind = 'alternating', not {self.kind!r}")
        if self.kind != "pipelined" and (self.serve or self.pieces):
            raise UsageError(f"sampler.serve and sampler.pieces are for sampler.kind = 'pipelined', not {self.kind!r}")
        if self.kind == "pipelined" and self.decorrelate_steps:
            raise UsageError(
                "sampler.decorrelate_steps is for the other samplers: pipelined simulators drift apart by themselves"
            )
        if self.serve > self.num_envs:
            raise UsageError(f"sampler.serve = {self.serve} exceeds sampler.num_envs = {self.num_envs}")

    @property
    def columns(self) -> int:
        """Pieces side by side in a rollout."""
        return self.pieces or self.num_envs


@dataclass(frozen=True)
class TopologyConfig:
    learners: int = 1
    """Processes that sample and learn, each with sampler.num_envs simulators. More than one with a local store: all-reduce."""
    actors: int = 0
    """Processes that only act, each with sampler.num_envs simulators, and fill the global replay that learners draw from; the
    learners have no simulators then. 0: every learner acts for itself."""
    host: Literal["process", "ray"] = "process"
    """Where components run: processes of this machine, or the machines of a Ray cluster (only with store.name = 'servers')."""
    address: str = ""
    """The Ray cluster to join, HOST:PORT or auto; empty: a private one on this machine."""
    pin: bool = False
    """Each learner keeps to its own share of the cores, instead of only counting on as many."""

    def __post_init__(self) -> None:
        for name, least in (("learners", 1), ("actors", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"topology.{name} = {getattr(self, name)}: must be at least {least}")
        if self.address and self.host != "ray":
            raise UsageError(f"topology.address = {self.address!r} is for topology.host = 'ray'")
        if self.pin and self.host == "ray":
            raise UsageError(
                "topology.pin = true divides the cores of this machine: it has no meaning with topology.host = 'ray'"
            )
        if self.pin and self.learners == 1:
            raise UsageError("topology.pin = true divides the cores among learners: set topology.learners to at least 2")


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 500_000
    """Save whenever this many steps have passed (and at the end, and on Ctrl-C)."""
    keep: int = 2
    """Newest checkpoints kept, beside the best one."""
    replay: bool = False
    """Save the replay too (it may be gigabytes); without it a resumed run fills a new one before it goes on learning."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep < 1:
            raise UsageError("checkpoint.every_steps and checkpoint.keep must be at least 1")


@dataclass(frozen=True)
class EvaluationConfig:
    every_updates: int = 0
    """A process of its own plays with the newest parameters whenever so many updates have passed, and the best are kept; 0:
    never. Needs store.name = 'servers'."""
    episodes: int = 10
    """How many it plays."""
    actions: Literal["sampled", "greedy"] = "sampled"
    """As the policy acts, or always its best action."""

    def __post_init__(self) -> None:
        if self.every_updates < 0 or self.episodes < 1:
            raise UsageError("evaluation.every_updates must not be negative, evaluation.episodes at least 1")


@dataclass(frozen=True)
class ReportConfig:
    every_steps: int = 20_000
    """One line of metrics.jsonl whenever this many steps have passed."""
    window: int = 100
    """return_mean is over this many last episodes."""
    tensorboard: bool = True
    """Also write TensorBoard events."""
    wandb: bool = False
    """Also log to Weights & Biases (pip install 'manyhands[track]')."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.window < 1:
            raise UsageError("report.every_steps and report.window must be at least 1")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run, up to the machine's floating point."""

    name: str = "custom"
    """Where the run directory gets its name from."""
    description: str = ""
    """What it trains, on what hardware, in what time."""
    seed: int = 0
    """The same seed gives the same run."""
    total_steps: int = 1_000_000
    """Decisions of all simulators together."""
    limit_minutes: float = 0.0
    """Finish after so many minutes of training if total_steps are not taken by then, resumed ones counted; 0: no limit. Where
    that is depends on the machine."""
    stop_at_return: float | None = None
    """Finish as soon as the last report.window training games have this mean."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: cuda if there is one."""
    threads: int = 0
    """Torch's own CPU threads; 0: one per core on a CPU, 1 beside a GPU, where the simulators need the cores."""
    tf32: bool = True
    """On a GPU: matrix products and convolutions in TensorFloat-32, ten bits of mantissa instead of 23."""
    deterministic: bool = True
    """On a GPU: only convolutions that add in the same order each time, so that the same seed gives the same run. It costs
    nothing, except with network.torso = 'impala' (8 % of an update), whose max-pooling adds in any order anyway."""
    bf16: bool = False
    """The network up to its features in bfloat16, seven bits of mantissa; heads, losses and updates in 32 bits. For CPUs with
    instructions for it (AVX512-BF16, AMX, ARM's), where training is 1.1 to 1.3 times as fast; a GPU gains a tenth at most."""
    graphs: bool = True
    """On a GPU: acting, updates and draws from a replay are captured as CUDA graphs. False: kernel by kernel, the same within
    rounding. (Boards of Snake on the GPU are always captured: they only count.)"""
    env: AtariEnv | SnakeEnv | GymEnv = field(default_factory=SnakeEnv)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    algorithm: ActorCritic | PPO | DQN | CategoricalDQN = field(default_factory=PPO)
    rule: Adam | RMSProp | AdaGrad = field(default_factory=Adam)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    exploration: Exploration = field(default_factory=Exploration)
    memory: FreshConfig | ReplayConfig = field(default_factory=FreshConfig)
    store: LocalConfig | AllReduceConfig | SharedConfig | ServersConfig = field(default_factory=LocalConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise UsageError(f"total_steps = {self.total_steps}: must be at least 1")
        if self.limit_minutes < 0:
            raise UsageError(f"limit_minutes = {self.limit_minutes:g}: must not be negative")
        if self.stop_at_return is not None and math.isnan(self.stop_at_return):
            raise UsageError("stop_at_return = nan: must be a number")
        self._check_topology()
        if isinstance(self.memory, ReplayConfig):
            self._check_replay(self.memory)
        else:
            self._check_fresh(self.memory)

    @property
    def actors(self) -> int:
        """Who acts: those who do nothing else, or the learners."""
        return self.topology.actors or self.topology.learners

    @property
    def in_processes(self) -> bool:
        """Learners run in processes of their own."""
        return not isinstance(self.store, LocalConfig)

    def _check_topology(self) -> None:
        learners = self.topology.learners
        if learners > 1 and isinstance(self.store, LocalConfig):
            object.__setattr__(self, "store", AllReduceConfig())  # what most resembles one learner with a larger batch
        if isinstance(self.store, SharedConfig):
            self.store.check(self.rule)
        if isinstance(self.store, ServersConfig):
            self.store.check(learners)
        elif self.topology.host == "ray" or self.topology.actors:
            what = "host = 'ray'" if self.topology.host == "ray" else f"actors = {self.topology.actors}"
            raise UsageError(f"topology.{what} needs parameter servers: set store.name = 'servers'")
        elif self.evaluation.every_updates:
            raise UsageError(
                "evaluation.every_updates needs parameter servers, where a judge can look: set store.name = 'servers'"
            )
        if self.in_processes and self.checkpoint.replay:
            raise UsageError("checkpoint.replay = true needs a single learner with store.name = 'local'")

    def _check_replay(self, memory: ReplayConfig) -> None:
        if not isinstance(self.algorithm, QLearning):
            raise UsageError(
                "memory.name = 'replay' does not fit an on-policy algorithm, which learns from what it just did: "
                "set memory.name = 'fresh', or choose dqn or categorical-dqn"
            )
        if self.sampler.kind == "pipelined":
            raise UsageError("sampler.kind = 'pipelined' feeds a training queue: value learning has a replay, use 'alternating'")
        if (self.topology.actors > 0) != (memory.shards > 0):
            missing = "topology.actors" if memory.shards else "memory.shards"
            raise UsageError(f"topology.actors fill a global replay of memory.shards servers: {missing} is not set")
        if memory.shards and memory.device == "cuda":
            raise UsageError("memory.device = 'cuda': a global replay lies in the main memory of its servers, leave it out")
        if memory.shards > self.actors:
            raise UsageError(f"memory.shards = {memory.shards} exceeds topology.actors = {self.actors}: each actor fills one")
        memory.share(self.actors).check(self.sampler.num_envs, self.sampler.horizon)
        if memory.warmup_steps >= self.total_steps:
            raise UsageError(
                f"memory.warmup_steps = {memory.warmup_steps} of total_steps = {self.total_steps}: it would never learn; "
                "lower the one or raise the other"
            )

    def _check_fresh(self, memory: FreshConfig) -> None:
        if self.topology.actors:
            raise UsageError("topology.actors fill a replay: an on-policy algorithm's learners act for themselves, set it to 0")
        if isinstance(self.algorithm, QLearning):
            raise UsageError("algorithm.name = 'dqn' or 'categorical-dqn' learns from a replay: set memory.name = 'replay'")
        if self.exploration != Exploration():
            raise UsageError("exploration is for algorithms that act greedily otherwise (dqn, categorical-dqn): remove it")
        if self.checkpoint.replay:
            raise UsageError("checkpoint.replay = true: there is no replay to save with an on-policy algorithm")
        if memory.overlap and self.sampler.kind == "pipelined":
            raise UsageError("memory.overlap = true: a pipelined sampler does not wait for the learner anyway, leave it out")
        batch = self.sampler.columns * self.sampler.horizon
        if memory.minibatches > batch:
            raise UsageError(
                f"memory.minibatches = {memory.minibatches} exceeds the rollout's {batch} samples: lower it, or raise "
                "sampler.num_envs or sampler.horizon"
            )
        if memory.epochs > 1 and type(self.algorithm) is ActorCritic:
            raise UsageError(
                f"memory.epochs = {memory.epochs}: actor-critic uses a sample once (its gradient is on-policy); "
                "set memory.epochs = 1, or start from a PPO recipe"
            )


def nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, 1, 0.4)
    return f"; did you mean {near[0]!r}?" if near else f" (there are: {', '.join(sorted(known))})"


# -- reading ----------------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    """Shipped recipes; a leading underscore marks a base that others extend."""
    folder = resources.files("manyhands") / "recipes"
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml") and not f.name.startswith("_"))


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A shipped recipe by name or a TOML file by path, with nested overrides ({"sampler": {"num_envs": 4}})."""
    tree = read_tree(name, ())
    tree.setdefault("name", Path(name).stem)
    return from_dict(_merge(tree, dict(overrides or {})), where=f"recipe {name}")


def read_tree(name: str, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise UsageError(f"recipe {seen[0]}: extends itself ({' -> '.join((*seen, name))})")
    try:
        tree = tomllib.loads(_read_text(name))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"recipe {name}: not valid TOML: {error}") from error
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UsageError(f"recipe {name}: extends = {base!r}: must be the name of a recipe")
    merged = _merge(read_tree(base, (*seen, name)), tree)
    merged["name"] = tree.get("name", Path(name).stem)
    return merged


def _read_text(name: str) -> str:
    if name.endswith(".toml"):
        try:
            return Path(name).read_text()
        except OSError as error:
            raise UsageError(f"recipe {name}: {error.strerror}") from error
    file = resources.files("manyhands") / "recipes" / f"{name}.toml"
    if "/" in name or not file.is_file():
        raise UsageError(f"no recipe {name!r}{nearest(name, recipe_names())} ('manyhands recipes' lists them)")
    return file.read_text()


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested tables merge; a table that names another algorithm, rule or environment kind replaces the base's."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        same = isinstance(old, dict) and isinstance(value, dict) and _kind(key, old) == _kind(key, {**old, **value})
        result[key] = _merge(old, value) if same and isinstance(old, dict) else value
    return result


def _kind(section: str, table: dict[str, Any]) -> Any:
    if section == "env":
        return env_class(str(table.get("id", SnakeEnv.id)))
    return table.get("name", next(iter(KINDS[section]))) if section in KINDS else None


def env_class(env_id: str) -> type[AtariEnv | SnakeEnv | GymEnv]:
    if env_id.startswith("ALE/"):
        return AtariEnv
    return SnakeEnv if env_id == SnakeEnv.id else GymEnv


def from_dict(tree: Mapping[str, Any], where: str = "recipe") -> Recipe:
    tree = dict(tree)
    for section, classes in KINDS.items():
        table = tree.get(section, {})
        if not isinstance(table, dict):
            raise UsageError(f"{where}: {section} = {table!r}: must be a table, [{section}] with name = ...")
        table = dict(table)
        name = table.pop("name", None) or next(iter(classes))
        if name not in classes:
            raise UsageError(f"{where}: {section}.name = {name!r}: no such {section}{nearest(str(name), classes)}")
        tree[section] = _read(classes[name], table, where, f"{section}.")
    if "env" in tree:
        if not isinstance(tree["env"], dict) or not isinstance(tree["env"].get("id", ""), str):
            raise UsageError(f'{where}: env = {tree["env"]!r}: must be a table, [env] with id = "..."')
        tree["env"] = _read(env_class(tree["env"].get("id", SnakeEnv.id)), tree["env"], where, "env.")
    return _read(Recipe, tree, where, "")


def _read(cls: Any, table: Mapping[str, Any], where: str, prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {}
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{where}: unknown key {prefix}{key}{nearest(key, known)}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            value = _read(hint, value, where, f"{prefix}{key}.")
        values[key] = _checked(hint, value, f"{where}: {prefix}{key}")
    return cls(**values)


def _checked(hint: Any, value: Any, what: str) -> Any:
    """The value, if it is of the hinted type (an int passes as a float); a UsageError otherwise."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise UsageError(f"{what} = {value!r}{nearest(str(value), choices)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{what} = {value!r}: must be a list")
        return tuple(_checked(typing.get_args(hint)[0], item, what) for item in value)
    if origin in (typing.Union, types.UnionType):
        if value is None or any(
            isinstance(a, type) and dataclasses.is_dataclass(a) and isinstance(value, a) for a in typing.get_args(hint)
        ):
            return value
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UsageError(f"{what} = {value!r}: must be {type_name(hint)}")
    return value


def type_name(hint: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(hint, hint.__name__)


# -- writing ----------------------------------------------------------------------------------------------------------


def to_dict(recipe: Recipe) -> dict[str, Any]:
    tree = dataclasses.asdict(recipe)
    for section, classes in KINDS.items():
        chosen = getattr(recipe, section)
        name = next((n for n, c in classes.items() if type(chosen) is c), "custom")
        tree[section] = {"name": name, **tree[section]}
    return _without_none(tree)


def to_toml(recipe: Recipe) -> str:
    return tomli_w.dumps(to_dict(recipe))


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: _without_none(v) for k, v in tree.items() if v is not None}
    return list(tree) if isinstance(tree, tuple) else tree
