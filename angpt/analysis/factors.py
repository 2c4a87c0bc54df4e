"""Part 2, factors in trained models: each ν against the measured 1/√E‖·‖² of the activation that it normalizes.

An activation is measured without its own factor but with those before it: ν_p normalizes W_p (A v), where v includes
ν_qkv as in the model. The derivation assumes inputs of length 1 (for W_p, length 1 of each head). Where a trained model
violates that, `unit` is the factor measured for inputs scaled to that length.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from angpt.analysis.probe import Lengths, Probe, length, ratio
from angpt.models.decoder import Block
from angpt.models.factors import Factors
from angpt.models.primitives import lerp, norm, nu_lerp, split_heads, wide

SYMBOLS = {
    "q": "ν_qkv", "k": "ν_qkv", "v": "ν_qkv", "p": "ν_p", "u": "ν_uz", "z": "ν_uz", "acf": "ν_acf", "d": "ν_d",
    "lerp_a": "ν(α)", "lerp_m": "ν(α)",
}  # fmt: skip
"""The factor of each activation."""

ACTIVATIONS = {
    "q": "W_q h", "k": "W_k h", "v": "W_v h", "p": "W_p (A v)", "u": "W_u h", "z": "W_z h", "acf": "u · SiLU(z)",
    "d": "W_d h_m", "lerp_a": "h + α_a (h_a − h)", "lerp_m": "h + α_m (h_m − h)",
}  # fmt: skip
"""The formula of each activation."""


@dataclass(frozen=True)
class MeasuredFactor:
    """A factor and the activation that it normalizes, in one layer."""

    activation: str
    """A key of `ACTIVATIONS`."""
    layer: int
    """Number of the layer, from 1."""
    nu: float | None
    """The factor in the model, None without one; for the vector ν(α), the factor by which it changes the length."""
    measured: float | None
    """1/√E‖·‖² of the activation."""
    unit: float | None
    """`measured` for inputs of the length that the derivation assumes; None for the activation function."""
    mean_inverse: float | None
    """E[1/‖·‖], the mean multiplier of exact normalization."""
    variation: float | None
    """Standard deviation of ‖·‖ over its mean."""
    off: float | None
    """ν · √E‖·‖², the length of the activation after its factor: 1 for an exact factor."""
    error: float | None
    """Relative distance of E[1/‖·‖] from 1/√E‖·‖²: the error of the best constant in place of a norm. The paper
    tabulates it."""
    cosine: float | None
    """Mean cosine of the stream and the block's output, for interpolations; the derivation assumes 0."""


class FactorProbe(Probe):
    """Statistics of the length of each activation, by its name and layer."""

    def __init__(self) -> None:
        self.constants: dict[int, Factors] = {}
        self.plain: defaultdict[tuple[str, int], Lengths] = defaultdict(Lengths)
        self.units: defaultdict[tuple[str, int], Lengths] = defaultdict(Lengths)
        self.applied: defaultdict[tuple[str, int], Lengths] = defaultdict(Lengths)
        self.cosines: defaultdict[tuple[str, int], Lengths] = defaultdict(Lengths)

    def add(self, name: str, layer: int, plain: Tensor, unit: Tensor) -> None:
        self.plain[name, layer].add(plain)
        self.units[name, layer].add(unit)

    def linear(self, layer: int, block: Block, name: str, x: Tensor, scale: Tensor | float, y: Tensor) -> None:
        if isinstance(nu := getattr(block, "nu", None), Factors):
            self.constants[layer] = nu
        parts: tuple[Tensor, ...] = (y,)
        into, own, heads = length(x), 1.0 if isinstance(scale, Tensor) else scale, 1
        match name:
            case "W_qkv":
                parts, into = split_heads(y, block.d_head), into[:, None]  # lengths are (B, H, T)
            case "W_p":
                heads = y.shape[-1] // block.d_head
            case "W_uz":
                parts = y.chunk(2, dim=-1)
            case "W_d":
                self.plain["acf", layer].add(into / (nu.acf if isinstance(nu, Factors) else 1.0))
            case _:
                return
        for part, vectors in zip(name.removeprefix("W_"), parts, strict=True):
            plain = length(vectors) / own
            self.add(part, layer, plain, plain * math.sqrt(heads) / into)

    def attention(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.interpolation("a", layer, block, h, x)

    def mlp(self, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        self.interpolation("m", layer, block, h, x)

    def interpolation(self, part: str, layer: int, block: Block, h: Tensor, x: Tensor) -> None:
        if (scale := getattr(block, f"alpha_{part}", None)) is None:
            return
        name, h, x, alpha = f"lerp_{part}", wide(h), wide(x), scale()
        self.add(name, layer, length(lerp(h, x, alpha)), length(lerp(norm(h), x, alpha)))
        design = block.design()
        if not design.update_norm:
            nu = design.update_factor * (nu_lerp(alpha) if design.nu_alpha else 1.0)
            self.applied[name, layer].add(length(lerp(h, x, alpha, nu)))
        self.cosines[name, layer].add((norm(h) * x).sum(dim=-1))

    def results(self) -> tuple[MeasuredFactor, ...]:
        order = list(ACTIVATIONS)
        return tuple(self.result(*key) for key in sorted(self.plain, key=lambda key: (order.index(key[0]), key[1])))

    def result(self, name: str, layer: int) -> MeasuredFactor:
        key = name, layer
        plain = self.plain[key].stats()
        nu = None
        if key in self.applied:
            nu = ratio(self.applied[key].stats().rms, plain.rms)
        elif layer in self.constants and not name.startswith("lerp"):
            nu = getattr(self.constants[layer], SYMBOLS[name].removeprefix("ν_"))
        measured = ratio(1.0, plain.rms)
        excess = ratio(plain.mean_inverse, measured)
        return MeasuredFactor(
            activation=name,
            layer=layer + 1,
            nu=nu,
            measured=measured,
            unit=ratio(1.0, self.units[key].stats().rms),
            mean_inverse=plain.mean_inverse,
            variation=plain.variation,
            off=ratio(nu, measured),
            error=None if excess is None else excess - 1,
            cosine=self.cosines[key].stats().mean,
        )
