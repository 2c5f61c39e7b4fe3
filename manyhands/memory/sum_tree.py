"""A tree of sums over non-negative leaves: draws in proportion to them, changes many of them at once.

Each node has many children, which lie side by side: a million leaves are three levels deep, and few large steps are sooner done
than twenty small ones. A parent is computed from its children anew whenever one of them changes, so rounding errors do not add
up.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

FAN = 128


class SumTree:
    def __init__(self, leaves: int, device: torch.device, fan: int = FAN) -> None:
        self.leaves, self._fan = leaves, fan
        self._levels: list[Tensor] = []  # the leaves first, the root last; all but the root filled up to whole families
        size = leaves
        while size > 1 or not self._levels:
            families = -(-size // fan)
            self._levels.append(torch.zeros(families * fan, dtype=torch.float64, device=device))
            size = families
        self._levels.append(torch.zeros(1, dtype=torch.float64, device=device))

    @property
    def total(self) -> Tensor:
        return self._levels[-1][0]

    def get(self, index: Tensor) -> Tensor:
        return self._levels[0][index]

    def set(self, index: Tensor, value: Tensor) -> None:
        """Repeated indices must carry equal values."""
        self._levels[0][index] = value.to(torch.float64)
        node = index
        for below, above in pairwise(self._levels):
            node = node // self._fan
            if node.device.type == "cpu":  # on a GPU to compute a sum twice is cheaper than to find out
                node = node.unique()
            above[node] = self._family(below, node).sum(1)

    def draw(self, u: Tensor) -> Tensor:
        """The leaf at which the running sum passes u * total, u in [0, 1)."""
        node = torch.zeros_like(u, dtype=torch.int64)
        left_over = u.to(torch.float64) * self.total
        for level in reversed(self._levels[:-1]):
            children = self._family(level, node)  # [N, fan]
            running = children.cumsum(1)
            # Whatever rounding says, the draw ends in this family, and never in an empty child.
            left_over = torch.minimum(left_over, running[:, -1] * (1 - 1e-12)).unsqueeze(1)
            passed = (running > left_over) & (children > 0)
            child = passed.view(torch.uint8).argmax(1, keepdim=True)  # the first
            before = running.gather(1, child) - children.gather(1, child)
            left_over = (left_over - before).squeeze(1)
            node = node * self._fan + child.squeeze(1)
        return node

    def _family(self, level: Tensor, parent: Tensor) -> Tensor:
        return level.view(-1, self._fan).index_select(0, parent)

    def state(self) -> dict:
        return {"leaves": self._levels[0][: self.leaves]}

    def load(self, state: dict) -> None:
        self._levels[0][: self.leaves] = state["leaves"].to(self._levels[0])
        for below, above in pairwise(self._levels):
            sums = below.view(-1, self._fan).sum(1)
            above[: len(sums)] = sums
