"""Part 2, factors in the wild: each ν against the measured 1/√E‖·‖² of the activation that it stands for.

An activation is taken without its own factor, but with those before it: ν_p stands for the length of W_p (A v) where v
carries ν_qkv already, as in the model. Where the input of a map is not as long as the derivation assumes (length 1; for
W_p, length 1 of each head), the map is not to blame: `unit` is the measured factor for an input scaled to that length.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from angpt.analysis.probe import Lengths, Probe, constants, finite, length, ratio
from angpt.models.decoder import Block
from angpt.models.factors import Factors
from angpt.models.primitives import lerp, norm, split_heads, wide

SYMBOLS = {
    "q": "ν_qkv",
    "k": "ν_qkv",
    "v": "ν_qkv",
    "p": "ν_p",
    "u": "ν_uz",
    "z": "ν_uz",
    "acf": "ν_acf",
    "d": "ν_d",
    "lerp_a": "ν(α)",
    "lerp_m": "ν(α)",
}
"""The activations by short names, and the factor of each."""

ACTIVATIONS = {
    "q": "W_q h",
    "k": "W_k h",
    "v": "W_v h",
    "p": "W_p (A v)",
    "u": "W_u h",
    "z": "W_z h",
    "acf": "u · SiLU(z)",
    "d": "W_d h_m",
    "lerp_a": "h + α_a (h_a − h)",
    "lerp_m": "h + α_m (h_m − h)",
}


@dataclass(frozen=True)
class FactorInTheWild:
    """One factor at one layer."""

    activation: str
    """A key of `ACTIVATIONS`."""
    layer: int
    """Number of the layer, from 1."""
    nu: float | None
    """The factor that the model applies; for ν(α), which is a vector, its effect on the length. None where the
    architecture has none."""
    measured: float | None
    """1/√E‖·‖² of the activation."""
    unit: float | None
    """`measured` for inputs of the length that the derivation assumes; None for the activation function."""
    mean_inverse: float | None
    """E[1/‖·‖], what exact normalization would multiply with on average."""
    variation: float | None
    """Standard deviation of ‖·‖ over its mean."""
    off: float | None
    """Length of the activation after its factor: ν · √E‖·‖², which should be 1."""
    error: float | None
    """Relative distance of E[1/‖·‖] from 1/√E‖·‖²: what any constant in place of a norm costs, however well it is
    chosen. The paper tabulates it."""
    cosine: float | None
    """Of the stream and the block's output, for the interpolations: the derivation takes it for 0."""


class FactorProbe(Probe):
    def __init__(self) -> None:
        self.plain: dict[tuple[str, int], Lengths] = {}
        self.units: dict[tuple[str, int], Lengths] = {}
        self.applied: dict[tuple[str, int], Lengths] = {}
        self.constants: dict[int, Factors] = {}
        self.cosines: dict[tuple[str, int], tuple[Tensor, int]] = {}

    def note(self, name: str, layer: int, plain: Tensor, unit: Tensor | None = None) -> None:
        self.plain.setdefault((name, layer), Lengths()).add(plain)
        if unit is not None:
            self.units.setdefault((name, layer), Lengths()).add(unit)

    def linear(self, layer: int, block: Block, name: str, x: Tensor, scale: Tensor | float, y: Tensor) -> None:
        nu, into = constants(block), length(x)
        own = 1.0 if isinstance(scale, Tensor) else scale
        if isinstance(getattr(block, "nu", None), Factors):
            self.constants[layer] = nu
        match name:
            case "W_qkv":
                for part, vectors in zip("qkv", split_heads(y, block.d_head), strict=True):
                    plain = length(vectors) / own  # (B, H, T)
                    self.note(part, layer, plain, plain / into[:, None])
            case "W_p":
                plain = length(y) / own
                self.note("p", layer, plain, plain * math.sqrt(y.shape[-1] // block.d_head) / into)
            case "W_uz":
                for part, vectors in zip("uz", y.chunk(2, dim=-1), strict=True):
                    plain = length(vectors) / own
                    self.note(part, layer, plain, plain / into)
            case "W_d":
                plain = length(y) / own
                self.note("acf", layer, into / nu.acf)
                self.note("d", layer, plain, plain / into)

    def attention(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.interpolation("lerp_a", getattr(block, "alpha_a", None), layer, block, h, x)

    def mlp(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.interpolation("lerp_m", getattr(block, "alpha_m", None), layer, block, h, x)

    def interpolation(
        self, name: str, scale: torch.nn.Module | None, layer: int, block: Block, h: Tensor, x: Tensor
    ) -> None:
        if scale is None:
            return
        h, x, alpha = wide(h), wide(x), scale()
        self.note(name, layer, length(lerp(h, x, alpha)), length(lerp(norm(h), x, alpha)))
        if (factor := getattr(block, "nu_lerp", None)) is not None:
            self.applied.setdefault((name, layer), Lengths()).add(length(lerp(h, x, alpha, factor(alpha))))
        cosines = (norm(h) * x).sum(dim=-1).double()
        total, count = self.cosines.get((name, layer), (torch.zeros((), device=h.device), 0))
        self.cosines[name, layer] = total + cosines.sum(), count + cosines.numel()

    def results(self) -> tuple[FactorInTheWild, ...]:
        order = {name: number for number, name in enumerate(ACTIVATIONS)}
        keys = sorted(self.plain, key=lambda key: (order[key[0]], key[1]))
        return tuple(self.result(name, layer) for name, layer in keys)

    def result(self, name: str, layer: int) -> FactorInTheWild:
        key = name, layer
        plain = self.plain[key].stats()
        nu = None
        if key in self.applied:
            nu = ratio(self.applied[key].stats().rms, plain.rms)
        elif layer in self.constants and not name.startswith("lerp"):
            nu = getattr(self.constants[layer], SYMBOLS[name].removeprefix("ν_"))
        total, count = self.cosines.get(key, (None, 0))
        measured = ratio(1.0, plain.rms)
        excess = ratio(plain.mean_inverse, measured)
        return FactorInTheWild(
            activation=name,
            layer=layer + 1,
            nu=nu,
            measured=measured,
            unit=ratio(1.0, self.units[key].stats().rms) if key in self.units else None,
            mean_inverse=plain.mean_inverse,
            variation=plain.variation,
            off=ratio(nu, measured),
            error=None if excess is None else excess - 1,
            cosine=None if total is None else finite(total.item() / count),
        )
