"""The parametric law L = E + A/Nᵃ + B/Dᵇ (Chinchilla's approach 3): Huber loss of log L, from many starts.

log L̂ is the log-sum-exp of log E, log A − a·log N and log B − b·log D. The fit is iteratively reweighted Gauss-Newton
with Levenberg's damping and the analytic Jacobian, for many starts or bootstrap samples at once; SciPy's
`least_squares` reaches the same minimum one fit at a time and takes 10 to 70 times as long. Huber's δ is Chinchilla's
0.001, which is close to least absolute deviations if the noise is larger.

Intervals: a bootstrap of the runs (pairs bootstrap), which allows for noise that differs from run to run and for a law
that holds only nearly. The quantiles are widened by Student's t, and for the degrees of freedom that the fit takes.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from scipy.special import huber

from angpt.fits.compute import Sample
from angpt.fits.powerlaw import Floats, jackknife
from angpt.stats import CONFIDENCE, Interval, quantile

DELTA = 1e-3
NAMES = ("E", "A", "B", "a", "b")
STARTS = 2000
"""Most points that the search from many starts uses; the final fit uses all."""
NO_LOSS = 1e-6
"""An irreducible loss below this counts as zero: its logarithm diverges to minus infinity."""
APART = 0.05
"""Least standard deviation of log D around its trend in log N."""
ROUNDING = 1e-6
"""Residuals below this are those of data without noise."""
WORK = 2_000_000
"""Most bootstrap samples times points."""


def predict(theta: Floats, n: Floats, d: Floats) -> tuple[Floats, Floats]:
    """log L̂ (R, points) for R rows of (log E, log A, log B, a, b), and the shares (3, R, points) of the three terms."""
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


def minimise(
    theta: Floats, n: Floats, d: Floats, y: Floats, delta: float, steps: int, counts: Floats | None = None
) -> tuple[Floats, Floats]:
    """A local minimum from each row of `theta`, and its Huber loss; `counts` says how often a row has each point."""
    theta = theta.copy()
    times = np.broadcast_to(1.0 if counts is None else counts, (len(theta), len(n)))
    fitted, shares = predict(theta, n, d)
    loss = (times * huber(delta, y - fitted)).sum(axis=-1)
    damping, idle = np.full(len(theta), 1e-2), np.zeros(len(theta), int)
    active = np.arange(len(theta))
    for _ in range(steps):
        residual = y - fitted[active]
        weight = times[active] * np.minimum(1.0, delta / np.maximum(np.abs(residual), 1e-300))
        slopes = jacobian(shares[:, active], n, d)
        weighted = slopes * weight[:, None]
        square = weighted @ slopes.transpose(0, 2, 1)
        diagonal = np.einsum("rii->ri", square).copy()
        diagonal += 1e-12 * diagonal.max(axis=1, keepdims=True)  # that of a vanished term is zero
        square += (damping[active, None] * diagonal)[..., None] * np.eye(5)
        step = np.linalg.solve(square, weighted @ residual[..., None])[..., 0]
        moved = theta[active] + step
        new_fitted, new_shares = predict(moved, n, d)
        new_loss = (times[active] * huber(delta, y - new_fitted)).sum(axis=-1)
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
    """Starting points: a grid of exponents and shares of the irreducible loss, with A and B by least squares."""
    loss = np.exp(y)
    found = []
    for share, a, b in itertools.product((0.05, 0.5, 0.8, 0.95), *[(0.1, 0.3, 0.6, 1.0)] * 2):
        terms = np.stack([np.exp(-a * n), np.exp(-b * d)], axis=1)
        factors = np.linalg.lstsq(terms / loss[:, None], 1 - share * loss.min() / loss, rcond=None)[0]
        factors = np.maximum(factors, 1e-3 * loss.mean() / terms.mean(axis=0))
        found.append([math.log(share * loss.min()), *np.log(factors), a, b])
    return np.array(found)


@dataclass(frozen=True)
class Parametric:
    """The parametric law and its bootstrap samples."""

    theta: Floats
    """Rows of (log E, log A, log B, a, b): first the fit, then each bootstrap sample."""
    scale: tuple[float, float]
    """(k, γ) of log C = k + γ·log N + log D; (log 6, 1) if C = 6·N·D."""
    delta: float
    deviation: float
    """Standard deviation of the noise of log L."""
    points: int
    compute: tuple[float, float]
    lowest: float
    """The lowest loss seen, which E cannot exceed."""
    misfit: str | None
    """How the runs deviate from the form of the law, if they do."""
    agreeing: int
    """Number of starts, of `tried`, that reached the lowest Huber loss."""
    tried: int

    @property
    def freedom(self) -> int:
        return self.points - len(NAMES)

    def estimate(self, values: Floats) -> Interval:
        """A function of the parameters with its interval, given its values for all rows of `theta`."""
        return bootstrap_interval(values, self.freedom, self.points)

    def parameters(self) -> dict[str, Interval]:
        """Estimates of E, A, B, a and b; the intervals of A and B are those of their logarithms."""
        e = self.estimate(np.exp(self.theta[:, 0]))
        if e.low is not None and e.high is not None:
            e = Interval(e.mean, max(0.0, e.low), min(self.lowest, e.high))
        a_, b_ = (self.estimate(self.theta[:, i]).exp() for i in (1, 2))
        return dict(zip(NAMES, (e, a_, b_, *map(self.estimate, self.theta[:, 3:].T)), strict=True))

    @property
    def reducible(self) -> bool:
        """True if E cannot be distinguished from zero."""
        e = self.parameters()["E"]
        return (e.mean if e.low is None else e.low) < NO_LOSS

    @property
    def notes(self) -> list[str]:
        found = [self.misfit] if self.misfit else []
        if self.agreeing < 2:
            found.append(f"only one of {self.tried} starts reached the lowest Huber loss; a better fit may exist")
        if self.reducible:
            found.append("the irreducible loss E cannot be distinguished from zero")
        if self.freedom < 1:
            found.append("as many parameters as points: no intervals")
        return found

    def exponents(self) -> dict[str, Floats]:
        """The exponents of N_opt(C), D_opt(C) and L(C) − E, for all rows of `theta`."""
        a, b, gamma = self.theta[:, 3], self.theta[:, 4], self.scale[1]
        return {"parameters": b / (a + gamma * b), "tokens": a / (a + gamma * b), "loss": -a * b / (a + gamma * b)}

    def log_prefactors(self) -> dict[str, Floats]:
        """Logarithms of the prefactors of N_opt(C) and D_opt(C), for all rows of `theta`."""
        return dict(zip(("parameters", "tokens"), self.log_optimum(0.0), strict=False))

    def log_optimum(self, log_compute: Floats | float) -> tuple[Floats, Floats, Floats]:
        """log N, log D and log L of the best allocation at a compute, for all rows of `theta`.

        With D = C / (e^k·N^γ) one term falls and the other rises with N; at the optimum their slopes cancel.
        """
        _, log_a, log_b, a, b = self.theta.T
        k, gamma = self.scale
        with np.errstate(all="ignore"):  # a negative exponent has no optimum and gives NaN
            n = (np.log(a / (gamma * b)) + log_a - log_b + b * (np.asarray(log_compute) - k)) / (a + gamma * b)
            d = log_compute - k - gamma * n
            terms = np.stack([self.theta[:, 0], log_a - a * n, log_b - b * d])
            return n, d, np.logaddexp.reduce(terms, axis=0)

    def log_loss(self, log_parameters: float, log_tokens: float) -> Floats:
        """log L of a size and a number of tokens, for all rows."""
        e, log_a, log_b, a, b = self.theta.T
        return np.logaddexp.reduce(np.stack([e, log_a - a * log_parameters, log_b - b * log_tokens]), axis=0)

    def log_compute(self, loss: float) -> Floats:
        """log of the compute at which the best allocation reaches a loss, for all rows; infinite for a loss below E."""
        middle = sum(map(math.log, self.compute)) / 2
        _, log_a, log_b, a, b = self.theta.T
        n, d, _ = self.log_optimum(middle)
        left = loss - np.exp(self.theta[:, 0])
        with np.errstate(all="ignore"):
            above = np.log(left) - np.logaddexp(log_a - a * n, log_b - b * d)  # log ratio of the reducible losses
            return np.where(left > 0, middle + above / self.exponents()["loss"], np.inf)


def bootstrap_interval(values: Floats, freedom: int, points: int) -> Interval:
    """The first value, with an interval from the quantiles of the others, widened for the degrees of freedom."""
    value = float(values[0])
    samples = values[1:][np.isfinite(values[1:])]
    if freedom <= 0 or len(samples) < 0.9 * (len(values) - 1) or len(samples) < 20:
        return Interval(value)
    tail = (1 - CONFIDENCE) / 2
    wider = quantile(freedom) / float(stats.norm.ppf(1 - tail)) * math.sqrt(points / freedom)
    low, high = np.quantile(samples, [tail, 1 - tail])
    return Interval(value, value - wider * (value - float(low)), value + wider * (float(high) - value))


def lack_of_fit(residual: Floats, slopes: Floats, n: Floats, d: Floats) -> str | None:
    """A note if terms in n², n·d and d² describe the residuals (1 % level); `slopes` is the Jacobian of the fit."""
    n, d = n / np.std(n), d / np.std(d)
    added = np.stack([n**2, n * d, d**2])
    design = np.concatenate([slopes, added]).T
    freedom = len(n) - design.shape[1]
    if freedom < 3:
        return None
    coefficients = np.linalg.lstsq(design, residual, rcond=None)[0]
    left = residual - design @ coefficients
    covariance = jackknife(design, np.ones(len(n)), left, np.arange(len(n)))[-3:, -3:]
    of_added = coefficients[-3:]
    if np.abs(residual).max() < ROUNDING:
        return None
    p = float(stats.f.sf(of_added @ np.linalg.pinv(covariance) @ of_added / 3, 3, freedom))
    if p > 0.01:
        return None
    before, after = float(np.std(residual)), float(np.std(left))
    return (
        f"the form L = E + A/Nᵃ + B/Dᵇ does not describe these runs (lack of fit, p = {p:.1g}): quadratic terms reduce "
        f"the deviation of log loss from {before:.2%} to {after:.2%}; do not extrapolate"
    )


def fit_parametric(sample: Sample, bootstrap: int, seed: Sequence[int], delta: float = DELTA) -> Parametric | str:
    """The fitted law, or why it could not be fitted."""
    sizes, budgets = len(np.unique(sample.parameters)), len(np.unique(sample.tokens))
    if len(sample) < 6 or sizes < 3 or budgets < 3:
        return (
            f"{len(sample)} points with {sizes} sizes and {budgets} budgets; five parameters need at least six points, "
            "three sizes and three budgets"
        )
    log_n, log_d, y = np.log(sample.parameters), np.log(sample.tokens), sample.log_loss
    apart = log_d - np.polyval(np.polyfit(log_n, log_d, 1), log_n)
    if float(np.std(apart)) < APART:
        return "tokens and parameters grow together, so their terms cannot be separated; train sizes on several budgets"
    center_n, center_d = float(log_n.mean()), float(log_d.mean())
    n, d = log_n - center_n, log_d - center_d
    generator = np.random.default_rng(list(seed))
    some = generator.choice(len(y), STARTS, replace=False) if len(y) > STARTS else np.arange(len(y))
    rows, losses = minimise(starts(n[some], d[some], y[some]), n[some], d[some], y[some], delta, 60)
    tried = len(rows)
    rows, losses = minimise(rows[np.argsort(losses)], n[some], d[some], y[some], delta, 400)
    agreeing = int(np.sum(losses <= losses.min() * (1 + 1e-4) + 1e-20))
    best, _ = minimise(rows[[np.argmin(losses)]], n, d, y, delta, 400)
    if min(best[0, 3:]) <= 0:
        what = "parameters" if best[0, 3] <= 0 else "tokens"
        return f"the loss does not fall with more {what} (fitted exponents a = {best[0, 3]:.3g}, b = {best[0, 4]:.3g})"
    lowest = math.exp(float(y.min()))
    if math.exp(best[0, 0]) > lowest:
        return (
            f"the irreducible loss would be {math.exp(best[0, 0]):.4g}, above the lowest loss seen, {lowest:.4g}; the "
            "runs do not determine it, or do not follow L = E + A/Nᵃ + B/Dᵇ"
        )
    fitted, shares = predict(best, n, d)
    residual = y - fitted[0]
    count = 0 if len(y) <= len(NAMES) else min(bootstrap, max(200, WORK // len(y)))
    samples = [best]
    for part in range(0, count, chunk := max(1, WORK // (10 * len(y)))):
        drawn = generator.multinomial(len(y), np.full(len(y), 1 / len(y)), min(chunk, count - part)).astype(float)
        samples.append(minimise(np.repeat(best, len(drawn), axis=0), n, d, y, delta, 80, drawn)[0])
    theta = np.concatenate(samples)
    theta[:, 1] += theta[:, 3] * center_n
    theta[:, 2] += theta[:, 4] * center_d
    # By least squares: exact if C = 6·N·D, close if attention is counted.
    gamma, k = np.polyfit(log_n, np.log(sample.compute / sample.tokens), 1)
    return Parametric(
        theta=theta,
        scale=(float(k), float(gamma)),
        delta=delta,
        deviation=math.sqrt(float(residual @ residual) / max(1, len(y) - len(NAMES))),
        points=len(y),
        compute=(float(sample.compute.min()), float(sample.compute.max())),
        lowest=lowest,
        misfit=lack_of_fit(residual, jacobian(shares, n, d)[0], n, d),
        agreeing=agreeing,
        tried=tried,
    )
