"""A binary tree of sums over non-negative leaves: draws in proportion to them, changes many of them at once.

All levels lie in one vector, the root at 1, the children of i at 2i and 2i + 1. A parent is computed from its children anew
whenever one of them changes, so rounding errors do not add up.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SumTree:
    def __init__(self, leaves: int, device: torch.device) -> None:
        self._depth = max(leaves - 1, 1).bit_length()
        self._width = 1 << self._depth
        self._nodes = torch.zeros(2 * self._width, dtype=torch.float64, device=device)
        self.leaves = leaves

    @property
    def total(self) -> Tensor:
        return self._nodes[1]

    def get(self, index: Tensor) -> Tensor:
        return self._nodes[self._width + index]

    def set(self, index: Tensor, value: Tensor) -> None:
        """Repeated indices must carry equal values."""
        node = self._width + index
        self._nodes[node] = value.to(torch.float64)
        for _ in range(self._depth):
            node = node >> 1  # duplicates are recomputed twice with one result: cheaper than finding them
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]

    def draw(self, u: Tensor) -> Tensor:
        """The leaf at which the running sum passes u * total, u in [0, 1)."""
        node = torch.ones_like(u, dtype=torch.int64)
        left_over = u.to(torch.float64) * self._nodes[1]
        for _ in range(self._depth):
            left = 2 * node
            below = self._nodes[left]
            # An empty right half is never entered, whatever rounding says.
            right = (left_over >= below) & (self._nodes[left + 1] > 0)
            left_over = torch.where(right, left_over - below, torch.minimum(left_over, below))
            node = left + right
        return node - self._width

    def state(self) -> dict:
        return {"leaves": self._nodes[self._width : self._width + self.leaves]}

    def load(self, state: dict) -> None:
        self._nodes.zero_()
        self._nodes[self._width : self._width + self.leaves] = state["leaves"].to(self._nodes)
        for level in range(self._depth - 1, -1, -1):
            begin = 1 << level
            self._nodes[begin : 2 * begin] = self._nodes[2 * begin : 4 * begin].view(-1, 2).sum(1)
