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

    def update(self, reward: np.ndarray, ended: np.ndarray, reset: np.ndarray) -> list[Episode]:
        """Raw rewards, real ends and reset-only slots of a rollout, each [T, B]."""
        episodes = []
        for r, e, fresh in zip(reward, ended, reset, strict=True):
            self._return += r
            self._steps += 1
            if fresh.any():
                self._return[fresh], self._steps[fresh], self._whole[fresh] = 0.0, 0, True
            if e.any():
                for i in np.flatnonzero(e & self._whole):
                    episodes.append(Episode(float(self._return[i]), int(self._steps[i]), int(i)))
        return episodes

    def state(self) -> dict:
        return {"return": self._return.copy(), "steps": self._steps.copy(), "whole": self._whole.copy()}

    def load(self, state: dict) -> None:
        self._return[:], self._steps[:], self._whole[:] = (np.asarray(state[k]) for k in ("return", "steps", "whole"))
