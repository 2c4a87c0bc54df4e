"""The normalizing factors ν of anGPT: constants that replace 1 / ‖·‖, justified by concentration of measure.

In high dimension the length of a random vector hardly varies, so dividing by it can be replaced by multiplying by
ν = 1 / sqrt(E‖·‖²). With unit inputs and unit rows:

- Linear map, W of r × d: each (w_i·x)² has mean 1/d, so E‖W x‖² = r/d and ν = sqrt(d/r).
  Queries, keys and values are maps onto one head, d_h × d_m; the output map goes from d_h to d_m; the MLP goes from
  d_m to d_f and back.
- Interpolation, (1−α) h + α x with h and x independent: E‖·‖² = (1−α)² + α², so ν(α) = 1 / sqrt(α² + (1−α)²),
  elementwise if α is a vector.
- Activation: no closed form; see `ACTIVATION_ASSUMPTIONS`.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from angpt.config import ModelConfig
from angpt.models.primitives import norm
from angpt.models.primitives import nu_lerp as nu_lerp


@dataclass(frozen=True)
class Factors:
    """The constant factors of one model."""

    qkv: float
    p: float
    uz: float
    acf: float
    d: float

    def times(self, c: float) -> "Factors":
        return Factors(*(c * nu for nu in dataclasses.astuple(self)))


ONES = Factors(1.0, 1.0, 1.0, 1.0, 1.0)
"""Factors that change nothing."""


class LerpFactor(NamedTuple):
    """The factor of the residual update: ν(α) or 1, times a constant."""

    of_alpha: bool = True
    times: float = 1.0

    def __call__(self, alpha: Tensor) -> Tensor | float:
        if not self.of_alpha:
            return self.times
        return nu_lerp(alpha) if self.times == 1.0 else nu_lerp(alpha) * self.times


def nu_linear(d_in: int, d_out: int) -> float:
    """ν of a map from d_in to d_out with unit rows: sqrt(d_in / d_out)."""
    return math.sqrt(d_in / d_out)


def constants(cfg: ModelConfig) -> Factors:
    """The constant factors of a model of this shape."""
    return Factors(
        qkv=nu_linear(cfg.d_model, cfg.d_head),
        p=cfg.nu_p_value,
        uz=nu_linear(cfg.d_model, cfg.d_mlp),
        acf=cfg.nu_acf,
        d=nu_linear(cfg.d_mlp, cfg.d_model),
    )


@dataclass(frozen=True)
class Estimate:
    """Statistics of the length ‖·‖ of an activation over random inputs."""

    nu: float
    """1 / sqrt(E‖·‖²), the definition of ν."""
    mean_inverse: float
    """E[1/‖·‖], the mean factor of exact normalization. By Jensen's inequality it is larger than ν: for a Gaussian
    vector of k dimensions by 3/(4k). Its relative distance from ν is the error that the paper tabulates."""
    variation: float
    """Coefficient of variation of ‖·‖: small if the length concentrates."""


def estimate(sample: Callable[[], Tensor], draws: int) -> Estimate:
    """Monte-Carlo estimate from `draws` batches of vectors, the rows of what `sample` returns."""
    lengths = torch.cat([sample().norm(dim=-1) for _ in range(draws)]).double()
    return Estimate(
        nu=float(lengths.square().mean().rsqrt()),
        mean_inverse=float(lengths.reciprocal().mean()),
        variation=float(lengths.std() / lengths.mean()),
    )


def unit(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Random vectors, uniform on the unit sphere of the last dimension."""
    return norm(torch.randn(*shape, generator=generator))


def linear_sample(d_in: int, d_out: int, n: int, generator: torch.Generator) -> Callable[[], Tensor]:
    """A function that returns W x for new unit rows and n unit inputs at each call."""
    return lambda: unit(n, d_in, generator=generator) @ unit(d_out, d_in, generator=generator).T


def lerp_sample(d: int, alpha: float, n: int, generator: torch.Generator) -> Callable[[], Tensor]:
    """A function that returns (1−α) h + α x for n new pairs of unit vectors at each call."""
    return lambda: (1 - alpha) * unit(n, d, generator=generator) + alpha * unit(n, d, generator=generator)


ACTIVATION_ASSUMPTIONS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "SiLU(z), z on the unit sphere": lambda d, n, rng: F.silu(unit(n, d, generator=rng)),
    "SiLU(z), z on the sphere of radius √d": lambda d, n, rng: (
        F.silu(math.sqrt(d) * unit(n, d, generator=rng)) / math.sqrt(d)
    ),
    "u · SiLU(z), both on the unit sphere": lambda d, n, rng: (
        unit(n, d, generator=rng) * F.silu(unit(n, d, generator=rng))
    ),
    "√d u · SiLU(z), both on the unit sphere": lambda d, n, rng: (
        math.sqrt(d) * unit(n, d, generator=rng) * F.silu(unit(n, d, generator=rng))
    ),
}
"""Assumptions about the input of the activation, as functions (d, n, generator) → sample. The paper quotes ν = 3.74; no
assumption gives it, which does not matter where a norm after the block cancels the factor (see `angpt factors`)."""
