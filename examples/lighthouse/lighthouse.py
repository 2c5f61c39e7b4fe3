"""An environment that manyhands has never seen: steer a boat through the dark to a lighthouse.

Nothing here knows of manyhands; it is an ordinary Gymnasium environment.
"""

import gymnasium
import numpy as np


class Lighthouse(gymnasium.Env):
    """The boat keeps its momentum; the wind changes with every episode. +1 for arriving, a small cost for every step."""

    def __init__(self) -> None:
        # position and velocity (2 each), wind (2), bearing to the lighthouse (2)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (8,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(5)  # drift, north, east, south, west
        self._thrust = 0.02 * np.array([[0, 0], [0, 1], [1, 0], [0, -1], [-1, 0]], np.float64)

    def _look(self) -> np.ndarray:
        return np.concatenate([self.boat, 10 * self.speed, 50 * self.wind, self.light - self.boat]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.boat, self.light = self.np_random.uniform(-1, 1, (2, 2))
        self.speed = np.zeros(2)
        self.wind = self.np_random.uniform(-0.01, 0.01, 2)
        self.steps = 0
        return self._look(), {}

    def step(self, action):
        self.speed = 0.95 * self.speed + self._thrust[action] + self.wind
        self.boat = self.boat + self.speed
        self.steps += 1
        arrived = bool(np.linalg.norm(self.light - self.boat) < 0.15)
        lost = bool(np.abs(self.boat).max() > 2)
        reward = 1.0 if arrived else -1.0 if lost else -0.01
        return self._look(), reward, arrived or lost, self.steps >= 200, {}
