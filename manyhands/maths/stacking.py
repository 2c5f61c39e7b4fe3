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
    if stack == 1:
        return _words(frames).index_select(0, rows).view(frames.dtype).unflatten(1, frames.shape[2:])
    return _planes(frames, first, rows.unsqueeze(1) - _back(frames, stack), 1).flatten(1, 2)


def stacked_last(frames: Tensor, first: Tensor, rows: Tensor, stack: int) -> Tensor:
    """The same on a CPU, in the memory layout that convolutions read: channels last. Half of the time of changing the layout
    afterwards."""
    planes = _planes(frames, first, rows - _back(frames, stack).unsqueeze(1), 0)  # [S, N, C, ...]
    return torch.stack(planes.movedim(2, -1).unbind(), -2).flatten(-2).movedim(-1, 1)


def room_for_frames(slots: int, simulators: int, frame: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, [L, B, C, ...]; behind them in memory lies one frame more, which stays empty."""
    rows = slots * simulators
    return torch.zeros(rows + 1, *frame, dtype=dtype, device=device)[:rows].view(slots, simulators, *frame)


def rows_of_stacks(newest: np.ndarray, shown: np.ndarray, stack: int, room: Tensor) -> np.ndarray:
    """Where the planes of these stacks lie, [N, S], for frames_at(): whoever knows how many frames each simulator has `shown`
    since its reset, before the newest, can say it without asking where the frames are."""
    back = np.arange(stack - 1, -1, -1)
    return np.where(back <= shown[:, None], newest[:, None] - back * room.shape[1], room.shape[0] * room.shape[1])


def frames_at(room: Tensor, rows: Tensor, stack: int) -> Tensor:
    """The stacks [N, S * C, ...] of the rows [N * S], by one gathering: nothing is left to mask."""
    slots, simulators, *frame = room.shape
    flat = _words(room.as_strided((slots * simulators + 1, 1, *frame), (room.stride(1), room.stride(1), *room.stride()[2:])))
    return flat.index_select(0, rows).view(room.dtype).unflatten(1, frame).unflatten(0, (-1, stack)).flatten(1, 2)


def _back(frames: Tensor, stack: int) -> Tensor:
    """How many rows before the newest frame each plane of its stack lies."""
    return torch.arange(stack - 1, -1, -1, device=frames.device) * frames.shape[1]


def _planes(frames: Tensor, first: Tensor, at: Tensor, of_stack: int) -> Tensor:
    """The frames at these rows, [*at.shape, C, ...]; of_stack: the dimension of `at` along which a stack's planes follow."""
    flat, at = _words(frames), at % first.numel()
    planes = flat.index_select(0, at.flatten()).unflatten(0, at.shape)
    reset = first.flatten()[at.narrow(of_stack, 1, at.shape[of_stack] - 1)]
    if planes.is_cuda or bool(reset.any()):  # asking costs a synchronisation on a GPU, masking a copy on a CPU
        since = reset.flip(of_stack).cumsum(of_stack).flip(of_stack)  # resets between each older plane and the newest
        newest = torch.ones_like(at.narrow(of_stack, 0, 1), dtype=torch.bool)
        planes *= torch.cat([since == 0, newest], of_stack).unsqueeze(2)
    return planes.view(frames.dtype).unflatten(2, frames.shape[2:])


def _words(frames: Tensor) -> Tensor:
    """[L, B, C, ...] -> [L * B, bytes / 8] where that comes out even: a GPU copies eight bytes as soon as one."""
    flat = frames.flatten(0, 1).flatten(1)
    size = flat.element_size()
    even = flat.shape[1] * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    return flat.view(torch.int64) if even else flat


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
