"""Follows every simulator's raw return and tells when an episode is over."""

from __future__ import annotations

import numpy as np

from manyhands.types import Episode


class EpisodeTracker:
    def __init__(self, num_envs: int) -> None:
        self._return = np.zeros(num_envs)
        self._steps = np.zeros(num_envs, np.int64)
        # An episode that was not seen from its beginning (decorrelation) or lost its simulator is not reported.
        self._whole = np.ones(num_envs, bool)

    def forget(self) -> None:
        """The running episodes were not seen from their beginning."""
        self._whole[:] = False

    def update(
        self, reward: np.ndarray, ended: np.ndarray, reset: np.ndarray, simulators: np.ndarray | None = None
    ) -> list[Episode]:
        """Raw rewards, real ends and reset-only slots, each [T, B] of all simulators or of those given."""
        episodes = []
        who = np.arange(len(self._return)) if simulators is None else simulators
        for r, e, fresh in zip(reward, ended, reset, strict=True):
            self._return[who] += r
            self._steps[who] += 1
            if fresh.any():
                begun = who[fresh]
                self._return[begun], self._steps[begun], self._whole[begun] = 0.0, 0, True
            if e.any():
                for i in who[e]:
                    if self._whole[i]:
                        episodes.append(Episode(float(self._return[i]), int(self._steps[i]), int(i)))
        return episodes

    def state(self) -> dict:
        return {"return": self._return.copy(), "steps": self._steps.copy(), "whole": self._whole.copy()}

    def load(self, state: dict) -> None:
        self._return[:], self._steps[:], self._whole[:] = (np.asarray(state[k]) for k in ("return", "steps", "whole"))
