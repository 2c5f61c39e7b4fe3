"""From names to objects. The only file that knows every part."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from manyhands.config import Recipe, to_dict
from manyhands.envs.atari import AtariEnv
from manyhands.envs.gym import Factory, GymEnv
from manyhands.envs.partial import AnyOf, AtariPart
from manyhands.envs.snake import SnakeEnv
from manyhands.envs.workers import WorkerGroup
from manyhands.learner import Learner
from manyhands.machine import cores, free_memory, keep_memory, multiplies_bf16, pin_threads, take_share
from manyhands.maths import random, schedules
from manyhands.memory.fresh import FreshConfig, FreshMemory
from manyhands.memory.remote import RemoteReplay
from manyhands.memory.replay import Replay, ReplayConfig, choose_device, replay_bytes
from manyhands.nets.flat import Model, flatten
from manyhands.nets.heads import Network, feature_count, initialise_orthogonal
from manyhands.nets.torsos import ConvTorso, make_torso
from manyhands.samplers.idle import IdleSampler
from manyhands.samplers.lockstep import LockstepSampler
from manyhands.samplers.pipelined import PipelinedSampler
from manyhands.stores.allreduce import AllReduceConfig, AllReduceStore
from manyhands.stores.chunks import SharedConfig
from manyhands.stores.local import LocalStore
from manyhands.stores.servers import ServersConfig, ServersStore
from manyhands.stores.shared import SharedStore
from manyhands.types import Algorithm, Clock, EnvGroup, EnvSpec, Memory, PartialGroup, Places, Sampler, Seat, Store, UsageError

ATARI_TIMEOUT_S, ATARI_RESTARTS = 60.0, 10  # of emulators in processes of their own


@dataclass(frozen=True)
class Custom:
    """Objects given from Python instead of names in a recipe."""

    env: Factory | None = None  # () -> gymnasium.Env
    network: Callable[[EnvSpec], nn.Module] | None = None  # -> a torso: observations [N, ...] to features [N, F]
    algorithm: Algorithm | None = None

    @property
    def ours(self) -> bool:
        """Nothing was given that computes: of our own parts it is known what they do, and that a CUDA graph can do it."""
        return self.algorithm is None and self.network is None


@dataclass(frozen=True)
class Meeting:
    """Where learners in several processes meet: descriptors of unnamed files that all of them have inherited, or servers."""

    fds: tuple[int, ...] = ()
    places: Places | None = None
    spec: EnvSpec | None = None  # of the simulators, for those who have none

    @property
    def apart(self) -> bool:
        """Learners are in processes of their own."""
        return self.fds != () or self.places is not None


def find_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device = {name!r}: give cpu, cuda, cuda:N or auto") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu or auto")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device = {name!r}: give cpu, cuda, cuda:N or auto")
    return device


def device_of(recipe: Recipe, seat: Seat) -> torch.device:
    """A learner's own GPU where there are enough of them and the recipe names none; otherwise they share one."""
    device = find_device(recipe.device)
    return torch.device("cuda", seat.rank % torch.cuda.device_count()) if own_gpus(recipe) else device


def own_gpus(recipe: Recipe) -> bool:
    learners = recipe.topology.learners
    named = recipe.device not in ("auto", "cuda")
    return not named and 1 < learners <= torch.cuda.device_count()


def place_threads(recipe: Recipe, device: torch.device) -> int:
    """Torch's intra-op threads: all cores on a CPU, where acting, learning and simulating take turns; one beside a GPU."""
    keep_memory()
    if recipe.threads < 0:
        raise UsageError(f"threads = {recipe.threads}: must not be negative")
    alone = device.type == "cpu" and recipe.topology.host == "process"  # others of a cluster may be on the same machine
    threads = recipe.threads or (cores() if alone else 1)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if recipe.tf32 and device.type == "cuda" else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.tf32
    torch.backends.cudnn.deterministic = recipe.deterministic
    return threads


def placement(recipe: Recipe) -> str:
    """Who gets which cores, in words."""
    device, topology, threads = find_device(recipe.device), recipe.topology, torch.get_num_threads()
    if not recipe.in_processes:
        return f"{recipe.sampler.num_envs} simulators, {device}, {counted(threads, 'torch thread')}"
    hands = topology.learners + topology.actors
    share = max(cores() // hands, 1)
    own = recipe.threads or (share if device.type == "cpu" and topology.host == "process" else 1)
    store = type(recipe.store).__name__.removesuffix("Config").lower()
    if isinstance(recipe.store, ServersConfig):
        store = f"{counted(recipe.store.shards, 'parameter server')}"
        if recipe.store.gather:
            store += f", {recipe.store.gather} of {topology.learners} gradients a version"
        if isinstance(recipe.memory, ReplayConfig) and recipe.memory.shards:
            store += f", {counted(recipe.memory.shards, 'replay server')}"
    learners = f"{counted(topology.learners, 'learner')} ({store})"
    who = f"{learners} and {counted(topology.actors, 'actor')}" if topology.actors else learners
    if topology.host == "ray":
        place = f"on the Ray cluster {topology.address}" if topology.address else "on a private Ray cluster of this machine"
        return f"{who} with {recipe.sampler.num_envs} simulators each, {device}, {counted(own, 'torch thread')}, {place}"
    pinned = "pinned" if topology.pin else "not pinned"
    return (
        f"{who} with {recipe.sampler.num_envs} simulators each, {device}; each counts on {share} of "
        f"{cores()} cores ({pinned}) for its simulators and {counted(own, 'torch thread')}"
    )


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def make_group(
    env: AtariEnv | SnakeEnv | GymEnv,
    num_envs: int,
    device: torch.device,
    factory: Factory | None = None,
    screen: bool = False,
) -> EnvGroup:
    if factory is None:
        env.check()
    if isinstance(env, SnakeEnv):
        return env.make(num_envs, device=str(device))
    if isinstance(env, AtariEnv):
        env = replace(env, threads=env.threads or simulator_threads(device))
        if env.workers == 0 or screen or num_envs == 1:
            return env.make(num_envs, screen)
        workers = min(env.workers, num_envs)
        part = replace(env, threads=math.ceil(env.threads / workers))
        return WorkerGroup(part.make, num_envs, workers, ATARI_TIMEOUT_S, ATARI_RESTARTS, env.id)
    if env.workers == 0 or screen:
        return env.make(num_envs, screen, factory)
    make = partial(env.make, factory=factory)
    workers = cores() if env.workers < 0 else env.workers
    return WorkerGroup(make, num_envs, workers, env.step_timeout_s, env.restarts, env.id)


def simulator_threads(device: torch.device) -> int:
    """Beside a GPU one core is left to whoever serves the simulators: an emulator on it would keep all the others waiting."""
    return max(cores() - (device.type == "cuda"), 1)


def make_partial_group(recipe: Recipe, device: torch.device, factory: Factory | None) -> PartialGroup:
    """ale-py serves parts of a batch by itself; other simulators are split into groups, in processes where they have some."""
    env, n = recipe.env, recipe.sampler.num_envs
    serve = recipe.sampler.serve or max(n // 4, 1)
    if isinstance(env, AtariEnv):
        env.check()
        return AtariPart(replace(env, threads=env.threads or simulator_threads(device)), n, serve)
    if isinstance(env, GymEnv) and env.workers != 0:
        env = replace(env, workers=1)
    sizes = [min(serve, n - i) for i in range(0, n, serve)]
    return AnyOf(make_groups(env, sizes, torch.device("cpu"), factory))


def make_groups(
    env: AtariEnv | SnakeEnv | GymEnv, sizes: list[int], device: torch.device, factory: Factory | None
) -> list[EnvGroup]:
    groups: list[EnvGroup] = []
    try:
        for size in sizes:
            groups.append(make_group(env, size, device, factory))
        assert all(group.spec for group in groups)  # those in processes are built by then
    except BaseException:
        for group in groups:
            group.close()
        raise
    return groups


def group_sizes(recipe: Recipe) -> list[int]:
    n = recipe.sampler.num_envs
    groups = {"serial": n, "batched": 1, "alternating": recipe.sampler.groups or 2}[recipe.sampler.kind]
    return [n // groups + (i < n % groups) for i in range(groups)]


def make_sampler(
    recipe: Recipe, algorithm: Algorithm, device: torch.device, custom: Custom, seat: Seat
) -> LockstepSampler | PipelinedSampler:
    env, factory = recipe.env, custom.env
    capture = recipe.graphs and custom.ours
    life_loss = getattr(env, "life_loss", False)
    if recipe.sampler.kind == "pipelined":
        group = make_partial_group(recipe, device, factory)
        sampler = recipe.sampler
        common = (algorithm.gamma, recipe.seed, device, env.reward_clip, life_loss, capture, seat)
        return PipelinedSampler(group, sampler.horizon, sampler.columns, *common)
    return LockstepSampler(
        make_groups(env, group_sizes(recipe), device, factory),
        recipe.sampler.horizon,
        algorithm.gamma,
        recipe.seed,
        device,
        reward_clip=env.reward_clip,
        life_loss=life_loss,
        decorrelate_steps=recipe.sampler.decorrelate_steps,
        overlap=recipe.sampler.kind != "serial",
        capture=capture and recipe.sampler.kind != "serial",  # a graph for each simulator would be too many
        seat=seat,
    )


def make_model(recipe: Recipe, algorithm: Algorithm, spec: EnvSpec, device: torch.device, custom: Custom) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.key(recipe.seed, random.INIT))
        config = recipe.network
        torso = custom.network(spec) if custom.network else make_torso(config.torso, spec, config.hidden)
        net = Network(torso, algorithm.head(feature_count(torso, spec), spec.actions), recipe.bf16)
        if config.init == "orthogonal" and custom.network is None:
            initialise_orthogonal(net)
    if any(True for _ in net.buffers()):
        raise UsageError(
            "the network has buffers (BatchNorm, running statistics): they would not be saved; use LayerNorm instead"
        )
    return flatten(net.to(device))


def make_store(recipe: Recipe, model: Model, seat: Seat, meeting: Meeting) -> Store:
    config, common = recipe.store, (model, recipe.rule, recipe.total_steps)
    if isinstance(config, AllReduceConfig):
        return AllReduceStore(*common, config, seat, meeting.fds[0], own_gpus(recipe), recipe.graphs)
    if isinstance(config, SharedConfig):
        block, locks = meeting.fds
        return SharedStore(*common, config, block, locks, recipe.graphs)
    if isinstance(config, ServersConfig):
        assert meeting.places is not None
        return ServersStore(*common, config, seat, meeting.places)
    return LocalStore(*common, recipe.graphs)


def make_learner(recipe: Recipe, custom: Custom, seat: Seat = Seat(), meeting: Meeting = Meeting()) -> Learner:  # noqa: B008
    """One learner with everything it needs, at its seat among several."""
    if seat.learners > 1 and recipe.topology.host == "process":
        take_share(seat.rank, seat.learners, recipe.topology.pin)
    device = device_of(recipe, seat)
    if device.index is not None:  # a GPU of its own
        torch.cuda.set_device(device)
    place_threads(recipe, device)
    if recipe.topology.pin:
        torch.ones(1 << 20).add_(1)  # now torch's threads are there
        pin_threads()
    algorithm: Algorithm = custom.algorithm or recipe.algorithm
    sampler = make_sampler(recipe, algorithm, device, custom, seat) if seat.acts else IdleSampler(meeting.spec)
    try:
        model = make_model(recipe, algorithm, sampler.spec, device, custom)
        store = make_store(recipe, model, seat, meeting)
        memory = make_memory(recipe, algorithm, model, sampler, custom, seat, store, meeting.places)
    except BaseException:
        sampler.close()
        raise
    common = (algorithm, model, sampler, memory, store, recipe.total_steps, recipe.graphs and custom.ours)
    far = isinstance(sampler, LockstepSampler) and sampler.far
    if isinstance(recipe.memory, ReplayConfig):
        return Learner(*common, act_aside=far and seat.learns, explore=make_explore(recipe, seat))
    # One group, one update per rollout: then the slots acted on are the batch, in the same order, under the same parameters.
    # (An algorithm of somebody's own may show the network something else as well.)
    config = recipe.memory
    once = config.epochs == config.minibatches == 1 and not config.overlap and recipe.sampler.kind == "batched"
    keep = once and custom.ours and isinstance(model.net, Network) and isinstance(model.net.torso, ConvTorso)
    return Learner(*common, keep_acting=keep, act_with_copy=config.overlap, act_aside=far and config.overlap)


def make_explore(recipe: Recipe, seat: Seat) -> Callable[[Clock], torch.Tensor]:
    """The ε of this learner's simulators, among those of all learners."""
    assert isinstance(recipe.memory, ReplayConfig)
    n, warmup = recipe.sampler.num_envs, recipe.memory.warmup_steps

    def explore(clock: Clock) -> torch.Tensor:
        return recipe.exploration.epsilon(n * seat.learners, clock, warmup)[n * seat.rank : n * (seat.rank + 1)]

    return explore


def make_memory(
    recipe: Recipe,
    algorithm: Algorithm,
    model: Model,
    sampler: Sampler,
    custom: Custom,
    seat: Seat,
    store: Store,
    places: Places | None,
) -> Memory:
    config, device = recipe.memory, model.parameters.device
    seed = recipe.seed if seat.rank == seat.life == 0 else random.key(recipe.seed, seat.rank, seat.life)
    pauses = 0 if recipe.sampler.kind == "pipelined" else recipe.sampler.horizon * len(group_sizes(recipe))
    if isinstance(config, FreshConfig):
        prepare = partial(algorithm.prepare, model.net)
        capture = recipe.graphs and custom.ours and device.type == "cuda"
        return FreshMemory(prepare, config.epochs, config.minibatches, seed, pauses if config.overlap else 0, capture)
    if places is not None and places.replays:
        return RemoteReplay(config, places.replays, seat, device, seed, recipe.total_steps, lambda: store.clock.steps)
    config = config.share(seat.learners)
    device_of_frames = place_replay(config, sampler.spec, recipe.sampler.num_envs, device)
    # Beside a GPU the updates owed are launched while simulators step; on a CPU both would fight for the same cores.
    pauses = pauses + 1 if device.type == "cuda" else 1
    return Replay(
        config, sampler.spec, recipe.sampler.num_envs, device_of_frames, device, seed, recipe.total_steps // seat.learners,
        pauses, saved=recipe.checkpoint.replay, capture=recipe.graphs,
    )  # fmt: skip


def place_replay(config: ReplayConfig, spec: EnvSpec, num_envs: int, device: torch.device) -> torch.device:
    return choose_device(config, replay_bytes(config, spec, num_envs), device, free_memory)


def check(recipe: Recipe, custom: Custom) -> tuple[EnvSpec, Model]:
    """Everything that can be wrong with a recipe, found out with one simulator: hundreds may take half a minute to build."""
    check_custom(recipe, custom)
    if custom.algorithm is not None and hasattr(custom.algorithm, "target_period") != isinstance(recipe.memory, ReplayConfig):
        name = type(custom.algorithm).__name__
        raise UsageError(
            f"{name} does not fit the recipe's memory: value learning needs memory.name = 'replay', a policy 'fresh'"
        )
    device = find_device(recipe.device)
    place_threads(recipe, device)
    group = make_group(recipe.env, 1, device, custom.env)
    try:
        spec = group.spec
    finally:
        group.close()
    if isinstance(recipe.memory, ReplayConfig):
        check_replay(recipe, recipe.memory, spec)
    model = make_model(recipe, custom.algorithm or recipe.algorithm, spec, torch.device("cpu"), custom)
    if isinstance(recipe.store, SharedConfig | ServersConfig):
        recipe.store.pieces(model.parameters.numel())
    return spec, model


def check_replay(recipe: Recipe, memory: ReplayConfig, spec: EnvSpec) -> None:
    """It fits, and something will be learned from it before the run is over."""
    rings, needed, where = replay_of_one(recipe, memory, spec)
    if recipe.topology.host != "ray":  # of a cluster we know this machine only, and one part must fit; here, all of them
        needed *= recipe.actors / rings
    choose_device(memory, math.ceil(needed), where, free_memory)
    together = recipe.sampler.num_envs * recipe.actors
    slots = math.ceil(recipe.total_steps / (together * recipe.sampler.horizon)) * recipe.sampler.horizon
    paid = memory.intensity * (slots * together - memory.warmup_steps) / memory.batch
    if slots < memory.n_step or paid < 1:
        what = f"n_step = {memory.n_step}" if slots < memory.n_step else f"batch = {memory.batch}"
        raise UsageError(f"memory.{what} of total_steps = {recipe.total_steps}: it would never learn; lower it or raise that")


def replay_of_one(recipe: Recipe, memory: ReplayConfig, spec: EnvSpec) -> tuple[int, float, torch.device]:
    """Of one who keeps a replay, a learner or a replay server: for how many actors, how many bytes, beside what device."""
    rings = math.ceil(recipe.actors / memory.shards) if memory.shards else 1
    where = torch.device("cpu") if memory.shards else find_device(recipe.device)
    return rings, rings * replay_bytes(memory.share(recipe.actors), spec, recipe.sampler.num_envs), where


def doubts(recipe: Recipe) -> list[str]:
    """What is allowed and hardly meant."""
    found = []
    memory, explore = recipe.memory, recipe.exploration
    if isinstance(memory, ReplayConfig) and explore.unit == "steps" and explore.start != explore.end:
        left = recipe.total_steps - memory.warmup_steps
        if explore.over > left:
            least = schedules.linear(explore.start, explore.end, left / explore.over)
            found.append(f"exploration.over = {explore.over:,} of {left:,} steps: ε is still {least:.2g} at the end")
    workers = getattr(recipe.env, "workers", 0)
    if workers > cores():
        found.append(f"env.workers = {workers:,} for each group of simulators: this machine has {counted(cores(), 'core')}")
    if find_device(recipe.device).type == "cpu":
        if recipe.network.torso == "impala":
            found.append("network.torso = 'impala' is meant for a GPU: here even the first report may take minutes")
        if isinstance(memory, FreshConfig) and memory.overlap:
            found.append("memory.overlap on a CPU: whoever acts is a rollout behind, and nothing is gained by it")
        if recipe.bf16 and not multiplies_bf16():
            found.append("bf16: no instructions for it were found in this CPU, which is slower with it")
    return found


def identity(recipe: Recipe, custom: Custom, spec: EnvSpec, model: Model) -> dict[str, Any]:
    """What a checkpoint must agree on with whoever loads it."""
    tree = to_dict(recipe)
    return {
        "algorithm": type(custom.algorithm).__name__ if custom.algorithm else tree["algorithm"]["name"],
        "network": tree["network"]["torso"],
        "environment": spec.id,
        "observation": list(spec.obs),
        "actions": spec.actions,
        "parameters": model.parameters.numel(),
    }


def check_custom(recipe: Recipe, custom: Custom) -> None:
    """A run directory holds data, not code: custom parts must be given again."""
    for section, name in (("env", recipe.env.id), ("network", recipe.network.torso)):
        if name == "custom" and getattr(custom, section) is None:
            raise UsageError(f"this run used a custom {section}: open it from Python with mh.open_run(..., {section}=...)")


def describe(recipe: Recipe, custom: Custom) -> dict[str, Any]:
    """What a run would be, without starting one: for --dry-run."""
    spec, model = check(recipe, custom)
    parameters = model.parameters.numel()
    sampler = recipe.sampler
    frame_bytes = torch.zeros(spec.frame, dtype=getattr(torch, spec.dtype)).nbytes
    slots = sampler.horizon * sampler.columns
    # two buffers of frames, and the stacks of one rollout, twice while they change their layout
    rollout = 2 * (slots + spec.stack * sampler.num_envs) * frame_bytes + 2 * slots * spec.stack * frame_bytes
    memory = recipe.memory
    if isinstance(memory, ReplayConfig):
        _, needed, where = replay_of_one(recipe, memory, spec)
        batch, stacks = memory.batch, 2 * memory.batch
        extra = {
            "updates_per_step": memory.intensity / memory.batch,
            "replay_bytes": needed,
            "replay_device": str(choose_device(memory, math.ceil(needed), where, free_memory)),
            "replay_servers": memory.shards,
            # the newest is written before an old one goes, and the best is kept beside them
            "checkpoint_replays": recipe.checkpoint.keep + 2 if recipe.checkpoint.replay else 0,
        }
    else:
        batch = stacks = slots // memory.minibatches
        extra = {"updates_per_rollout": memory.epochs * memory.minibatches}
    inputs = stacks * frame_bytes * spec.stack * (5 if spec.dtype == "uint8" else 1)  # the bytes and their floats
    return {
        "device": str(find_device(recipe.device)),
        "learners": recipe.topology.learners,
        "observation": list(spec.obs),
        "actions": spec.actions,
        "parameters": parameters,
        "samples_per_update": batch,
        **extra,
        "rollout_bytes": rollout,
        "parameter_bytes": parameters * 4 * 5,  # vector, gradient, the actor's copy, two moments
        "input_bytes": inputs,
    }
