"""Part 4, Adam's first moment: the variance of m_t relative to its sum over training, for each matrix.

The paper divides V(m_t), the variance over the entries of a matrix, by Σ_t V(m_t). A run that records every k-th step
knows each k-th term of that sum, so a record is weighted with the steps since the one before it. Multiplied by the
number of steps T, 1 is what every step would have if training were equally restless throughout.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angpt.analysis.history import History

EARLY = 0.1
"""The part of training that counts as its start: the paper's warm-up."""


@dataclass(frozen=True)
class GroupMoments:
    """A group of matrices, such as W_p of all layers."""

    group: str
    relative: tuple[tuple[float, ...], ...]
    """V(m_t) / Σ_t V(m_t), for each record a value per layer."""
    peak: float
    """The largest T · V(m_t) / Σ_t V(m_t), of the mean over layers."""
    peak_at: float
    """When, as a part of the training."""
    early: float
    """Part of Σ_t V(m_t) that falls on the first tenth of the training; 0.1 if it is as restless throughout."""
    spread: float
    """Difference between layers: standard deviation over mean of the layers' relative variances, averaged over time."""


@dataclass(frozen=True)
class Moments:
    total_steps: int
    steps: tuple[int, ...]
    groups: tuple[GroupMoments, ...]
    warmup: float
    """Part of the training in which the learning rate rose."""


def measure(history: History, warmup: float) -> Moments | None:
    """The moments that a run recorded; None if it recorded none."""
    if len(history.steps) < 2:
        return None
    groups = tuple(_group(name, values, history.steps) for name, values in history.values.items())
    return Moments(history.steps[-1], history.steps, groups, warmup)


def relative_variance(variances: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """V(m_t) / Σ_t V(m_t) along the first axis, each record standing for the steps since the one before."""
    weights = np.diff(steps, prepend=0).reshape(-1, *[1] * (variances.ndim - 1))
    total = (weights * variances).sum(axis=0)
    return np.divide(variances, total, out=np.zeros_like(variances), where=total > 0)


def _group(name: str, values: tuple[tuple[float, ...], ...], steps: tuple[int, ...]) -> GroupMoments:
    at = np.array(steps, dtype=np.int64)
    relative = relative_variance(np.array(values, dtype=np.float64), at)
    mean = relative.mean(axis=1)
    highest = int(mean.argmax())
    weights = np.diff(at, prepend=0)
    # A record that stands for steps on both sides of the border counts with the part that lies before it.
    before = np.clip(EARLY * at[-1] - (at - weights), 0, weights)
    deviation = np.divide(relative.std(axis=1), mean, out=np.zeros_like(mean), where=mean > 0)
    return GroupMoments(
        group=name,
        relative=tuple(tuple(row) for row in relative.tolist()),
        peak=float(at[-1] * mean[highest]),
        peak_at=float(at[highest] / at[-1]),
        early=float((before * mean).sum()),
        spread=float((weights * deviation).sum() / at[-1]),
    )
