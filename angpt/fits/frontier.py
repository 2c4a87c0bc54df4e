"""The compute-optimal frontier by regression: the best model size at each compute, and its loss.

At equal compute C, log loss over log size is a valley. With x = log C and u = log(N / N_opt(C)):

    log L = f(x) + log(1 − f′(x)·(ψ(b) − ψ(−a))),    ψ(p) = (exp(p·u) − 1)/p,    log N_opt(C) = β + α·(x − center)

f is the loss at the optimum: a polynomial, whose degree (2 to 5) is that of the lowest BIC. The valley is that of a
falling and a rising power law with the exponents a = k·(1 − α) and b = k·α, exactly that of L = E + A/Nᵃ + B/Dᵇ if
C ∝ N·D; its curvature is k·|f′|. Unlike in the parametric law, f and k are free, and only runs near the optimum count:
their weight falls to zero where N differs from N_opt by a factor of `WINDOW`.

There are no bins, and no lowest run is selected: the sizes tried may change with the compute, and noise does not choose
among them. Intervals are those of a jackknife over runs (linearised), with Student's t, so that the noise may differ
between runs and be shared by the evaluations of one run.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import legendre
from scipy.optimize import least_squares

from angpt.fits.compute import Sample
from angpt.fits.powerlaw import Floats, Ints, PowerLaw, curvature_notes, fit_power_law, jackknife, line
from angpt.fits.saturating import Saturating, fit_saturating

WINDOW = 7.0
DEGREES = 2, 5
"""Lowest and highest degree of f."""


@dataclass(frozen=True)
class Valley:
    """The model fitted with one degree of f."""

    k: float
    level: float
    """log N_opt at the center."""
    exponent: float
    center: float
    covariance: Floats
    """Covariance of the coefficients of f, k, level and exponent."""
    freedom: int
    bic: float
    offset: Floats
    """log(N / N_opt) of each point."""
    weight: Floats
    curve: Floats
    """f at each point: the log loss at the optimal size of its compute."""
    terms: Floats
    """Gradient of `curve` with respect to the parameters."""
    at_optimum: Floats
    """log loss of each point, moved along the valley to the optimal size: `curve` and the residual."""

    def span(self, x: Floats) -> tuple[float, float]:
        """The range of log compute in which both smaller and larger sizes than the optimal one were tried."""
        sides = [x[(self.weight > 0) & (sign * self.offset > 0)] for sign in (-1, 1)]
        if not len(sides[0]) or not len(sides[1]):
            return 0.0, 0.0
        return max(float(side.min()) for side in sides), min(float(side.max()) for side in sides)

    def law(self, compute: Floats) -> PowerLaw:
        """N_opt(C)."""
        low, high = self.span(np.log(compute))
        found = self.level, self.exponent, self.covariance[-2:, -2:]
        return line(self.center, *found, self.freedom, (math.exp(low), math.exp(high)), int(np.sum(self.weight > 0)))


def fit_valley(sample: Sample, run_of: Ints, degree: int) -> Valley | None:
    """The weighted least-squares fit, or None if the points have no valley around an optimum."""
    n, x, y = np.log(sample.parameters), np.log(sample.compute), sample.log_loss
    center = float(x.mean())
    t = x - center
    half = max(float(np.abs(t).max()), 1e-9)
    gap = unfinished(sample.tokens, run_of)
    # Columns of the linear part, f and the gap, and those of f′.
    linear = np.column_stack([legendre.legvander(t / half, degree), gap])
    basis = [legendre.Legendre.basis(i).deriv() for i in range(degree + 1)]
    slopes = np.column_stack([*(p(t / half) / half for p in basis), np.zeros_like(gap)])
    count = linear.shape[1]

    def valley(theta: Floats) -> tuple[Floats, Floats, Floats]:
        """u, the height above the optimum, and the Jacobian of log L."""
        k, level, alpha = theta[count:]
        u, steep = n - level - alpha * t, -slopes @ theta[:count]
        (up, of_b, to_right), (down, of_a, to_left) = power(k * alpha, u), power(k * (alpha - 1), u)
        shape = up - down
        whole = np.maximum(1 + steep * shape, 0.1)  # positive where f falls
        rise, of_k, of_alpha = to_right - to_left, alpha * of_b + (1 - alpha) * of_a, k * (of_b - of_a)
        of_valley = np.column_stack([of_k, -rise, of_alpha - rise * t]) * (steep / whole)[:, None]
        return u, np.log(whole), np.column_stack([linear - slopes * (shape / whole)[:, None], of_valley])

    def minimise(theta: Floats, root: Floats) -> Floats:
        return least_squares(
            lambda p: root * (linear @ p[:count] + valley(p)[1] - y),
            theta,
            jac=lambda p: root[:, None] * valley(p)[2],
            method="lm",
            max_nfev=30,  # further steps follow with new weights
        ).x

    # The start: a quadratic in log N with a term t·log N, without skew.
    m = n - n.mean()
    start = np.linalg.lstsq(np.column_stack([linear, m**2 / 2, -m, -m * t]), y, rcond=None)[0]
    curvature, steep = start[count], max(-float(np.mean(slopes @ start[:count])), 1e-3)
    if curvature < 1e-9:
        return None
    theta = np.r_[start[:count], curvature / steep, n.mean() + start[-2] / curvature, start[-1] / curvature]
    for _ in range(50):
        weight = sample.seeds * np.maximum(0.0, 1 - (valley(theta)[0] / math.log(WINDOW)) ** 2) ** 2
        runs = len(np.unique(run_of[weight > 0]))
        if runs <= len(theta):
            return None
        last, theta = theta, minimise(theta, np.sqrt(weight))
        if np.abs(theta - last)[count:].max() < 1e-7:
            break
    if theta[count] <= 0:
        return None
    u, height, jacobian = valley(theta)
    residual = y - linear @ theta[:count] - height
    terms = np.zeros_like(jacobian)
    terms[:, : degree + 1] = linear[:, : degree + 1]
    variance = max(float(np.average(residual**2, weights=weight)), 1e-30)
    return Valley(
        k=float(theta[count]),
        level=float(theta[count + 1]),
        exponent=float(theta[count + 2]),
        center=center,
        covariance=jackknife(jacobian, weight, residual, run_of),
        freedom=runs - len(theta),
        bic=runs * math.log(variance) + len(theta) * math.log(runs),
        offset=u,
        weight=weight,
        curve=terms @ theta,
        terms=terms,
        at_optimum=terms @ theta + residual,
    )


def power(p: float, u: Floats) -> tuple[Floats, Floats, Floats]:
    """ψ(p) = (exp(p·u) − 1)/p, a power law of exp(u) that rises from zero at u = 0, and its slopes along p and u."""
    p = p if abs(p) > 1e-5 else 1e-5
    grown = np.exp(np.clip(p * u, -50, 50))  # beyond the range that has weights
    value = (grown - 1) / p
    return value, (u * grown - value) / p, grown


def unfinished(tokens: Floats, run_of: Ints) -> Floats:
    """Columns for evaluations during a run: 1, and the part of its schedule that is left; none without such points.

    With the learning rate not yet decayed, their loss lies above that of a complete run on the same tokens.
    """
    end = np.zeros(int(run_of.max()) + 1)
    np.maximum.at(end, run_of, tokens)
    left = 1 - tokens / end[run_of]
    columns = np.column_stack([(left > 0).astype(float), left])
    return columns[:, np.ptp(columns, axis=0) > 0]


@dataclass(frozen=True)
class Frontier:
    """The laws of the frontier."""

    loss: PowerLaw
    saturating: Saturating | str
    """L(C) with an irreducible loss, or why there is none."""
    parameters: PowerLaw | None
    tokens: PowerLaw | None
    compute: Floats
    losses: Floats
    """Points of the laws of the loss: runs, moved to the optimal size of their compute if there is one."""
    optimal: bool
    """False if there is no optimum, and L(C) is that of the best runs, an upper bound."""
    curved: bool
    """True if the power law of the loss does not describe it."""
    notes: tuple[str, ...]


def fit_frontier(sample: Sample, run_of: Ints) -> Frontier | str:
    """The laws, or the reason why there are none; `run_of` is the number of the run that each point belongs to."""
    x = np.log(sample.compute)
    valley, problem = _find_valley(sample, run_of)
    if valley is None:
        order = np.lexsort((sample.log_loss, x))
        lowest = np.minimum.accumulate(sample.log_loss[order])
        best = order[sample.log_loss[order] <= lowest]  # no cheaper run is better
        if len(np.unique(x[best])) < 3:
            return "fewer than three runs improve on all cheaper ones; train at more budgets"
        compute, losses = sample.compute[best], np.exp(sample.log_loss[best])
        loss = fit_power_law(compute, losses)
        bound = f"no N_opt(C), no D_opt(C): {problem}; L(C) is that of the best runs, an upper bound of the optimum"
        curved = curvature_notes(compute, losses)
        notes = [bound, *curved]
        return Frontier(loss, "there is no optimum", None, None, compute, losses, False, bool(curved), tuple(notes))
    used = valley.weight > 0
    size = valley.law(sample.compute)
    # Tokens by compute and size: exactly C / 6N if C = 6·N·D, close if attention is counted.
    plane = np.column_stack([np.ones_like(x), x, np.log(sample.parameters)])[used]
    constant, of_compute, of_size = map(float, np.linalg.lstsq(plane, np.log(sample.tokens[used]), rcond=None)[0])
    tokens = dataclasses.replace(
        size,
        level=constant + of_compute * size.center + of_size * size.level,
        exponent=of_compute + of_size * size.exponent,
        level_error=abs(of_size) * size.level_error,
        exponent_error=abs(of_size) * size.exponent_error,
    )
    compute, weight, terms = sample.compute[used], valley.weight[used], valley.terms[used]
    center = float(np.average(x[used], weights=weight))
    # A power law through the curve f: its coefficients are linear in f.
    design = np.column_stack([np.ones_like(compute), x[used] - center])
    inverse = np.linalg.inv((design * weight[:, None]).T @ design) @ (design * weight[:, None]).T
    level, exponent = map(float, inverse @ valley.curve[used])
    ends = float(compute.min()), float(compute.max())
    covariance = inverse @ terms @ valley.covariance @ terms.T @ inverse.T
    loss = line(center, level, exponent, covariance, valley.freedom, ends, len(compute))
    saturating = fit_saturating(compute, np.exp(valley.curve[used]), weight)
    if isinstance(saturating, Saturating):
        saturating = saturating.propagate(terms, valley.covariance, valley.freedom)
    losses = np.exp(valley.at_optimum[used])
    curved = curvature_notes(compute, losses)
    notes = list(curved)
    if len(compute) < len(x):
        far = f"{len(x) - len(compute):,} of {len(x):,} points are not used: their size is not within a factor of"
        notes.append(f"{far} {WINDOW:g} of the best one")
    return Frontier(loss, saturating, size, tokens, compute, losses, True, bool(curved), tuple(notes))


def _find_valley(sample: Sample, run_of: Ints) -> tuple[Valley, None] | tuple[None, str]:
    """The valley of the degree with the lowest BIC, or why there is none."""
    if len(np.unique(sample.parameters)) < 3:
        return None, "a best size between a smaller and a larger one needs three sizes"
    x = np.log(sample.compute)
    most = max(1, len(np.unique(np.round(x / 0.05))) - 1)
    fits = [fit_valley(sample, run_of, degree) for degree in range(min(DEGREES[0], most), min(DEGREES[1], most) + 1)]
    valley = min((fit for fit in fits if fit is not None), key=lambda fit: fit.bic, default=None)
    if valley is None:
        return None, "at equal compute the losses show no best size between smaller and larger ones; train more sizes"
    low, high = valley.span(x)
    if low >= high:
        return None, "the sizes tried are all smaller, or all larger, than the best one; train others"
    if valley.k < math.sqrt(valley.covariance[-3, -3]):
        return None, "noise hides the best size; train more sizes or seeds"
    return valley, None
