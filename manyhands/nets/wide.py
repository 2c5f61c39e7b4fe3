"""The one large matrix of a convolutional network, faster on a CPU than torch's own layer.

For the nature network, 1.6 of 1.69 M parameters. On Intel's CPUs by less traffic to memory: together with gate.length() DQN on
Pong, in batches of 32 on two cores, is 1.1 times as fast, PPO and A2C 1.01 to 1.04 times. On AMD's by another library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from manyhands import machine

SMALL = 64  # samples up to which W·xᵀ is faster than x·Wᵀ in MKL: half of the time for 8, the same from about 80 on

# Torch multiplies with MKL, which keeps its best kernels for Intel's CPUs: on an AMD EPYC with AVX-512 oneDNN, which torch
# convolves with, takes less than half of the time, from 4 samples to 1024.
ONEDNN = torch.backends.mkldnn.is_available() and machine.is_amd()


class Wide(nn.Linear):
    renew = False  # the next gradient of the weights replaces the last one; or it is added, as everywhere in torch

    def forward(self, x: Tensor, known: Tensor | None = None) -> Tensor:
        """known: the result, where only gradients are wanted."""
        return super().forward(x) if x.is_cuda else _Product.apply(x, self.weight, self.bias, self, known)


class _Product(torch.autograd.Function):
    """The gradient of the weights is written to where it belongs, instead of to a new matrix that is then added to zeros. oneDNN
    gives a new matrix in any case: that is copied, and nothing is zeroed before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: Wide, known: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return _product(x, weight, bias) if known is None else known.view_as(known)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x = _product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        of_weight, sum_so_far = None, ctx.layer.weight.grad
        if ctx.needs_input_grad[1] and sum_so_far is None:
            of_weight = _product(gradient.t(), x.t())
        elif ctx.needs_input_grad[1]:
            if x.dtype == weight.dtype and not _by_onednn(x):
                sum_so_far.addmm_(gradient.t(), x, beta=0.0 if ctx.layer.renew else 1.0)
            elif ctx.layer.renew:
                sum_so_far.copy_(_product(gradient.t(), x.t()))
            else:
                sum_so_far.add_(_product(gradient.t(), x.t()))
            ctx.layer.renew = False
        return of_x, of_weight, of_bias, None, None


def _by_onednn(x: Tensor) -> bool:
    # torch's compiler does not know the operation.
    return ONEDNN and x.dtype == torch.float32 and x.numel() > 0 and not torch.compiler.is_compiling()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b, in the precision of x"""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if _by_onednn(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if bias is None:
        return x @ weight.t()
    if len(x) > SMALL:
        return torch.addmm(bias, x, weight.t())
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t().contiguous()
