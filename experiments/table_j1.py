"""Does the paper's table of N_opt(C) and D_opt(C) measure its models or its design? The tables of docs/table-j1.md.

python experiments/table_j1.py
"""

import dataclasses

import numpy as np

from angpt.config import SIZES
from angpt.fits.binned import Binned, fit_binned
from angpt.fits.compute import Sample
from angpt.fits.frontier import Frontier, fit_frontier
from angpt.fits.powerlaw import fit_power_law
from angpt.present.words import bracketed

PARAMETERS = np.array([32.05, 62.24, 127.03, 247.17, 505.73, 1073.0]) * 1e6
"""GPT+, in the paper's table of sizes."""
MULTIPLES = np.array([10.0, 20.0, 40.0, 60.0, 100.0])
"""Tokens per parameter: half to five times Chinchilla's 20."""
LAWS = {
    "steep in N": (1.69, 3000.0, 60.0, 0.5, 0.2),
    "Hoffmann et al. (2022)": (1.69, 406.4, 410.7, 0.34, 0.28),
    "Besiroglu et al. (2024)": (1.8172, 482.01, 2085.43, 0.3478, 0.3658),
    "steep in D": (1.69, 30.0, 40_000.0, 0.2, 0.5),
}
"""E, A, B, a and b of L = E + A/Nᵃ + B/Dᵇ."""
NOISE, GAP = 0.002, 0.02
"""Deviation of log loss between runs, and its excess over that of a complete run early in the schedule."""
TABLE = {"GPT+": (13.408079, 0.466271, 0.336617, 0.465600), "anGPT": (9.727337, 0.473190, 0.650506, 0.451378)}
"""D₀, α_D, N₀ and α_N of the paper's table J.1."""


def design(compute_per_token: np.ndarray) -> Sample:
    """Every size on every budget; without losses."""
    n, per_token = np.repeat(PARAMETERS, len(MULTIPLES)), np.repeat(compute_per_token, len(MULTIPLES))
    d = n * np.tile(MULTIPLES, len(PARAMETERS))
    return Sample(n, d, per_token * d, np.zeros(len(n)), np.ones(len(n)))


def log_loss(law: tuple[float, ...], n: np.ndarray, d: np.ndarray) -> np.ndarray:
    e, a_, b_, a, b = law
    return np.log(e + a_ * n**-a + b_ * d**-b)


def synthetic() -> list[str]:
    """Rows of the table of laws: α_N as it is, by the paper's procedure, and by the frontier regression."""
    rows = []
    for seed, (name, law) in enumerate(LAWS.items()):
        runs = design(6 * PARAMETERS)
        noise = NOISE * np.random.default_rng(seed).standard_normal(len(runs))
        sample = dataclasses.replace(runs, log_loss=log_loss(law, runs.parameters, runs.tokens) + noise)
        # The same runs evaluated on the way, where their loss is higher as long as the schedule has not ended.
        part = np.tile(np.arange(1, 201) / 200, len(runs))
        n, d = np.repeat(runs.parameters, 200), np.repeat(runs.tokens, 200) * part
        during = log_loss(law, n, d) + GAP * np.sqrt(1 - part) + np.repeat(noise, 200)
        curves = Sample(n, d, 6 * n * d, during, np.ones(len(n)))
        binned, of_curves = fit_binned(sample), fit_binned(curves)
        frontier = fit_frontier(sample, np.arange(len(sample)))
        assert isinstance(binned, Binned)
        assert isinstance(of_curves, Binned)
        assert isinstance(frontier, Frontier)
        assert frontier.parameters is not None
        cells = bracketed(binned.parameters.slope, ".4f"), f"{of_curves.parameters.exponent:.2f}"
        rows.append(f"| {name} | {law[4] / (law[3] + law[4]):.3f} | {' | '.join(cells)} | "
                    f"{bracketed(frontier.parameters.slope, '.3f')} |")  # fmt: skip
    return rows


def published() -> list[str]:
    """Rows of the table of counts: what the design alone gives, and what the paper has."""
    width, layers = (np.array([size[i] for size in SIZES.values()]) for i in (0, 1))
    table, attention = 50_304 * width, 12 * layers * width * 2048
    counts = {
        "6·N": 6 * PARAMETERS,
        "6·N + attention": 6 * PARAMETERS + attention,
        "6·(N − embedding)": 6 * (PARAMETERS - table),
        "6·(N − embedding − head)": 6 * (PARAMETERS - 2 * table),
        "6·(N − embedding − head) + attention": 6 * (PARAMETERS - 2 * table) + attention,
    }
    rows = []
    for name, per_token in counts.items():
        runs = design(per_token)
        n, d = fit_power_law(runs.compute, runs.parameters), fit_power_law(runs.compute, runs.tokens)
        rows.append(_row(f"design, C/D = {name}", d.prefactor.mean, d.exponent, n.prefactor.mean, n.exponent))
    return rows + [_row(f"paper, {name}", *values) for name, values in TABLE.items()]


def _row(name: str, d0: float, of_tokens: float, n0: float, of_size: float) -> str:
    ratios = " to ".join(f"{d0 / n0 * c ** (of_tokens - of_size):.0f}" for c in (1e18, 1e20))
    return f"| {name} | {n0:.3g} | {of_size:.4f} | {d0:.3g} | {of_tokens:.4f} | {of_size + of_tokens:.4f} | {ratios} |"


if __name__ == "__main__":
    print("| law | true α_N | the paper's procedure | with evaluations during runs | frontier regression |")
    print("|---|---|---|---|---|")
    print("\n".join(synthetic()))
    print("\n| | N₀ | α_N | D₀ | α_D | sum | D/N at 10¹⁸ to 10²⁰ |\n|---|---|---|---|---|---|---|")
    print("\n".join(published()))
