"""The parametric law L = E + A/Nᵃ + B/Dᵇ (Chinchilla's approach 3): Huber loss of log L, from many starts.

log L̂ is the log-sum-exp of log E, log A − a·log N and log B − b·log D. The fit is iteratively reweighted Gauss-Newton
with Levenberg's damping and the analytic Jacobian, of many starts or bootstrap samples at a time; SciPy's
`least_squares` reaches the same minimum one fit at a time, which takes 10 to 70 times as long. Chinchilla turns from
squares to absolute values at δ = 0.001; where the noise is larger, nearly every point lies beyond that, which wastes
data, so δ is 1.345 standard deviations of the noise if that is more.

Intervals: a bootstrap of the residuals, shared out at random, each as large as it would be without its point in the fit
(over one minus the leverage). So the noise of log L is taken to be alike at every size and budget, but for the number
of seeds that were averaged. The quantiles are widened by Student's t for the degrees of freedom.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import huber

from angpt.fits.compute import Sample
from angpt.fits.powerlaw import Floats
from angpt.stats import CONFIDENCE, Interval, quantile

DELTA = 1e-3
NAMES = ("E", "A", "B", "a", "b")
EFFICIENT = 1.345
"""Huber's δ in standard deviations, for 95 % of the efficiency of least squares under normal noise."""
STARTS = 2000
"""Points that the search from many starts looks at; the rest join when it has found the valley."""
NO_LOSS = 1e-6
"""An irreducible loss below this counts as zero: its logarithm diverges to minus infinity."""
APART = 0.05
"""Standard deviation of log D at a given N that there must be."""
WORK = 2_000_000
"""Bootstrap samples times points, at most."""


def predict(theta: Floats, n: Floats, d: Floats) -> tuple[Floats, Floats]:
    """log L̂ (R, points) for R rows of log E, log A, log B, a, b; and the shares (3, R, points) of the three terms."""
    terms = np.empty((3, len(theta), len(n)))
    terms[0] = theta[:, 0, None]
    terms[1] = theta[:, 1, None] - theta[:, 3, None] * n
    terms[2] = theta[:, 2, None] - theta[:, 4, None] * d
    top = terms.max(axis=0)
    np.exp(terms - top, out=terms)
    total = terms.sum(axis=0)
    return top + np.log(total), terms / total


def jacobian(shares: Floats, n: Floats, d: Floats) -> Floats:
    """The Jacobian of log L̂ with respect to the five parameters: (R, 5, points)."""
    return np.stack([shares[0], shares[1], shares[2], -shares[1] * n, -shares[2] * d], axis=1)


def minimise(theta: Floats, n: Floats, d: Floats, y: Floats, delta: float, steps: int) -> tuple[Floats, Floats]:
    """Each row of `theta` to the bottom of its valley, and its loss there; `y` is shared or has a row for each."""
    theta = theta.copy()
    y = np.broadcast_to(y, (len(theta), len(n)))
    fitted, shares = predict(theta, n, d)
    loss = huber(delta, y - fitted).sum(axis=-1)
    damping, idle = np.full(len(theta), 1e-2), np.zeros(len(theta), int)
    active = np.arange(len(theta))
    for _ in range(steps):
        residual = y[active] - fitted[active]
        weight = np.minimum(1.0, delta / np.maximum(np.abs(residual), 1e-300))
        slopes = jacobian(shares[:, active], n, d)
        weighted = slopes * weight[:, None]
        square = weighted @ slopes.transpose(0, 2, 1)
        diagonal = np.einsum("rii->ri", square).copy()
        diagonal += 1e-12 * diagonal.max(axis=1, keepdims=True)  # a term that has died out has none
        square += (damping[active, None] * diagonal)[..., None] * np.eye(5)
        step = np.linalg.solve(square, weighted @ residual[..., None])[..., 0]
        moved = theta[active] + step
        new_fitted, new_shares = predict(moved, n, d)
        new_loss = huber(delta, y[active] - new_fitted).sum(axis=-1)
        better = new_loss < loss[active]
        gain = (loss[active] - new_loss) / np.maximum(loss[active], 1e-300)
        good = active[better]
        theta[good], loss[good], fitted[good] = moved[better], new_loss[better], new_fitted[better]
        shares[:, good] = new_shares[:, better]
        damping[active] = np.clip(np.where(better, damping[active] / 5, damping[active] * 4), 1e-12, 1e12)
        done = np.where(better, gain < 1e-10, damping[active] > 1e8)
        idle[active] = np.where(done, idle[active] + 1, 0)
        active = active[idle[active] < 3]
        if not len(active):
            break
    return theta, loss


def starts(n: Floats, d: Floats, y: Floats) -> Floats:
    """Starting points: each exponent and share of the irreducible loss, with A and B by least squares."""
    loss = np.exp(y)
    found = []
    for share in (0.05, 0.5, 0.8, 0.95):
        for a in (0.1, 0.3, 0.6, 1.0):
            for b in (0.1, 0.3, 0.6, 1.0):
                terms = np.stack([np.exp(-a * n), np.exp(-b * d)], axis=1)
                factors = np.linalg.lstsq(terms / loss[:, None], 1 - share * loss.min() / loss, rcond=None)[0]
                factors = np.maximum(factors, 1e-3 * loss.mean() / terms.mean(axis=0))
                found.append([math.log(share * loss.min()), *np.log(factors), a, b])
    return np.array(found)


@dataclass(frozen=True)
class Parametric:
    """The law, and its bootstrap samples."""

    theta: Floats
    """log E, log A, log B, a, b; then those of each bootstrap sample, in rows."""
    scale: tuple[float, float]
    """log C = k + γ·log N + log D: (k, γ), which is (log 6, 1) if C = 6·N·D."""
    delta: float
    deviation: float
    """Standard deviation of the noise of log L."""
    points: int
    compute: tuple[float, float]
    agreeing: int
    """Starts, of `tried`, that ended at the same loss as the best."""
    tried: int

    @property
    def freedom(self) -> int:
        return self.points - len(NAMES)

    def estimate(self, values: Floats) -> Interval:
        """The estimate of a function of the parameters, given its values for all rows of `theta`."""
        return bootstrap_interval(values, self.freedom)

    def parameters(self) -> dict[str, Interval]:
        """E on its own scale, which ends at zero; A and B on that of their logarithms."""
        e = self.estimate(np.exp(self.theta[:, 0]))
        e = Interval(e.mean, None if e.low is None else max(0.0, e.low), e.high)
        a_, b_ = (self.estimate(self.theta[:, i]).exp() for i in (1, 2))
        return dict(zip(NAMES, (e, a_, b_, *map(self.estimate, self.theta[:, 3:].T)), strict=True))

    @property
    def reducible(self) -> bool:
        """True if E cannot be told apart from zero."""
        e = self.parameters()["E"]
        return (e.mean if e.low is None else e.low) < NO_LOSS

    def exponents(self) -> dict[str, Floats]:
        """The exponents of N_opt(C), D_opt(C) and L(C) − E, for all rows."""
        a, b, gamma = self.theta[:, 3], self.theta[:, 4], self.scale[1]
        return {"parameters": b / (a + gamma * b), "tokens": a / (a + gamma * b), "loss": -a * b / (a + gamma * b)}

    def log_prefactors(self) -> dict[str, Floats]:
        """Logarithms of the prefactors of N_opt(C) and D_opt(C), their values at C = 1, for all rows."""
        n, d, _ = self.log_optimum(0.0)
        return {"parameters": n, "tokens": d}

    def log_optimum(self, log_compute: Floats | float) -> tuple[Floats, Floats, Floats]:
        """log N, log D and log L of the best allocation at a compute, for all rows.

        With D = C / (e^k·N^γ) the two terms fall and rise with N; where their slopes cancel is the optimum.
        """
        _, log_a, log_b, a, b = self.theta.T
        k, gamma = self.scale
        with np.errstate(all="ignore"):  # a sample with an exponent below zero has no optimum, and becomes NaN
            n = (np.log(a / (gamma * b)) + log_a - log_b + b * (np.asarray(log_compute) - k)) / (a + gamma * b)
            d = log_compute - k - gamma * n
            terms = np.stack([self.theta[:, 0], log_a - a * n, log_b - b * d])
            return n, d, np.logaddexp.reduce(terms, axis=0)

    def log_compute(self, loss: float) -> Floats:
        """log of the compute at which the best allocation reaches a loss, for all rows; infinite below E."""
        middle = sum(map(math.log, self.compute)) / 2
        _, log_a, log_b, a, b = self.theta.T
        n, d, _ = self.log_optimum(middle)
        left = loss - np.exp(self.theta[:, 0])
        with np.errstate(all="ignore"):
            above = np.log(left) - np.logaddexp(log_a - a * n, log_b - b * d)  # of the reducible loss there
            return np.where(left > 0, middle + above / self.exponents()["loss"], np.inf)


def bootstrap_interval(values: Floats, freedom: float) -> Interval:
    """The first value with the quantiles of the others about it, widened from normal to Student's t."""
    value = float(values[0])
    samples = values[1:][np.isfinite(values[1:])]
    if freedom <= 0 or len(samples) < 0.9 * (len(values) - 1) or len(samples) < 20:
        return Interval(value)
    tail = (1 - CONFIDENCE) / 2
    wider = quantile(freedom) / float(stats.norm.ppf(1 - tail))
    low, high = np.quantile(samples, [tail, 1 - tail])
    return Interval(value, value - wider * (value - float(low)), value + wider * (float(high) - value))


def fit_parametric(sample: Sample, bootstrap: int, seed: Sequence[int], delta: float | None = None) -> Parametric | str:
    """The law, or the reason why there is no law."""
    sizes, budgets = len(np.unique(sample.parameters)), len(np.unique(sample.tokens))
    if len(sample) < 6 or sizes < 3 or budgets < 3:
        return (
            f"{len(sample)} points with {sizes} sizes and {budgets} budgets; five parameters need six points, three "
            "sizes and three budgets at least"
        )
    log_n, log_d, y = np.log(sample.parameters), np.log(sample.tokens), sample.log_loss
    apart = log_d - np.polyval(np.polyfit(log_n, log_d, 1), log_n)
    if float(np.std(apart)) < APART:
        return (
            "tokens and parameters grow together, so their terms cannot be told apart; train sizes on several budgets"
        )
    center_n, center_d = float(log_n.mean()), float(log_d.mean())
    n, d = log_n - center_n, log_d - center_d
    generator = np.random.default_rng(list(seed))
    some = generator.choice(len(y), STARTS, replace=False) if len(y) > STARTS else np.arange(len(y))
    first = DELTA if delta is None else delta
    rows, losses = minimise(starts(n[some], d[some], y[some]), n[some], d[some], y[some], first, 60)
    tried = len(rows)
    rows, losses = minimise(rows[np.argsort(losses)], n[some], d[some], y[some], first, 400)
    agreeing = int(np.sum(losses <= losses.min() * (1 + 1e-4) + 1e-20))
    best, _ = minimise(rows[[np.argmin(losses)]], n, d, y, first, 400)
    if delta is None:
        residual = y - predict(best, n, d)[0][0]
        # The five smallest are none of the noise's doing: so many points a fit by absolute values passes through.
        spread = 1.4826 * float(np.median(np.sort(np.abs(residual))[len(NAMES) :]))
        first = max(DELTA, EFFICIENT * spread)
        best, _ = minimise(best, n, d, y, first, 400)
    if min(best[0, 3:]) <= 0:
        what = "parameters" if best[0, 3] <= 0 else "tokens"
        return f"the loss does not fall with more {what} (fitted exponents a = {best[0, 3]:.3g}, b = {best[0, 4]:.3g})"
    fitted, shares = predict(best, n, d)
    residual = y - fitted[0]
    slopes = jacobian(shares, n, d)[0]
    leverage = np.einsum("ip,ij,jp->p", slopes, np.linalg.pinv(slopes @ slopes.T), slopes)
    noise = residual * np.sqrt(sample.seeds) / (1 - np.minimum(leverage, 0.95))
    noise -= noise.mean()
    count = 0 if len(y) <= len(NAMES) else min(bootstrap, max(200, WORK // len(y)))
    samples = [best]
    for part in range(0, count, chunk := max(1, WORK // (10 * len(y)))):
        drawn = generator.choice(noise, (min(chunk, count - part), len(y))) / np.sqrt(sample.seeds)
        samples.append(minimise(np.repeat(best, len(drawn), axis=0), n, d, fitted + drawn, first, 80)[0])
    theta = np.concatenate(samples)
    theta[:, 1] += theta[:, 3] * center_n
    theta[:, 2] += theta[:, 4] * center_d
    return Parametric(
        theta=theta,
        scale=_scale(sample),
        delta=first,
        deviation=math.sqrt(float(residual @ residual) / max(1, len(y) - len(NAMES))),
        points=len(y),
        compute=(float(sample.compute.min()), float(sample.compute.max())),
        agreeing=agreeing,
        tried=tried,
    )


def _scale(sample: Sample) -> tuple[float, float]:
    """k and γ of log C = k + γ·log N + log D by least squares: exact if C = 6·N·D, close with attention counted."""
    gamma, k = np.polyfit(np.log(sample.parameters), np.log(sample.compute / sample.tokens), 1)
    return float(k), float(gamma)
