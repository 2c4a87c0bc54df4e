"""Synthetic studies: loss surfaces with known optima and exponents, with or without noise."""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from angpt.fits.compute import Sample
from angpt.fits.records import Record


@dataclass(frozen=True)
class Law:
    """L = E + A/Nᵃ + B/Dᵇ."""

    E: float = 1.69
    A: float = 406.4
    B: float = 410.7
    a: float = 0.34
    b: float = 0.28

    def loss(self, n, d):
        return self.E + self.A * n**-self.a + self.B * d**-self.b

    @property
    def exponents(self) -> dict[str, float]:
        total = self.a + self.b
        return {"parameters": self.b / total, "tokens": self.a / total, "loss": -self.a * self.b / total}


LAW = Law()
"""That of Hoffmann et al. (2022)."""
REFIT = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""That of Besiroglu et al. (2024), fitted to the same runs."""
FREE = Law(E=0.0)
"""Without irreducible loss, L(C) is an exact power law."""
MODELS = np.array([32.05, 62.24, 127.03, 247.17, 505.73, 1073.0]) * 1e6
"""Parameters of GPT+ in the sizes of the paper."""
MULTIPLES = (10.0, 20.0, 40.0, 60.0, 100.0)
"""Tokens per parameter of experiments/scaling.toml."""


def grid(law: Law, sizes: Any, computes: Any, noise: float = 0.0, seed: int = 0) -> Sample:
    """Every size at every compute."""
    n, c = np.tile(sizes, len(computes)), np.repeat(computes, len(sizes))
    return _sample(law, n, c / (6 * n), noise, seed)


def multiples(law: Law, sizes: Any, ratios: Any, noise: float = 0.0, seed: int = 0) -> Sample:
    """Every size with budgets that are multiples of it, so that each compute has different sizes."""
    n = np.repeat(sizes, len(ratios))
    return _sample(law, n, n * np.tile(ratios, len(sizes)), noise, seed)


def _sample(law: Law, n: Any, d: Any, noise: float, seed: int) -> Sample:
    y = np.log(law.loss(n, d)) + noise * np.random.default_rng(seed).standard_normal(len(n))
    return Sample(n, d, 6 * n * d, y, np.ones(len(n)))


def isoflop_records(
    law: Law, sizes: Iterable[float], computes: Iterable[float], noise: float = 0.0, seed: int = 0, name: str = "angpt"
) -> list[Record]:
    """Every size at every compute, C = 6·N·D."""
    generator = np.random.default_rng(seed)
    records = []
    for compute in computes:
        for n in sizes:
            d = compute / (6 * n)
            loss = law.loss(n, d) * math.exp(noise * generator.standard_normal())
            records.append(Record(f"run-{len(records)}", name, float(n), float(d), float(loss)))
    return records


@dataclass(frozen=True)
class Valley:
    """log loss = a term of the size + parabolas in log batch and log rate; the best rate depends on the batch."""

    batch: tuple[float, float] = (2e5, 0.5)
    """Best batch at 100M parameters, and its exponent."""
    lr: tuple[float, float] = (5e-3, -0.2)
    coupling: float = 0.5
    """Exponent with which the best rate rises with the batch."""
    steepness: tuple[float, float] = (0.012, 0.03)
    tokens: tuple[float, float] = (0.0, 0.0)
    """Exponents of the best batch and rate over tokens, relative to 20 per parameter."""

    def best(self, n: float, d: float | None = None) -> tuple[float, float]:
        more = 1.0 if d is None else d / (20 * n)
        batch, lr = (y0 * (n / 1e8) ** a for y0, a in (self.batch, self.lr))
        return batch * more ** self.tokens[0], lr * more ** self.tokens[1]

    def log_loss(self, n: float, batch: float, lr: float, d: float | None = None) -> float:
        best_batch, best_lr = self.best(n, d)
        u = math.log(batch / best_batch)
        v = math.log(lr / best_lr) - self.coupling * u
        lowest = math.log(2 + 2 * (n / 1e8) ** -0.15) - 0.05 * math.log((d or 20 * n) / (20 * n))
        return lowest + self.steepness[0] * u**2 + self.steepness[1] * v**2


def sweep_records(
    valley: Valley,
    sizes: Sequence[float],
    noise: float = 0.0,
    seed: int = 0,
    batches: int = 5,
    rates: int = 5,
    seeds: int = 1,
    name: str = "angpt",
    multiples: Sequence[float] = (20.0,),
    **fields: Any,
) -> list[Record]:
    """Grids of powers of two around the optimum of each size, like those of a study that extends its grids."""
    generator = np.random.default_rng(seed)
    records = []
    for n, d in ((n, m * n) for n in sizes for m in multiples):
        best_batch, best_lr = valley.best(n, d)
        center = 2.0 ** round(math.log2(best_batch))
        for i in range(-(batches // 2), batches - batches // 2):
            batch = center * 2.0**i
            middle = 2.0 ** round(math.log2(best_lr * (batch / best_batch) ** valley.coupling))
            for j in range(-(rates // 2), rates - rates // 2):
                lr = middle * 2.0**j
                for s in range(seeds):
                    loss = math.exp(valley.log_loss(n, batch, lr, d) + noise * generator.standard_normal())
                    record = Record(
                        "", name, float(n), float(d), loss, batch_tokens=batch, lr=lr, seed=str(s), **fields
                    )
                    records.append(record)
    return records


def write_csv(path: Path, records: Iterable[Record], shuffle: int | None = None) -> Path:
    """Write the records, with the columns that have values."""
    records = list(records)
    if shuffle is not None:
        np.random.default_rng(shuffle).shuffle(records)  # type: ignore[arg-type]
    names = ["architecture", "parameters", "tokens", "loss", "batch_tokens", "lr", "seed", "settings", "flops"]
    names = [n for n in names if any(getattr(r, n) not in (None, "") for r in records)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for r in records:
            writer.writerow(["" if (v := getattr(r, n)) is None else v for n in names])
    return path
