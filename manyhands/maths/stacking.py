"""Frame stacks, assembled where they are used from frames that are kept once."""

import numpy as np
import torch
from torch import Tensor

from manyhands.types import Rollout


def stacked(frames: Tensor, first: Tensor, rows: Tensor, stack: int) -> Tensor:
    """The stacks whose newest frames are the given rows; planes from before an episode's reset are zero.

    frames [L, B, C, ...], first [L, B], rows [N] = slot * B + simulator -> [N, stack * C, ...], oldest frame first, as
    Gymnasium and ale-py stack. The slots are a ring: the last one lies before the first.
    """
    flat = _words(frames)
    if stack == 1:
        return flat.index_select(0, rows).view(frames.dtype).unflatten(1, frames.shape[2:])
    back = torch.arange(stack - 1, -1, -1, device=rows.device) * frames.shape[1]
    planes_at = (rows.unsqueeze(1) - back) % len(flat)  # [N, S]
    planes = flat.index_select(0, planes_at.flatten()).unflatten(0, planes_at.shape)  # [N, S, words]
    reset = first.flatten()[planes_at[:, 1:]]  # [N, S-1]
    if planes.is_cuda or bool(reset.any()):  # asking costs a synchronisation on a GPU, masking a copy on a CPU
        since = reset.flip(1).cumsum(1).flip(1)  # resets between each older plane and the newest
        keep = torch.cat([since == 0, torch.ones_like(since[:, :1], dtype=torch.bool)], 1)
        planes *= keep.unsqueeze(2)
    return planes.view(frames.dtype).unflatten(2, frames.shape[2:]).flatten(1, 2)


def _words(frames: Tensor) -> Tensor:
    """[L, B, C, ...] -> [L * B, bytes / 8] where that comes out even: a GPU copies eight bytes as soon as one."""
    flat = frames.flatten(0, 1).flatten(1)
    size = flat.element_size()
    even = flat.shape[1] * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(torch.int64) if even else flat


def stacked_last(frames: Tensor, first: Tensor, rows: Tensor, stack: int) -> Tensor:
    """The same on a CPU, in the memory layout that convolutions read: channels last. Plane by plane, half of the time of
    stacking first and changing the layout afterwards."""
    pixels, begins = frames.flatten(0, 1), first.flatten()
    planes: list[Tensor] = []
    at, gone = rows, torch.zeros(len(rows), dtype=torch.bool)  # gone: this plane is from before the episode's start
    for _ in range(stack):
        plane = pixels.index_select(0, at)  # [N, C, ...]
        if bool(gone.any()):
            plane[gone] = 0
        planes.insert(0, plane.movedim(1, -1))
        gone = gone | begins.index_select(0, at)
        at = (at - frames.shape[1]) % len(pixels)
    return torch.stack(planes, -2).flatten(-2).movedim(-1, 1)


def push(stacks: np.ndarray, frame: np.ndarray, first: np.ndarray, out: np.ndarray) -> None:
    """The next stacks, channels last: stacks and out [B, ..., stack * C] contiguous, frame [B, C, ...], first [B].

    One move of all bytes by one frame's channels; what it brings over from the neighbouring pixel is where the new frame goes.
    """
    channels = frame.shape[1]
    out.reshape(-1)[:-channels] = stacks.reshape(-1)[channels:]
    out[..., -channels:] = np.moveaxis(frame, 1, -1)
    if first.any():
        out[first, ..., :-channels] = 0


def rollout_stacks(rollout: Rollout, begin: int, end: int) -> Tensor:
    """What the network sees in the slots from begin to end, [N, *obs]; images in the layout that the convolutions read."""
    if rollout.stacks is not None:
        return rollout.stacks[begin:end].flatten(0, 1)
    B, history = rollout.action.shape[1], rollout.stack - 1  # obs starts `history` slots before the first action
    rows = torch.arange((history + begin) * B, (history + end) * B, device=rollout.obs.device)
    obs = stacked(rollout.obs, rollout.first, rows, rollout.stack)
    return obs.contiguous(memory_format=torch.channels_last) if obs.dim() == 4 else obs
