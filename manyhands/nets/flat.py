"""One flat vector behind all of a module's parameters, and one behind their gradients.

Stores, update rules, copies and messages deal with these two vectors only. Convolution kernels are views in
channels-last order, the layout that the convolutions compute in.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from manyhands.nets.wide import Wide


@dataclass(frozen=True)
class Model:
    net: nn.Module
    parameters: Tensor  # [P]
    gradient: Tensor  # [P]

    def named_slices(self) -> dict[str, slice]:
        slices, start = {}, 0
        for name, parameter in self.net.named_parameters():
            slices[name] = slice(start, start + parameter.numel())
            start += parameter.numel()
        return slices

    @contextmanager
    def new_gradient(self) -> Iterator[None]:
        """What is accumulated within it replaces the gradient."""
        for layer in self._wide:
            layer.renew = True
        for piece in self._rest:
            piece.zero_()
        yield
        for layer in self._wide:
            if layer.renew and layer.weight.grad is not None:  # nothing came that far
                layer.weight.grad.zero_()
                layer.renew = False

    @cached_property
    def _wide(self) -> list[Wide]:
        """Layers that overwrite their weights' gradient."""
        if self.gradient.is_cuda:
            return []
        wide = [layer for layer in self.net.modules() if isinstance(layer, Wide)]
        users = Counter(layer.weight for layer in wide)
        return [layer for layer in wide if users[layer.weight] == 1]  # gradients of a shared matrix are added to zeros

    @cached_property
    def _rest(self) -> list[Tensor]:
        """The gradient of everything else."""
        weights, start, pieces = {layer.weight for layer in self._wide}, 0, []
        for parameter, own in zip(self.net.parameters(), self.named_slices().values(), strict=True):
            if parameter in weights:
                pieces.append(self.gradient[start : own.start])
                start = own.stop
        return [*pieces, self.gradient[start:]]

    def replica(self) -> Model:
        """The same network on a vector of its own, for acting or as a target; it never needs gradients."""
        model = flatten(copy.deepcopy(self.net))
        model.net.requires_grad_(False)
        return model


def flatten(net: nn.Module) -> Model:
    """Moves the parameters of net into one vector, in place."""
    parameters = list(net.parameters())
    flat = torch.cat([_memory_order(p.detach()).reshape(-1) for p in parameters])
    gradient = torch.zeros_like(flat)
    start = 0
    for p in parameters:
        end = start + p.numel()
        p.data = _view(flat[start:end], p.shape)
        p.grad = _view(gradient[start:end], p.shape)
        start = end
    return Model(net, flat, gradient)


def _memory_order(p: Tensor) -> Tensor:
    return p.permute(0, 2, 3, 1) if p.dim() == 4 else p


def _view(flat: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(shape)
