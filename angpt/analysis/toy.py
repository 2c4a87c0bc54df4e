"""Part 6, the toy examples of the paper's section 3: why normalized inputs help, and why residual norms grow.

`python -m angpt.analysis.toy docs/figures` draws both.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from angpt.models.factors import nu_lerp, unit
from angpt.models.primitives import lerp
from angpt.present.charts import Chart
from angpt.present.style import DASHED, FURTHER, INK, KNOWN, fold_legend, panels, plain_log_axis, styled

ALPHA = 0.25
"""Interpolation weight of the example: the largest that the paper finds in trained models."""


def best_rate(eigenvalues: NDArray[np.float64]) -> float:
    """α* = 2 / (λ_max + λ_min), the learning rate at which the slowest coordinate converges fastest."""
    return float(2 / (eigenvalues.max() + eigenvalues.min()))


def best_contraction(kappa: float) -> float:
    """(κ − 1) / (κ + 1), the contraction factor of the slowest coordinate at the best rate."""
    return (kappa - 1) / (kappa + 1)


def descend(eigenvalues: NDArray[np.float64], rate: float, steps: int) -> NDArray[np.float64]:
    """Gradient descent on ½ xᵀ Λ x from x = (1, …, 1): the largest |x_i| at the start and after each step."""
    x = np.ones_like(eigenvalues)
    largest = [1.0]
    for _ in range(steps):
        x = x - rate * eigenvalues * x
        largest.append(float(np.abs(x).max()))
    return np.array(largest)


def measured_contraction(eigenvalues: NDArray[np.float64], rate: float) -> float:
    """Factor per step by which the largest coordinate shrinks, over 200 steps."""
    steps = 200
    return float(descend(eigenvalues, rate, steps)[-1] ** (1 / steps))


def preconditioned(eigenvalues: NDArray[np.float64]) -> NDArray[np.float64]:
    """Eigenvalues of Λ P with P = diag(1 / ‖λ_j‖), which scales every column of Λ to length 1."""
    matrix = np.diag(eigenvalues)
    return np.diag(matrix / np.linalg.norm(matrix, axis=0))


def spectrum(kappa: float) -> NDArray[np.float64]:
    """32 eigenvalues from 1 to κ, evenly spaced on a logarithmic axis."""
    return np.geomspace(1, kappa, 32)


class Growth(NamedTuple):
    """Mean length of the residual stream after each layer, (L,)."""

    summed: Tensor
    """h + x, the classic update."""
    interpolated: Tensor
    """h + α (x − h)."""
    normalized: Tensor
    """(h + α (x − h)) · ν(α)."""


def residual_growth(layers: int, d: int, samples: int, alpha: float = ALPHA) -> Growth:
    """Length of the stream when layers contribute independent unit vectors, added or interpolated."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.tensor(alpha)
    updates: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda h, x: h + x,
        lambda h, x: lerp(h, x, weight),
        lambda h, x: lerp(h, x, weight, nu_lerp(weight)),
    )
    first = unit(samples, d, generator=rng)
    states, lengths = [first] * 3, [[1.0] * 3]
    for _ in range(layers - 1):
        x = unit(samples, d, generator=rng)
        states = [update(h, x) for update, h in zip(updates, states, strict=True)]
        lengths.append([h.norm(dim=-1).mean().item() for h in states])
    return Growth(*torch.tensor(lengths, dtype=torch.float64).T)


def preconditioning_chart() -> Chart:
    """Contraction factor against condition number, and error against step."""
    kappas = [float(k) for k in np.geomspace(1, 1000, 13)]
    found = [measured_contraction(spectrum(k), best_rate(spectrum(k))) for k in kappas]
    after = [measured_contraction(e := preconditioned(spectrum(k)), best_rate(e)) for k in kappas]
    shown, steps = (10.0, 30.0, 200.0), 60

    def draw(narrow: bool) -> Figure:
        figure, (left, right) = panels(2, narrow, columns=2, height=3.3)
        line = np.geomspace(1, 1000, 200)
        left.plot(line, [best_contraction(k) for k in line], color=INK, lw=1, label="(κ − 1) / (κ + 1)")
        left.plot(kappas, found, "o", color=FURTHER[0], ms=5, label="measured")
        left.plot(kappas, after, "s", color=FURTHER[1], ms=5, label="columns of Λ normalized")
        plain_log_axis(left, "x")
        left.set(xlabel="condition number κ", ylabel="contraction per step", title="Slowest coordinate, best rate")
        for kappa, color in zip(shown, (FURTHER[0], FURTHER[2], FURTHER[3]), strict=True):
            error = descend(spectrum(kappa), best_rate(spectrum(kappa)), steps)
            right.plot(error, color=color, lw=1.6)
            above = (-4, 6 if kappa > 10 else 14)
            right.annotate(f"κ = {kappa:g}", (steps, error[-1]), above, textcoords="offset points", ha="right",
                           color=color)  # fmt: skip
        exact = descend(e := preconditioned(spectrum(100.0)), 0.5 * best_rate(e), steps)
        right.plot(exact, color=FURTHER[1], lw=1.6)
        right.annotate("normalized, at half the best rate", (24, exact[24]), (6, 0), textcoords="offset points",
                       color=FURTHER[1])  # fmt: skip
        right.set_ylim(1e-9, 10)
        plain_log_axis(right)
        right.set(xlabel="step", ylabel="largest |x_i|", title="Error of gradient descent")
        fold_legend(figure, left, narrow)
        return figure

    return Chart(
        name="toy-preconditioning",
        title="Why normalization helps gradient descent",
        caption="Gradient descent on ½ xᵀ Λ x. Left: the contraction factor of the slowest coordinate at the best "
        "learning rate, measured over 200 steps, against the condition number κ; with the columns of Λ normalized κ is "
        "1 and one step suffices. Right: the largest coordinate at the best rate for three κ, and for the normalized Λ "
        "at half its best rate (at the best one it is 0 after one step).",
        alt="The measured contraction factors lie on (κ − 1)/(κ + 1), from 0 at κ = 1 to 0.998 at κ = 1000; "
        "after normalization they are 0 for every κ.",
        columns=("kappa", "formula", "measured", "normalized"),
        rows=tuple((k, best_contraction(k), a, b) for k, a, b in zip(kappas, found, after, strict=True)),
        draw=draw,
    )


def residual_chart(layers: int = 64, d: int = 512, samples: int = 256) -> Chart:
    """Length of the residual stream against depth."""
    growth = residual_growth(layers, d, samples)
    depth = np.arange(1, layers + 1)

    def draw(narrow: bool) -> Figure:
        figure, (ax,) = panels(1, narrow, height=3.3)
        ax.plot(depth, growth.summed, color=KNOWN["gpt+"], lw=3, label="h + x")
        ax.plot(depth, np.sqrt(depth), color=INK, lw=1, ls=DASHED, label="√L")
        ax.plot(depth, growth.interpolated, color=KNOWN["ngpt"], lw=1.8, label=f"h + α (x − h), α = {ALPHA:g}")
        ax.plot(depth, growth.normalized, color=KNOWN["angpt"], lw=1.8, label="the same · ν(α)")
        ax.set(xlabel="layers L", ylabel="mean length of h", xlim=(1, layers))
        plain_log_axis(ax, "x")
        plain_log_axis(ax)
        fold_legend(figure, ax, narrow)
        return figure

    floor = math.sqrt(ALPHA / (2 - ALPHA))
    return Chart(
        name="toy-residual",
        title="Why the residual norm grows",
        caption=f"Layers that each contribute an independent random unit vector of {d} dimensions, mean over {samples} "
        "samples. Added up, the stream has length √L. Interpolated without a factor it shrinks, to "
        f"√(α/(2−α)) = {floor:.2f}; times ν(α) it keeps length 1.",
        alt=f"After {layers} layers the sum has length {growth.summed[-1]:.2f} (√L is {math.sqrt(layers):.2f}), "
        f"the interpolation {growth.interpolated[-1]:.2f}, with its factor {growth.normalized[-1]:.2f}.",
        columns=("layers", "sqrt", "sum", "lerp", "lerp_nu"),
        rows=tuple(
            (int(n), math.sqrt(n), *values)
            for n, *values in zip(depth, *(lengths.tolist() for lengths in growth), strict=True)
        ),
        draw=draw,
    )


def write_figures(folder: Path) -> list[Path]:
    """Write both figures as PNG files and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in (preconditioning_chart(), residual_chart()):
        paths.append(folder / f"{chart.name}.png")
        with styled():
            chart.draw(False).savefig(paths[-1], metadata={"Software": None})
    return paths


if __name__ == "__main__":
    print(*write_figures(Path(sys.argv[1])), sep="\n")
