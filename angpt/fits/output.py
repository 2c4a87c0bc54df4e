"""Output of a fit: tables for the terminal, and a folder with JSON and figures."""

import dataclasses
import json
import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from angpt.errors import UserError
from angpt.fits.binned import Binned
from angpt.fits.curve_figures import isoflop_curves, parametric_law
from angpt.fits.frontier import Frontier
from angpt.fits.hparam_figures import rates, sweeps, token_trends, trends
from angpt.fits.hparams import SETTINGS, HparamFit
from angpt.fits.isoflop import IsoFlop
from angpt.fits.parametric import Parametric
from angpt.fits.plane import PlaneLaw
from angpt.fits.powerlaw import PowerLaw
from angpt.fits.saturating import Saturating
from angpt.fits.scaling import APPROACHES, QUANTITIES, Approach, ArchitectureFit, ScalingFit
from angpt.fits.scaling_figures import loss_over_compute, optimal_sizes, savings
from angpt.present.charts import Absent, Chart, write_chart
from angpt.present.tables import Table
from angpt.present.words import bracketed, label, quantity, without_html
from angpt.stats import Interval
from angpt.system import write_atomically

SHORT: dict[Approach, str] = {
    "frontier": "frontier",
    "isoflop": "IsoFLOP",
    "akima": "Akima",
    "parametric": "param.",
    "paper": "paper",
}
"""Short names of the approaches, for tables that fit a terminal."""


def write_fit(fit: HparamFit | ScalingFit, out: str | PathLike[str], made_by: str = "") -> list[str]:
    """Write hparams.json or scaling.json, the figures and their captions to the folder `out`; return a line for each.

    `made_by` is the command that repeats it.
    """
    values: dict[str, Any] = {"made_by": made_by}
    if isinstance(fit, HparamFit):
        charts = [make(fit) for make in (sweeps, rates, trends, token_trends)]
        return write_files(Path(out), "hparams", values | vars(fit), charts)
    charts = [make(fit) for make in (loss_over_compute, optimal_sizes, isoflop_curves, parametric_law, savings)]
    return write_files(Path(out), "scaling", values | scaling_values(fit), charts)


def fit_tables(fit: HparamFit | ScalingFit) -> list[Table]:
    """The tables of a fit."""
    return hparam_tables(fit) if isinstance(fit, HparamFit) else scaling_tables(fit)


def write_files(out: Path, name: str, values: dict[str, Any], charts: Sequence[Chart | Absent]) -> list[str]:
    """Write NAME.json, the figures and their captions to the folder `out`; return a line for each."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        written, captions = [], []
        for chart in charts:
            if isinstance(chart, Absent):
                written.append(f"no figure {chart.title!r}: {chart.reason}")
            else:
                write_chart(chart, out)
                captions.append(f"## {chart.title}\n\n![{chart.alt}]({chart.name}.svg)\n\n{chart.caption}\n")
                written.append(f"figure: {out / chart.name}.png, .svg, and its numbers .csv")
        write_atomically(out / f"{name}.md", without_html("\n".join(captions)))
        write_atomically(out / f"{name}.json", json.dumps(plain(values), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error}); choose another --out") from error
    return [f"numbers: {out / name}.json", f"figures with captions: {out / name}.md", *written]


def plain(value: Any) -> Any:
    """A value in the types of JSON; numbers that are not finite become null."""
    if isinstance(value, PowerLaw | PlaneLaw):
        return plain(value.summary())
    if isinstance(value, Saturating):
        return plain(value.estimates())
    if isinstance(value, Interval):
        return plain({"value": value.mean, "low": value.low, "high": value.high})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def scaling_values(fit: ScalingFit) -> dict[str, Any]:
    return vars(fit) | {"architectures": {f.architecture: _architecture_values(f) for f in fit.architectures}}


def _architecture_values(f: ArchitectureFit) -> dict[str, Any]:
    values: dict[str, Any] = {"runs": len(f.sample), "sizes": np.unique(f.sample.parameters)}
    if isinstance(f.frontier, Frontier):
        values["frontier"] = {n: v for n, v in vars(f.frontier).items() if n != "notes"}
    for name in ("isoflop", "akima"):
        if isinstance(fit := getattr(f, name), IsoFlop):
            values[name] = {n: v for n, v in vars(fit).items() if n != "notes"}
    if isinstance(f.parametric, Parametric):
        p = f.parametric
        values["parametric"] = {
            "parameters": p.parameters(),
            "exponents": {QUANTITIES[name]: p.estimate(v) for name, v in p.exponents().items()},
            "prefactors": {QUANTITIES[name]: p.estimate(v).exp() for name, v in p.log_prefactors().items()},
            "compute": {"k": p.scale[0], "gamma": p.scale[1]},
            "huber_delta": p.delta,
            "deviation_of_log": p.deviation,
            "points": p.points,
            "bootstrap_samples": len(p.theta) - 1,
            "starts_that_agree": p.agreeing,
            "starts": p.tried,
        }
    if isinstance(f.paper, Binned):
        values["paper"] = {n: getattr(f.paper, n) for n in ("loss", "parameters", "tokens", "runs", "alone", "design")}
    for name in APPROACHES:
        if isinstance(reason := getattr(f, name), str):
            values[name] = {"none": reason}
    return values


def estimate_text(value: Interval | None, form: str = ".4f") -> str:
    """An estimate with its interval, 0.4663 [0.4512, 0.4801]; 0 below 1e-12; empty for None."""
    if value is None:
        return ""
    if abs(value.mean) < 1e-12:
        value = dataclasses.replace(value, mean=0.0)
    return bracketed(value, form) + (" (no interval)" if value.low is None else "")


def hparam_tables(fit: HparamFit) -> list[Table]:
    """Best learning rates and batch sizes, each with its prediction from the others, and the laws."""
    checked = "from the others ÷ found"
    trends = {t.architecture: t for t in fit.trends}
    rates, batches = [], []
    for s in fit.sizes:
        model = f"{label(s.architecture)} {quantity(s.parameters)}", quantity(s.tokens)
        trend = trends.get(s.architecture)
        settings = {"parameters": s.parameters, "tokens": s.tokens}
        for sweep in s.sweeps:
            found = ("none", "", "")
            if (m := sweep.minimum) is not None:
                check = trend.lr.check({**settings, "batch_tokens": sweep.batch_tokens}) if trend else None
                found = f"{m.lr:.4g}", f"{m.loss:.4f}", estimate_text(check, ".2f")
            rates.append((*model, quantity(sweep.batch_tokens), *found))
        if (o := s.optimum) is not None:
            check = trend.batch_tokens.check(settings) if trend and trend.batch_tokens else None
            cells = f"{o.batch_tokens:,.0f}", f"{o.lr:.4g}", f"{o.loss:.4f}", estimate_text(check, ".2f")
            batches.append((*model, *cells))
    laws = [
        (f"{label(t.architecture)} {what}*({', '.join(SETTINGS[name] for name in exponents)})",
         *(estimate_text(exponents.get(name), ".3f") for name in SETTINGS), str(len(fitted.points)))
        for t in fit.trends
        for what, fitted in (("lr", t.lr), ("B", t.batch_tokens))
        if fitted is not None
        for exponents in [fitted.law.exponents]
    ]  # fmt: skip
    title = "Laws over parameters N, tokens D and tokens per step B: exponents with 95 % intervals"
    tables = (
        Table(("model", "tokens", "batch tokens", "best rate", "loss", checked), rates, "Best learning rates"),
        Table(("model", "tokens", "best batch", "rate", "loss", checked), batches, "Best batch sizes"),
        Table(("law", "exponent of N", "exponent of D", "exponent of B", "n"), laws, title),
    )
    return [table for table in tables if table.rows]


def scaling_tables(fit: ScalingFit) -> list[Table]:
    """Exponents by each approach, laws with an irreducible loss, and the comparison."""
    laws = [
        (f"{label(f.architecture)} {e.quantity}", short, estimate_text(e.prefactor, ".3g"), estimate_text(e.exponent),
         str(e.points))
        for f in fit.architectures
        for approach, short in SHORT.items()
        for name in QUANTITIES
        if (e := f.estimate(approach, name)) is not None
    ]  # fmt: skip
    values = [f.parametric.parameters() if isinstance(f.parametric, Parametric) else {} for f in fit.architectures]
    parametric = [
        (name, *(estimate_text(p[name], ".5g") if p else "none" for p in values))
        for name in next((list(p) for p in values if p), ())
    ]
    saturating = [
        (f"{label(f.architecture)}", short, *(estimate_text(e, ".3g") for e in found.estimates().values()))
        for f in fit.architectures
        for approach, short in SHORT.items()
        if isinstance(found := getattr(getattr(f, approach), "saturating", None), Saturating)
    ]
    columns = ("law", "by", "prefactor", "exponent", "n")
    names = [label(f.architecture) for f in fit.architectures]
    tables = [
        Table(columns, laws, "Power laws of the compute C, with 95 % intervals"),
        Table(("", "by", "E", "C₀", "α"), saturating, "L(C) = E + (C₀/C)ᵅ, with 95 % intervals"),
        Table(("", *names), parametric, "L = E + A/Nᵃ + B/Dᵇ, with 95 % intervals"),
        *(_comparison_tables(fit) if fit.comparisons else ()),
    ]
    return [table for table in tables if table.rows]


def _comparison_tables(fit: ScalingFit) -> list[Table]:
    base = label(fit.comparisons[0].baseline)
    exponents, savings = [], []
    for c in fit.comparisons:
        name, short = label(c.other), SHORT[c.approach]
        for e in c.exponents:
            d = e.difference
            differ = "unknown"
            if d.estimate.low is not None and d.p_value is not None:
                differ = f"{'no' if d.estimate.covers(0.0) else 'yes'} (p {d.p_value:.2g})"
            cells = f"{e.baseline:.4f}", f"{e.other:.4f}", estimate_text(d.estimate, "+.4f"), differ
            exponents.append((f"{name} {e.quantity}", short, *(cell.replace("-", "−") for cell in cells)))
        for s in c.savings:
            saved = f"{100 * (1 - s.factor.mean):.0f} %".replace("-", "−")
            savings.append((name, short, f"{s.loss:.3f}", estimate_text(s.factor, ".3f"), saved))
        if c.problem:
            savings.append((name, short, "", c.problem, ""))
    columns = ("law", "by", base, "other", "difference", "differ?")
    return [
        Table(columns, exponents, f"Do the exponents differ from those of {base}?"),
        Table(("", "by", "at loss", "ratio", "saved"), savings, f"Compute relative to {base} at equal loss"),
    ]
