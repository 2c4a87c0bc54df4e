"""The paper's procedure, literally: the best complete run of each compute bin, and power laws through these runs.

Its laws are those of optima only if the bins hold runs of many sizes. A bin with one run leaves no choice: if all bins
are such, N_opt(C) and D_opt(C) are regressions over the sizes and budgets that were tried, whatever the losses.
"""

from dataclasses import dataclass

import numpy as np

from angpt.fits.compute import Sample
from angpt.fits.powerlaw import PowerLaw, fit_power_law

BINS = 1500


@dataclass(frozen=True)
class Binned:
    """The laws through the best run of each bin, by least squares of logarithms."""

    loss: PowerLaw
    parameters: PowerLaw
    tokens: PowerLaw
    runs: Sample
    """The best run of each bin."""
    alone: int
    """Number of bins that hold a single run."""
    design: float
    """Exponent of N over C in a regression over all runs, which does not depend on any loss."""

    @property
    def notes(self) -> tuple[str, ...]:
        bins = len(self.runs)
        if self.alone == bins:
            return (
                f"each of the {bins:,} runs is alone in its bin, so the sizes and budgets tried determine N_opt(C) and "
                f"D_opt(C): any losses give α_N = {self.design:.4f} (docs/table-j1.md)",
            )
        return (
            f"{self.alone:,} of {bins:,} bins hold one run and no choice; all runs, whatever their loss, give "
            f"α_N = {self.design:.4f}; lowest runs at the smallest or largest size tried count as optima here",
        )


def fit_binned(sample: Sample, bins: int = BINS) -> Binned | str:
    """The laws, or the reason why there are none."""
    x = np.log(sample.compute)
    width = max(float(np.ptp(x)) / bins, 1e-12)
    place = np.minimum(((x - x.min()) / width).astype(np.intp), bins - 1)
    order = np.lexsort((sample.log_loss, place))
    found, first, counts = np.unique(place[order], return_index=True, return_counts=True)
    if len(found) < 3:
        return f"{len(found)} bins hold runs, and three are needed"
    best = sample.take(order[first])
    return Binned(
        loss=fit_power_law(best.compute, np.exp(best.log_loss)),
        parameters=fit_power_law(best.compute, best.parameters),
        tokens=fit_power_law(best.compute, best.tokens),
        runs=best,
        alone=int(np.sum(counts == 1)),
        design=fit_power_law(sample.compute, sample.parameters).exponent,
    )
