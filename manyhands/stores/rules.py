"""Update rules over one flat vector, or a slice of it.

What torch.optim has is used as it is, in its functional form (an Optimizer object would import the compiler, more than a second
in every process); what it lacks is written here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop

from manyhands.maths import schedules
from manyhands.types import UsageError


@dataclass(frozen=True)
class Rule:
    learning_rate: float = 2.5e-4
    """Step size, before scaling and annealing."""
    anneal: Literal["none", "linear"] = "none"
    """linear: the learning rate falls to zero over total_steps."""
    scaling: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate grows with the batch, relative to reference_batch."""
    reference_batch: int = 0
    """Samples an update for which learning_rate was found (scaling other than none needs it)."""
    max_grad_norm: float = 0.0
    """Clip the gradient's global norm; 0 leaves it alone."""
    max_average_norm: float = 0.0
    """Clip each tensor's norm, divided by its size (BA3C: 0.1); 0 leaves it alone."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_grad_norm", "max_average_norm", "epsilon", "decay"):
            value = getattr(self, name, 0.0)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"rule.{name} = {value}: must be a number that is not negative")
        if self.scaling != "none" and self.reference_batch < 1:
            raise UsageError(f"rule.scaling = {self.scaling!r} needs rule.reference_batch, the batch the rate was found for")

    @property
    def capturable(self) -> bool:
        """Can be part of a CUDA graph; its rate is then a tensor there."""
        return False

    def apply(self, parameters: Tensor, gradient: Tensor, memory: dict[str, Tensor], rate: float | Tensor) -> None:
        """One step, in place."""
        raise TypeError("choose a concrete rule")

    def initial_state(self, parameters: Tensor) -> dict[str, Tensor]:
        """What the rule remembers before its first step: vectors as long as the parameters, and scalars."""
        raise TypeError("choose a concrete rule")

    def rate(self, batch: int, progress: float) -> float:
        rate = self.learning_rate
        if self.scaling != "none":
            rate = schedules.scaled_rate(rate, self.scaling, batch, self.reference_batch)
        return schedules.linear(rate, 0.0, progress) if self.anneal == "linear" else rate


@dataclass(frozen=True)
class Adam(Rule):
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-5

    @property
    def capturable(self) -> bool:
        return True

    def apply(self, parameters: Tensor, gradient: Tensor, memory: dict[str, Tensor], rate: float | Tensor) -> None:
        m, v, t = (memory[name] for name in ("exp_avg", "exp_avg_sq", "step"))
        adam(
            [parameters], [gradient], [m], [v], [], [t], fused=True, amsgrad=False, beta1=self.beta1, beta2=self.beta2, lr=rate,
            weight_decay=0.0, eps=self.epsilon, maximize=False,
        )  # fmt: skip

    def initial_state(self, parameters: Tensor) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(parameters) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=parameters.device), **moments}


@dataclass(frozen=True)
class RMSProp(Rule):
    decay: float = 0.99
    epsilon: float = 1e-5
    epsilon_inside: bool = False
    """Divide by √(r + ε), as the papers and TensorFlow do, instead of √r + ε, as torch does."""
    initial_square: float = 0.0
    """Where the running mean of squares r starts (TensorFlow: 1). Only with epsilon_inside."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_square and not self.epsilon_inside:
            raise UsageError("rule.initial_square needs rule.epsilon_inside = true: torch's own RMSProp starts at 0")
        if self.decay >= 1:
            raise UsageError(f"rule.decay = {self.decay}: must be less than 1, or nothing would ever be added to the mean")

    @property
    def capturable(self) -> bool:
        return self.epsilon_inside

    def apply(self, parameters: Tensor, gradient: Tensor, memory: dict[str, Tensor], rate: float | Tensor) -> None:
        if self.epsilon_inside:
            self._apply_inside(parameters, gradient, memory["scaled"], rate)
            return
        rmsprop(
            [parameters], [gradient], [memory["square_avg"]], [], [], [memory["step"]], foreach=False, lr=float(rate),
            alpha=self.decay, eps=self.epsilon, weight_decay=0.0, momentum=0.0, centered=False,
        )  # fmt: skip

    def _apply_inside(self, parameters: Tensor, gradient: Tensor, scaled: Tensor, rate: float | Tensor) -> None:
        """r ← decay·r + (1 - decay)·g²;  θ ← θ - lr·g/√(r + ε)

        What is kept is s = (r + ε)/(1 - decay). In terms of s it is s ← decay·s + ε, and then a step of AdaGrad with the rate
        lr/√(1 - decay): torch does that in one pass over memory, and the whole took a third of the five passes over r."""
        rate = rate / math.sqrt(1 - self.decay)
        if isinstance(rate, Tensor) or parameters.is_cuda:
            scaled.mul_(self.decay).add_(self.epsilon).addcmul_(gradient, gradient)
            parameters.sub_(rate * gradient / scaled.sqrt())
        else:
            torch.add(torch.tensor(self.epsilon), scaled, alpha=self.decay, out=scaled)
            _adagrad(parameters, gradient, scaled, torch.zeros(()), rate, epsilon=0.0)

    def initial_state(self, parameters: Tensor) -> dict[str, Tensor]:
        if self.epsilon_inside:
            return {"scaled": torch.full_like(parameters, (self.initial_square + self.epsilon) / (1 - self.decay))}
        return {"step": torch.zeros(()), "square_avg": torch.zeros_like(parameters)}


@dataclass(frozen=True)
class AdaGrad(Rule):
    """Gorila's: θ ← θ - lr·g/(√(Σ g²) + ε)"""

    epsilon: float = 1e-10
    initial_square: float = 0.0
    """Where the sum of squares starts."""

    def apply(self, parameters: Tensor, gradient: Tensor, memory: dict[str, Tensor], rate: float | Tensor) -> None:
        _adagrad(parameters, gradient, memory["sum"], memory["step"], float(rate), self.epsilon)

    def initial_state(self, parameters: Tensor) -> dict[str, Tensor]:
        return {"step": torch.zeros(()), "sum": torch.full_like(parameters, self.initial_square)}


def _adagrad(parameters: Tensor, gradient: Tensor, squares: Tensor, step: Tensor, rate: float, epsilon: float) -> None:
    adagrad(
        [parameters], [gradient], [squares], [step], fused=not parameters.is_cuda, lr=rate, weight_decay=0.0, lr_decay=0.0,
        eps=epsilon, maximize=False,
    )  # fmt: skip
