"""The words of manyhands and the shapes that travel between its parts. Imports nothing of ours, and no torch at run time.

step      one decision of one simulator (a reset is not a decision)
frame     one frame of the emulator: an Atari step is four of them
slot      one row of a rollout: a step, or the reset that a simulator needed instead of one
update    one application of a gradient to the central parameters
version   how many updates those parameters have seen
episode   from a real reset to a real end; a lost life ends nothing but, where a recipe says so, a learning return
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    Array = np.ndarray | Tensor


class UsageError(Exception):
    """Wrong input. The command line prints its one line and exits with 2, before anything was started."""


class RunError(Exception):
    """Something broke while running and cannot be mended. The command line prints it and exits with 1."""


@dataclass(frozen=True)
class EnvSpec:
    """What a simulator shows and takes. `frame` is one observation; the network sees `stack` of them, joined along axis 0."""

    id: str
    frame: tuple[int, ...]
    dtype: str  # "uint8" (images, channels first) or "float32" (vectors)
    stack: int
    actions: int
    frames_per_step: int = 1

    @property
    def obs(self) -> tuple[int, ...]:
        return (self.stack * self.frame[0], *self.frame[1:])

    @property
    def is_image(self) -> bool:
        return len(self.frame) == 3


@dataclass(frozen=True)
class Step:
    """What B simulators answered. The arrays may be overwritten by the next `send`."""

    obs: Array  # [B, *frame] newest frame; after an end it is the episode's true last one
    reward: Array  # [B] raw
    terminated: Array  # [B] the game is over
    truncated: Array  # [B] stopped from outside: the return goes on without us
    life_lost: Array  # [B]
    first: Array  # [B] this slot only reset: obs begins a new episode, the action was ignored


class EnvGroup(Protocol):
    """A batch of simulators stepped asynchronously. After an end, the next slot is the reset, for every kind of simulator."""

    num_envs: int

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, seeds: list[int]) -> Step: ...
    def send(self, actions: Array) -> None: ...
    def recv(self) -> Step: ...
    def restart(self, which: Array) -> Step:
        """Begin a new episode in the marked simulators only. Not while a send is pending."""
        ...

    def screen(self, index: int) -> np.ndarray:
        """What a person would see, [H, W, 3]."""
        ...

    def state(self) -> dict | None:
        """Everything needed to go on mid-episode, or None where the simulator cannot say."""
        ...

    def load(self, state: dict) -> None: ...
    def close(self) -> None: ...


class PartialGroup(Protocol):
    """Simulators that are served as soon as some of them are ready."""

    spec: EnvSpec
    num_envs: int

    def begin(self, seeds: list[int]) -> None:
        """Each simulator's first answer is its reset."""
        ...

    def serve(self) -> tuple[np.ndarray, Step]:
        """Some that are ready, by number, and what they answered."""
        ...

    def answer(self, actions: Array) -> None:
        """To those that were served last; then serve() again."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rollout:
    """T slots of B simulators, time first. obs and first carry H = stack - 1 earlier slots, so that stacks can be assembled."""

    obs: Tensor  # [H+T+1, B, *frame]
    first: Tensor  # [H+T+1, B] a real reset: the stack restarts here (a life loss cuts, but the stack goes on)
    action: Tensor  # [T, B]
    reward: Tensor  # [T, B] as learned from (clipped where the recipe says so)
    discount: Tensor  # [T, B] gamma, 0 where terminated
    cut: Tensor  # [T, B] terminated or truncated: nothing may span it
    weight: Tensor  # [T, B] 0 on a slot that only reset
    extras: dict[str, Tensor]  # from act(): log-probability, value
    version: Tensor  # [T, B] parameters that acted
    steps: int  # decisions among the T * B slots
    stack: int
    episodes: list[Episode] = field(default_factory=list)
    stacks: Tensor | None = None  # [T+1, B, *obs] what the network saw, where acting assembled it frame by frame
    queue: int | None = None  # pieces that wait behind these, where simulators are not served in lock-step


@dataclass(frozen=True)
class Episode:
    raw_return: float
    steps: int
    simulator: int


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy gradient learns from. Weights are 0 on slots that only reset."""

    obs: Tensor  # [N, *obs]
    action: Tensor  # [N]
    log_prob: Tensor  # [N] when it acted
    value: Tensor  # [N] when it acted
    advantage: Tensor  # [N]
    value_target: Tensor  # [N]
    weight: Tensor  # [N]


@dataclass(frozen=True)
class TransitionBatch:
    """What value learning learns from: n steps, and the state after them."""

    obs: Tensor  # [N, *obs]
    action: Tensor  # [N]
    reward: Tensor  # [N] discounted sum up to n steps or a cut
    discount: Tensor  # [N] of what follows: γⁿ, 0 after a termination
    next_obs: Tensor  # [N, *obs] at a cut the episode's true last one
    weight: Tensor  # [N] importance
    keys: Tensor  # [N] where they lie in the replay


@dataclass(frozen=True)
class Loss:
    value: Tensor  # a scalar to differentiate
    metrics: dict[str, Tensor]  # scalars, detached
    priority: Tensor | None = None  # [N] how surprising each sample was


class Algorithm(Protocol):
    """Pure maths. Knows nothing of processes, devices and optimisers."""

    @property
    def gamma(self) -> float: ...
    def head(self, features: int, actions: int) -> nn.Module: ...
    def act(self, net: nn.Module, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """epsilon [B]; noise U(0,1) [B, 2], drawn per (seed, simulator, slot)."""
        ...

    def greedy(self, net: nn.Module, obs: Tensor) -> Tensor: ...
    def prepare(self, net: nn.Module, rollout: Rollout) -> PolicyBatch:
        """On-policy: returns and advantages. obs is left empty: the memory stacks frames where they are used."""
        ...

    def loss(self, net: nn.Module, target: nn.Module | None, batch: Any, progress: float | Tensor) -> Loss:
        """progress: the share of the run that is over; a tensor where the loss is captured as a CUDA graph."""
        ...


class Policy(Protocol):
    """What the sampler asks for actions."""

    version: int
    stream: Any  # the CUDA stream on which simulators that are elsewhere are served; None: the current one

    def act(self, obs: Tensor, epsilon: Tensor, noise: Tensor) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True)
class Streamed:
    """In a state: a tensor too large to be copied before it is saved. Loaded, it comes back as something with read_into()."""

    tensor: Tensor


class Stateful(Protocol):
    def state(self) -> dict: ...
    def load(self, state: dict) -> None: ...


class Sampler(Protocol):
    spec: EnvSpec
    seconds: dict[str, float]  # where its time went
    epsilon: Tensor  # [B] the share of random actions of each simulator, for algorithms that want it

    @property
    def replaced_workers(self) -> int:
        """Simulator processes that were lost."""
        ...

    def state(self, mid_rollout: bool = False) -> dict: ...
    def load(self, state: dict) -> None: ...
    def run(self, policy: Policy) -> Iterator[Rollout | None]:
        """Yields None after each send (the simulators are busy, use the time) and a Rollout when one is full.

        A rollout's tensors stay valid until the next but one is yielded.
        """
        ...

    def close(self) -> None: ...


class Memory(Stateful, Protocol):
    def add(self, rollout: Rollout) -> None: ...
    def next(self) -> Any | None:
        """One batch that the data has paid for, or None when nothing is owed now."""
        ...

    def feedback(self, keys: Tensor, priority: Tensor) -> None:
        """How surprising the samples of a batch were."""
        ...

    def metrics(self) -> dict[str, float]:
        """What it holds, after a rollout was added."""
        ...


@dataclass(frozen=True)
class Clock:
    """The run's global counters. Schedules, target periods and epsilon run on them and name their unit."""

    updates: int = 0
    steps: int = 0


ACTORS_FROM = 1_000_000


@dataclass(frozen=True)
class Seat:
    """Which of how many learners (or actors) this is, and how often its place was taken before."""

    rank: int = 0
    learners: int = 1
    life: int = 0
    acts: bool = True  # has simulators
    learns: bool = True

    @property
    def number(self) -> int:
        """One for everybody: actors, who only act, have a rank among themselves."""
        return self.rank if self.learns else ACTORS_FROM + self.rank


@dataclass(frozen=True)
class Progress:
    """What a learner tells after some rollouts."""

    clock: Clock
    episodes: list[Episode]
    refused: int  # gradients that were not finite, so far
    replaced: int  # simulator processes that were lost, so far
    sums: dict[str, Any] | None = None  # of metrics since the last time, where asking for them would be a call of its own


@dataclass(frozen=True)
class GradientInfo:
    """What a gradient says about itself."""

    version: int
    samples: int
    loss: Any = 0.0  # a number, or a scalar still on its device


@dataclass(frozen=True)
class Receipt:
    clock: Clock
    applied: bool
    metrics: dict[str, Any] = field(default_factory=dict)


class Store(Stateful, Protocol):
    """Where parameters and optimiser state live; bound to the model's flat parameters and gradient."""

    clock: Clock

    @property
    def refused(self) -> int:
        """Gradients that were not finite, and so never applied."""
        ...

    def count(self, steps: int) -> int:
        """Report steps taken. Returns how many of them a replay may count as paid: where learners must make the same number
        of updates, an equal share of everybody's."""
        ...

    def refresh(self) -> Clock:
        """Fetch the newest parameters."""
        ...

    def step(self, info: GradientInfo) -> Receipt:
        """Apply the flat gradient; afterwards the flat vector is what the next gradient uses."""
        ...

    def flush(self) -> None:
        """Local updates that nobody else has seen yet become everybody's."""
        ...

    def take_staleness(self) -> dict[int, int]:
        """How many gradients since the last call found so many updates of others since their parameters were read."""
        ...

    def close(self) -> None: ...


class Future(Protocol):
    def done(self) -> bool: ...
    def result(self) -> Any:
        """Waits. Raises what the component raised, or that it was lost."""
        ...


class Handle(Protocol):
    """A component somewhere: its methods are called by name, in order."""

    name: str

    def call(self, method: str, *arguments: Any, timeout_s: float = float("inf")) -> Future: ...
    def hurry(self) -> None: ...
    def hang_up(self) -> None:
        """No more calls."""
        ...

    def close(self, deadline: float) -> None:
        """Ends it, waiting until the deadline (time.monotonic). May be called twice."""
        ...


class Caller(Protocol):
    """What one component has of another: calls go directly, not through the parent."""

    name: str

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Future:
        """Arrays among the arguments are read before the call is done, those of an answer are valid until the next call."""
        ...

    def close(self) -> None: ...


class Address(Protocol):
    """Where a component is to be found, also after it was replaced. Can be sent to other components."""

    def connect(self, timeout_s: float) -> Caller: ...


@dataclass(frozen=True)
class Places:
    """Where learners and actors find what they share."""

    servers: tuple[Address, ...]  # of parameters
    chief: Address | None = None  # of synchronous learners
    replays: tuple[Address, ...] = ()


class Host(Protocol):
    """How components are started and called."""

    ahead: int  # calls worth having in flight

    def start(self, make: Callable[..., Any], *arguments: Any, name: str, threads: int = 1, door: str | None = None) -> Handle:
        """door: other components may call it, see address()."""
        ...

    def address(self, door: str, title: str) -> Address:
        """Of what was, or will be, started with that door."""
        ...

    def wait(self, futures: list[Any], timeout_s: float) -> None: ...
    def close(self) -> None: ...
