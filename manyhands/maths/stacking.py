"""Frame stacks, assembled where they are used from frames that are kept once."""

import torch
from torch import Tensor


def stacked(frames: Tensor, first: Tensor, rows: Tensor, stack: int) -> Tensor:
    """The stacks whose newest frames are the given rows; planes from before an episode's reset are zero.

    frames [L, B, C, ...], first [L, B], rows [N] = slot * B + simulator, each slot >= stack - 1 -> [N, stack * C, ...],
    oldest frame first, as Gymnasium and ale-py stack.
    """
    flat = frames.flatten(0, 1)
    if stack == 1:
        return flat.index_select(0, rows)
    back = torch.arange(stack - 1, -1, -1, device=rows.device) * frames.shape[1]
    planes_at = rows.unsqueeze(1) - back  # [N, S]
    planes = flat.index_select(0, planes_at.flatten()).unflatten(0, planes_at.shape)  # [N, S, C, ...]
    reset = first.flatten()[planes_at[:, 1:]]  # [N, S-1]
    if planes.is_cuda or bool(reset.any()):  # asking costs a synchronisation on a GPU, masking a copy on a CPU
        since = reset.flip(1).cumsum(1).flip(1)  # resets between each older plane and the newest
        keep = torch.cat([since == 0, torch.ones_like(since[:, :1], dtype=torch.bool)], 1)
        planes *= keep.to(planes.dtype).view(*keep.shape, *[1] * (planes.dim() - 2))
    return planes.flatten(1, 2)
