"""Published scores of the Atari games, and scores in terms of them.

A score is normalised to a human's: 0 is what random play gets, 100 what the human gets. What several games say together is told
by the aggregates of Agarwal et al. 2021 (rliable), with bootstrap intervals stratified by game.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Published:
    """One game in the tables of Gorila, with one protocol: raw scores, and what the tables print as normalised, in percent."""

    game: str
    protocol: str
    random: float
    human: float
    dqn: float
    gorila: float
    dqn_printed: float
    gorila_printed: float
    gorila_to_dqn_printed: float

    def to_human(self, score: float) -> float:
        """In percent. On Video Pinball (human starts) the human is below random play: the tables divide by the distance."""
        return 100 * (score - self.random) / abs(self.human - self.random)

    def to_dqn(self, score: float) -> float | None:
        """In percent. Where DQN does not beat random play the tables count from 0 instead; None where that says nothing."""
        low = self.random if self.dqn > self.random else 0.0
        return 100 * (score - low) / (self.dqn - low) if self.dqn > low else None


@functools.cache
def published() -> dict[tuple[str, str], Published]:
    """By game, as ALE calls it, and protocol (null-op or human-starts)."""
    text = resources.files("manyhands").joinpath("data/gorila-scores.csv").read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    found = {}
    for row in rows:
        game, protocol, *numbers = row.values()
        found[game, protocol] = Published(game, protocol, *map(float, numbers))
    return found


def disagreements() -> list[tuple[str, str, str, float | None, float]]:
    """Printed normalised scores that the printed raw ones do not lead to, even if each of those was rounded by half a hundredth
    and these were cut after two digits, as most are: game, protocol, column, what it should be, what is printed."""
    rounded, cut, found = 0.005, 0.01, []
    for (game, protocol), row in published().items():
        columns = (
            ("dqn_printed", row.to_human(row.dqn), row.human - row.random),
            ("gorila_printed", row.to_human(row.gorila), row.human - row.random),
            ("gorila_to_dqn_printed", row.to_dqn(row.gorila), row.dqn - (row.random if row.dqn > row.random else 0.0)),
        )
        for name, value, distance in columns:
            printed = getattr(row, name)
            if value is None:
                wrong = True
            else:  # what rounding of the numerator and of the denominator can do, and a little for floating point
                wrong = abs(value - printed) > (100 + abs(value)) * 2 * rounded / abs(distance) + cut + 1e-9
            if wrong:
                found.append((game, protocol, name, value, printed))
    return found


def iqm(scores: np.ndarray) -> float:
    """The mean of the middle half: a quarter is left out at each end, rounded down to whole scores."""
    values = np.sort(scores.ravel())
    cut = len(values) // 4
    return float(values[cut : len(values) - cut].mean())


def _median(runs: Sequence[np.ndarray]) -> float:
    return float(np.median([game.mean() for game in runs]))


def _mean(runs: Sequence[np.ndarray]) -> float:
    return float(np.mean([game.mean() for game in runs]))


def _iqm(runs: Sequence[np.ndarray]) -> float:
    return iqm(np.concatenate(list(runs)))


def _optimality_gap(runs: Sequence[np.ndarray]) -> float:
    """How much is missing to a human, on average; what is better than a human does not make up for it."""
    return float(np.mean([np.maximum(100.0 - game, 0.0).mean() for game in runs]))


AGGREGATES = {"median": _median, "iqm": _iqm, "mean": _mean, "optimality_gap": _optimality_gap}


def aggregate(runs: Sequence[Sequence[float]], seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """Of the normalised scores of every run of every game: each aggregate and its 95 % interval, from resampling the runs of each
    game. With one run of each game the interval is a point, which says that nothing is known about it."""
    games = [np.asarray(scores, float) for scores in runs]
    generator = np.random.default_rng(seed)
    samples: dict[str, list[float]] = {name: [] for name in AGGREGATES}
    for _ in range(RESAMPLES):
        drawn = [game[generator.integers(len(game), size=len(game))] for game in games]
        for name, function in AGGREGATES.items():
            samples[name].append(function(drawn))
    result = {}
    for name, function in AGGREGATES.items():
        low, high = np.percentile(samples[name], [2.5, 97.5])
        result[name] = (function(games), float(low), float(high))
    return result
