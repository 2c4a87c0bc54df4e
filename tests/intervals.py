"""Whether intervals over many trials are those of their level: neither too narrow nor too wide."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def numbers_of(e: Any) -> tuple[float | None, float, float | None]:
    """Lower end, estimate and upper end of an interval."""
    return e.low, e.mean if hasattr(e, "mean") else e.value, e.high


def check_intervals(trials: Sequence[Sequence[Any]], truth: Sequence[float], hits: float, widest: float = 2.0) -> None:
    """Each of the quantities of a trial is covered in that many trials, by intervals that are no wider than needed.

    `trials` has, per trial, an estimate with its interval for each quantity; `truth` the true values.
    Needed is what the estimates themselves vary by: 95 % of a normal distribution with their standard deviation. Small
    samples need more than that (Student's t), hence `widest` times as much for the median interval.
    """
    numbers = np.array([[numbers_of(e) for e in trial] for trial in trials], dtype=float)  # None becomes NaN
    low, value, high = np.moveaxis(numbers, 2, 0)
    covered = ((low <= truth) & (truth <= high)).sum(axis=0)
    assert covered.min() >= hits, covered
    width = np.median(high - low, axis=0) / (2 * 1.96 * value.std(axis=0, ddof=1))
    assert width.max() <= widest, width
