"""Random numbers keyed by what they are for – (seed, stream, simulator, slot) – instead of drawn in order.

So serial sampling equals batched, and a resumed run equals an uninterrupted one, with no generator state to save.
The mixing function is splitmix64's (Steele, Lea, Flood 2014).
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

# Streams: what a number is for.
ACT, ENV, APPLE, SHUFFLE, DECORRELATE, INIT, START, REPLAY = range(8)


def key(*words: int) -> int:
    """A 63-bit key from a sequence of integers; order matters."""
    state = 0
    for word in words:
        state = _mix((state * _GOLDEN + word + _GOLDEN) & _MASK)
    return state >> 1


def env_seed(*words: int) -> int:
    """A seed that every simulator takes: ale-py wants a Python int below 2**31."""
    return key(*words) % (2**31 - 1)


def uniform(seed: int, stream: int, simulator: Tensor, slot: Tensor, draws: int) -> Tensor:
    """U[0, 1) of shape broadcast(simulator, slot) + (draws,), on simulator's device."""
    simulator, slot = torch.broadcast_tensors(simulator, slot)
    draw = torch.arange(draws, device=simulator.device)
    state = _join(_join(_signed(key(seed, stream)), simulator), slot)
    bits = _join(state.unsqueeze(-1), draw)
    return _shift(bits, 40).to(torch.float32) * 2.0**-24


def permutation(n: int, *words: int, device: torch.device | None = None) -> Tensor:
    """A random order of range(n), the same on every device."""
    generator = torch.Generator().manual_seed(key(*words))
    on_gpu = device is not None and device.type == "cuda"
    # From page-locked memory: a copy from any other would wait for all that the GPU has been told to do before.
    return torch.randperm(n, generator=generator, pin_memory=on_gpu).to(device, non_blocking=True)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # torch shifts int64 arithmetically; this is the logical shift


def _join(state: Tensor | int, word: Tensor) -> Tensor:
    """One round of key() on tensors: int64 arithmetic wraps as uint64's does."""
    if isinstance(state, int):  # no tensor for it: its way to a GPU could not be captured in a graph
        z = word + _signed((state * _GOLDEN + _GOLDEN) & _MASK)
    else:
        z = state * _signed(_GOLDEN) + word + _signed(_GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    return z ^ _shift(z, 31)
