"""Torsos: from an observation to a vector of features. `build` finds them by name."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.nets.wide import Wide
from manyhands.types import EnvSpec, UsageError


class PixelConv(nn.Conv2d):
    """A first convolution that takes uint8 images as they are.

    Dividing the small kernel by 255 instead of the large image saves a pass over the batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.operands(x)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        return x.to(dtype, memory_format=torch.channels_last), (self.weight / 255).to(dtype)


class LevelConv(PixelConv):
    """A first layer for screens drawn in a few grey levels: each channel starts as a hinge at its own level of one frame.

    Levels such as 200 and 255 look alike to ordinary initial weights with zero biases; here they differ from the start.
    """

    def initialise(self) -> None:
        per_frame = self.out_channels // self.in_channels
        area = self.kernel_size[0] * self.kernel_size[1]
        with torch.no_grad():
            self.weight.zero_()
            for channel in range(self.out_channels):
                self.weight[channel, channel % self.in_channels] = 4.0 / area
                level = (channel // self.in_channels) / max(per_frame, 1)
                self.bias[channel] = -4.0 * level  # type: ignore[index]


class ConvTorso(nn.Module):
    """Convolutions given as (channels, kernel, stride), ReLU after each, then one fully connected layer."""

    def __init__(
        self,
        spec: EnvSpec,
        convs: Sequence[tuple[int, int, int]],
        features: int,
        first_padding: int = 0,
        later_padding: int = 0,
        pools: int = 0,
        first: type[PixelConv] = PixelConv,
        bias: bool = True,
        channels: int = 0,
    ) -> None:
        """pools: how many of the convolutions are followed by 2×2 max-pooling; channels: the input is zero-padded to them."""
        super().__init__()
        layers: list[nn.Module] = []
        channels, padding = max(channels, spec.obs[0]), first_padding
        self._padding = channels - spec.obs[0]
        for i, (out, kernel, stride) in enumerate(convs):
            layers.append((first if i == 0 else nn.Conv2d)(channels, out, kernel, stride, padding, bias=bias))
            layers.append(nn.ReLU(inplace=True))
            if i < pools:
                layers.append(nn.MaxPool2d(2))
            channels = out
            padding = kernel_padding(convs[i + 1][1]) if later_padding < 0 and i + 1 < len(convs) else later_padding
        self.convs = nn.Sequential(*layers)
        with torch.no_grad():
            try:
                shape = self.convs(self._padded(torch.zeros(1, *spec.obs, dtype=torch.uint8))).shape
            except RuntimeError as error:
                size = "×".join(map(str, spec.frame[1:]))
                raise UsageError(f"the network is too deep for {size} images of {spec.id}: choose a smaller torso") from error
        self.hidden = Wide(math.prod(shape[1:]), features)

    def forward(self, x: Tensor, results: list[Tensor] | None = None, known: list[Tensor] | None = None) -> Tensor:
        """Appends what each layer gave to results; takes it from known instead of computing it, and then computes
        gradients only. In both, the ReLU is part of the layer."""
        remaining = iter(known or ())
        x = self._padded(x)
        for layer in self.convs:
            if known is not None and isinstance(layer, nn.Conv2d):
                inputs = layer.operands(x) if isinstance(layer, PixelConv) else (x, layer.weight.to(x.dtype))
                x = _KnownConvolution.apply(*inputs, layer.bias, next(remaining), layer.stride, layer.padding)
            elif known is None or not isinstance(layer, nn.ReLU):
                x = layer(x)
                if results is not None and isinstance(layer, nn.ReLU):
                    results.append(x)
        # Channels stay last: in that memory layout this flattening is free.
        x = x.permute(0, 2, 3, 1).flatten(1)
        if known is not None:
            return F.relu(self.hidden(x, next(remaining)))  # once more: for the gradient
        x = F.relu(self.hidden(x), inplace=True)
        if results is not None:
            results.append(x)
        return x

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, self._padding)) if self._padding else x


class _KnownConvolution(torch.autograd.Function):
    """relu(conv2d(x, weight, bias)), whose result is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor, stride: Any, padding: Any) -> Tensor:
        ctx.save_for_backward(x, weight, result)
        ctx.stride, ctx.padding = stride, padding
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, result = ctx.saved_tensors
        gradient = torch.ops.aten.threshold_backward(gradient, result, 0)
        wanted = list(ctx.needs_input_grad[:3])
        size, dilation, no_output_padding = [len(weight)], [1, 1], [0, 0]
        gradients = torch.ops.aten.convolution_backward(
            gradient, x, weight, size, ctx.stride, ctx.padding, dilation, False, no_output_padding, 1, wanted
        )
        return *gradients, None, None, None


def kernel_padding(kernel: int) -> int:
    """What keeps the size of an image under an odd kernel."""
    return kernel // 2


def nature(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module:
    """Mnih et al. 2015. At 104×80 every convolution after the first is padded by 1 (Accelerated Methods)."""
    return ConvTorso(spec, [(32, 8, 4), (64, 4, 2), (64, 3, 1)], hidden[0], later_padding=_tall(spec))


def nips(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module:
    """Mnih et al. 2013."""
    return ConvTorso(spec, [(16, 8, 4), (32, 4, 2)], hidden[0], later_padding=_tall(spec))


def snake(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module:
    """Ong et al. 2015: same padding, pooling after each convolution."""
    return ConvTorso(spec, [(32, 7, 1), (64, 5, 1), (64, 3, 1)], hidden[0], first_padding=3, later_padding=-1, pools=3)


def ba3c(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module:
    """Adamski et al. 2018: no padding, no biases, pooling after the first three convolutions; 12 channels become 16."""
    convs = [(32, 5, 1), (32, 5, 1), (64, 5, 1), (64, 3, 1)]
    return ConvTorso(spec, convs, hidden[0], pools=3, bias=False, channels=16)


def cells(spec: EnvSpec, hidden: Sequence[int]) -> nn.Module:
    """Small and quick, for boards drawn with two pixels a cell: the first layer sees cells, the second their neighbours."""
    return ConvTorso(spec, [(16, 2, 2), (32, 3, 2)], hidden[0], later_padding=-1, first=LevelConv)


class Residual(nn.Module):
    """Two convolutions around which the input goes as well."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x)), inplace=True))

    def orthogonal_gains(self) -> dict[nn.Module, float]:
        """At first each block changes little: six of them would double what goes through again and again."""
        return {self.second: 0.5}


class Impala(nn.Module):
    """Espeholt et al. 2018, the deep one: three times a convolution, a pooling that halves, and two residual blocks."""

    def __init__(self, spec: EnvSpec, hidden: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = spec.obs[0]
        for i, out in enumerate((16, 32, 32)):
            layers.append((nn.Conv2d if i else PixelConv)(channels, out, 3, padding=1))
            layers += [nn.MaxPool2d(3, 2, padding=1), Residual(out), Residual(out)]
            channels = out
        self.convs = nn.Sequential(*layers, nn.ReLU(inplace=True))
        with torch.no_grad():
            shape = self.convs(torch.zeros(1, *spec.obs, dtype=torch.uint8)).shape
        self.hidden = Wide(math.prod(shape[1:]), hidden[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(x).permute(0, 2, 3, 1).flatten(1)  # channels stay last: in that memory layout this is free
        return F.relu(self.hidden(x), inplace=True)


class MLP(nn.Module):
    def __init__(self, spec: EnvSpec, hidden: Sequence[int]) -> None:
        super().__init__()
        sizes = [math.prod(spec.obs), *hidden]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1).to(torch.float32))


def _tall(spec: EnvSpec) -> int:
    return 1 if spec.frame[1:] == (104, 80) else 0


# name -> (maker, takes images, default hidden sizes)
TORSOS: dict[str, tuple[Callable[[EnvSpec, Sequence[int]], nn.Module], bool, tuple[int, ...]]] = {
    "nature": (nature, True, (512,)),
    "nips": (nips, True, (256,)),
    "snake": (snake, True, (512,)),
    "ba3c": (ba3c, True, (128,)),
    "cells": (cells, True, (256,)),
    "impala": (Impala, True, (256,)),
    "mlp": (MLP, False, (64, 64)),
}


def make_torso(name: str, spec: EnvSpec, hidden: Sequence[int]) -> nn.Module:
    maker, images, default = TORSOS[name]
    if images != spec.is_image:
        kind, fitting = ("images", "nature, nips, cells") if spec.is_image else ("vectors", "mlp")
        raise UsageError(f"network.torso = {name!r} does not fit {spec.id}, which shows {kind}: choose one of {fitting}")
    hidden = tuple(hidden) or default
    if images and len(hidden) != 1:
        raise UsageError(f"network.hidden = {list(hidden)} does not fit {name!r}: it has one hidden layer, give one size")
    return maker(spec, hidden)
