"""Tables of `angpt factors`: each ν against a Monte-Carlo estimate, and whether the function depends on it."""

import dataclasses
import math
from pathlib import Path

import torch

from angpt.config import ModelConfig
from angpt.models import factors
from angpt.models.angpt import AnGPT, AnGPTBlock
from angpt.models.factors import Estimate, Factors, LerpFactor
from angpt.present.tables import Table

ALPHA = 0.05
INPUTS = 512


@dataclasses.dataclass(frozen=True)
class Row:
    """One factor: its value, a Monte-Carlo estimate, and the relative change of the logits when it is tripled."""

    symbol: str
    formula: str
    value: float
    estimate: Estimate
    effect: float

    @property
    def matters(self) -> bool:
        """True if the function depends on the factor by more than float64 rounding."""
        return self.effect > 1e-9

    @property
    def error(self) -> float:
        """Relative distance of E[1/‖·‖] from ν: the error that the paper's appendix tabulates."""
        return abs(self.estimate.mean_inverse / self.value - 1)


def factor_rows(cfg: ModelConfig, draws: int, seed: int) -> list[Row]:
    """Every factor of a model of this shape. ν_acf is estimated for SiLU(z) with z on the unit sphere."""
    rng = torch.Generator().manual_seed(seed)
    d, h, f = cfg.d_model, cfg.d_head, cfg.d_mlp
    nu, effects = factors.constants(cfg), function_effects()

    def linear(symbol: str, formula: str, name: str, d_in: int, d_out: int) -> Row:
        found = factors.estimate(factors.linear_sample(d_in, d_out, INPUTS, rng), draws)
        return Row(symbol, formula, getattr(nu, name), found, effects[name])

    nu_lerp = float(factors.nu_lerp(torch.tensor(ALPHA, dtype=torch.float64)))
    lerp_sample = factors.lerp_sample(d, ALPHA, INPUTS, rng)
    return [
        linear("ν_qkv", "√(d_m/d_h)", "qkv", d, h),
        linear("ν_p", "√(d_h/d_m)", "p", h, d),
        linear("ν_uz", "√(d_m/d_f)", "uz", d, f),
        linear("ν_d", "√(d_f/d_m)", "d", f, d),
        Row("ν_acf", "quoted", nu.acf, activation(f, "SiLU(z), z on the unit sphere", draws, rng), effects["acf"]),
        Row("ν(α)", "1/√(α²+(1−α)²)", nu_lerp, factors.estimate(lerp_sample, draws), effects["lerp"]),
    ]


def activation(d: int, assumption: str, draws: int, rng: torch.Generator) -> Estimate:
    """The factor of the activation function under one of `ACTIVATION_ASSUMPTIONS`."""
    return factors.estimate(lambda: factors.ACTIVATION_ASSUMPTIONS[assumption](d, INPUTS, rng), draws)


def function_effects() -> dict[str, float]:
    """For each factor, the relative change of the logits of a small float64 model when it is tripled."""
    cfg = ModelConfig(d_model=32, n_layers=2, n_heads=2, vocab_size=64, context=16)
    tokens = torch.randint(cfg.vocab_size, (2, cfg.context), generator=torch.Generator().manual_seed(0))

    def logits(nu: Factors, residual: float) -> torch.Tensor:
        class Block(AnGPTBlock):
            def constants(self, cfg: ModelConfig) -> Factors:
                return nu

            def residual_factor(self) -> LerpFactor:
                return LerpFactor(times=residual)

        model = type("Probe", (AnGPT,), {"Block": Block})(cfg).double()
        model.init_weights(torch.Generator().manual_seed(0))
        with torch.no_grad():
            return model(tokens)

    nu = factors.constants(cfg)
    base = logits(nu, 1.0)
    tripled = {
        name: logits(dataclasses.replace(nu, **{name: 3 * value}), 1.0)
        for name, value in dataclasses.asdict(nu).items()
    }
    tripled["lerp"] = logits(nu, 3.0)
    return {name: float((new - base).norm() / base.norm()) for name, new in tripled.items()}


def factor_tables(cfg: ModelConfig, draws: int, seed: int) -> list[Table]:
    """The factors of a model of this shape, and ν_acf under several assumptions."""
    rows = [
        (
            row.symbol,
            row.formula,
            *(f"{value:.4f}" for value in (row.value, row.estimate.nu, row.estimate.mean_inverse)),
            *(f"{100 * value:.2f}" for value in (row.error, row.estimate.variation)),
            f"{'yes' if row.matters else 'no'} {row.effect:.0e}",
        )
        for row in factor_rows(cfg, draws, seed)
    ]
    main = Table(
        ("factor", "formula", "ν", "1/√E‖·‖²", "E[1/‖·‖]", "error", "spread", "matters"),
        rows,
        title=f"Normalizing factors at d_m = {cfg.d_model:,}, d_h = {cfg.d_head}, d_f = {cfg.d_mlp:,}",
        note=f"error: of ν against E[1/‖·‖], as in the paper's appendix (α = {ALPHA:g}).\n"
        "spread: std/mean of ‖·‖. Both in %.\n"
        "matters: relative change of the logits when the factor is tripled (float64).\n"
        "A factor directly followed by a norm cannot change the function.",
        left=(0, 1, 7),
    )
    rng = torch.Generator().manual_seed(seed)
    found = {name: activation(cfg.d_mlp, name, max(1, draws // 4), rng) for name in factors.ACTIVATION_ASSUMPTIONS}
    assumptions = Table(
        ("assumption", "1/√E‖·‖²", "spread %"),
        [(name, f"{e.nu:.3f}", f"{100 * e.variation:.2f}") for name, e in found.items()],
        title=f"ν_acf ({cfg.nu_acf:g} in the paper) under several assumptions, d = d_f",
    )
    return [main, assumptions]


def draw_concentration(path: Path, seed: int) -> None:
    """Draw the spread of ‖W x‖ · ν around 1 as the dimension grows, for a square map and for the interpolation."""
    from angpt.present.style import DEPTH, FURTHER, INK, label_axis, panels, styled

    rng = torch.Generator().manual_seed(seed)
    dimensions = [2**k for k in range(2, 13)]
    with styled():
        figure, (density, spread) = panels(2, narrow=False, columns=2, height=3.6)
        for d, shade in zip((16, 64, 256, 1024), (0.0, 0.33, 0.67, 1.0), strict=True):
            lengths = torch.cat([factors.linear_sample(d, d, 512, rng)().norm(dim=-1) for _ in range(16)])
            density.hist(lengths.numpy(), 60, density=True, histtype="step", color=DEPTH(shade), label=f"d = {d:,}")
        density.set(xlabel="‖W x‖ · ν", ylabel="density", title="Length after a linear map, unit rows and input")
        linear = [factors.estimate(factors.linear_sample(d, d, 256, rng), 8).variation for d in dimensions]
        lerp = [factors.estimate(factors.lerp_sample(d, 0.5, 256, rng), 8).variation for d in dimensions]
        spread.loglog(dimensions, linear, "o-", color=FURTHER[0], label="linear map W x")
        spread.loglog(dimensions, lerp, "s-", color=FURTHER[1], label="interpolation, α = 0.5")
        spread.loglog(dimensions, [1 / math.sqrt(2 * d) for d in dimensions], ":", color=INK, label="1/√(2d)")
        spread.set(xlabel="dimension d", ylabel="std/mean of the length", title="The length concentrates like 1/√d")
        label_axis(spread.xaxis, "{:,.0f}".format, dimensions[::2])
        label_axis(spread.yaxis, "{:g}".format, (0.01, 0.02, 0.05, 0.1, 0.2, 0.4))
        for ax in (density, spread):
            ax.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
