"""Schedules over progress in [0, 1]."""


def linear(start: float, end: float, progress: float) -> float:
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def scaled_rate(rate: float, scaling: str, batch: int, reference: int) -> float:
    """A learning rate for `batch` samples an update from one found at `reference` of them."""
    factor = batch / reference
    return rate * {"none": 1.0, "sqrt": factor**0.5, "linear": factor}[scaling]
