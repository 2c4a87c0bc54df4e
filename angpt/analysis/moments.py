"""Part 4, the first moment of Adam or Muon: the variance of m_t relative to its sum over training, for each matrix.

The paper divides V(m_t), the variance over the entries of a matrix, by Σ_t V(m_t). A run that records every k-th step
knows every k-th term of that sum, so a record is weighted by the number of steps since the previous one. Multiplied by
the number of steps T, 1 is the mean over training.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from angpt.analysis.history import History

EARLY = 0.1
"""Share of training that counts as its start: the paper's warm-up."""


@dataclass(frozen=True)
class GroupMoments:
    """Relative variance of a group of matrices, such as W_p of all layers."""

    group: str
    relative: tuple[tuple[float, ...], ...]
    """V(m_t) / Σ_t V(m_t): for each record, a value per layer."""
    peak: float
    """Maximum over training of T · V(m_t) / Σ_t V(m_t), averaged over layers."""
    peak_at: float
    """Time of the peak, as a share of training."""
    early: float
    """Share of Σ_t V(m_t) in the first tenth of training; 0.1 if the variance is constant."""
    spread: float
    """Standard deviation over layers divided by their mean, averaged over training."""


@dataclass(frozen=True)
class Moments:
    total_steps: int
    steps: tuple[int, ...]
    groups: tuple[GroupMoments, ...]
    warmup: float
    """Share of training with a rising learning rate."""


def measure(history: History, warmup: float) -> Moments | None:
    """The relative variances of a run; None if it recorded no moments."""
    if len(history.steps) < 2:
        return None
    groups = tuple(_group(name, values, history.steps) for name, values in history.values.items())
    return Moments(history.steps[-1], history.steps, groups, warmup)


def relative_variance(variances: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """V(m_t) / Σ_t V(m_t) along the first axis; each record counts for the steps since the previous one."""
    weights = np.diff(steps, prepend=0).reshape(-1, *[1] * (variances.ndim - 1))
    total = (weights * variances).sum(axis=0)
    return np.divide(variances, total, out=np.zeros_like(variances), where=total > 0)


def _group(name: str, values: tuple[tuple[float, ...], ...], steps: tuple[int, ...]) -> GroupMoments:
    at = np.array(steps, dtype=np.int64)
    relative = relative_variance(np.array(values, dtype=np.float64), at)
    mean = relative.mean(axis=1)
    highest = int(mean.argmax())
    weights = np.diff(at, prepend=0)
    # Of a record that covers steps on both sides of the border, only the steps before it count.
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
