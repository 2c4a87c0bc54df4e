"""What the paper claims about its models, and whether that holds for the runs at hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from angpt.analysis import paper
from angpt.analysis.analyse import Analysis
from angpt.analysis.factors import ACTIVATIONS, MeasuredFactor
from angpt.analysis.learned import Learned
from angpt.analysis.moments import Moments
from angpt.analysis.norms import Norms
from angpt.analysis.robustness import Robustness
from angpt.present.tables import Strong, Table
from angpt.present.words import number, percent, span
from angpt.stats import correlation

ORDER_ONE = 3.0
"""A length is of order 1 if it lies within this factor of it."""
BLOCK_MATRICES = ("W_qkv", "W_p", "W_uz", "W_d")


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and what was measured."""

    paper: str
    here: str
    holds: bool
    """True by the criterion that the text states."""


def claims(analysis: Analysis) -> list[Claim]:
    """The claims for which there are runs."""
    found = []
    for judge, part, architectures in CLAIMS:
        measured = [measured_of(analysis, name, part) for name in architectures]
        if None not in measured and (claim := judge(*measured)) is not None:
            found.append(claim)
    return found


def claims_table(found: Sequence[Claim], title: str = "") -> Table:
    rows = [(claim.paper, claim.here, "yes" if claim.holds else Strong("no")) for claim in found]
    return Table(("the paper", "here", "holds"), rows, title, prose=True)


def measured_of(analysis: Analysis, name: str, part: str) -> Any:
    """What was measured of the first run of an architecture, one with warm-up where there are both; None without one.

    The name `gpt+ without warm-up` takes those without alone.
    """
    architecture, _, without = name.partition(" ")
    found = [run for run in analysis.runs if run.architecture == architecture and getattr(run, part)]
    found = [run for run in found if not without or without in run.label]
    return getattr(min(found, key=lambda run: "without" in run.label), part) if found else None


def stream_means(norms: Norms) -> list[float]:
    return [s.mean or 0.0 for s in norms.stream]


def depth(gpt: Norms) -> Claim:
    means = stream_means(gpt)
    growth = means[-1] / means[0] if means[0] else 0.0
    return Claim(
        "The residual norm of GPT+ grows with depth (holds if it at least doubles).",
        f"From {number(means[0])} into the first layer to {number(means[-1])} after the last, {number(growth)} times.",
        growth >= 2,
    )


def order_one(angpt: Norms) -> Claim:
    means = stream_means(angpt)
    return Claim(
        f"That of anGPT stays of order 1 (within a factor of {ORDER_ONE:g}; the paper's mean is 2.48).",
        f"{span(means)} over the layers.",
        all(1 / ORDER_ONE <= mean <= ORDER_ONE for mean in means),
    )


def sphere(ngpt: Norms) -> Claim:
    means = stream_means(ngpt)
    return Claim(
        "nGPT eliminates the growth altogether (length 1 to 1 %).",
        f"{span(means)} over the layers.",
        all(abs(mean - 1) < 0.01 for mean in means),
    )


def ratios(angpt: Norms, gpt: Norms) -> Claim:
    spreads = [[b.maps for b in (*norms.attention, *norms.mlp) if b.maps] for norms in (angpt, gpt)]
    wide = [max(s) / min(s) if s else 0.0 for s in spreads]
    names = ("angpt", "gpt+")
    low = {name: min(v[name] for v in paper.RATIOS.values()) for name in names}
    high = {name: max(v[name] for v in paper.RATIOS.values()) for name in names}
    return Claim(
        "Output over input norm of the blocks is near 1 in anGPT "
        f"({low['angpt']:.2f} to {high['angpt']:.2f}) and varies widely in GPT+ ({low['gpt+']:.2f} to "
        f"{high['gpt+']:.2f}; holds if the highest is further from the lowest in GPT+).",
        f"anGPT {span(list(spreads[0]))}, GPT+ {span(list(spreads[1]))}.",
        wide[1] > wide[0],
    )


def gamma(gpt: Norms) -> Claim | None:
    if "norm_a" not in gpt.gamma or len(gpt.attention) < 3:
        return None
    found = correlation(gpt.gamma["norm_a"], stream_means(gpt)[:-1])
    return Claim(
        "γ of GPT+ grows with the norm of the stream, slightly (correlation over layers above 0).",
        f"γ_a: correlation {number(found, 2)}.",
        found is not None and found > 0,
    )


def rows(angpt: Norms) -> Claim:
    means = [r.mean for r in angpt.rows]
    return Claim(
        "Despite the bound, rows of anGPT's weights stay close to length 1 (means above 0.9).",
        f"Means over rows {span(list(means))}.",
        min(means) > 0.9,
    )


def alpha(angpt: Learned) -> Claim | None:
    if not angpt.alpha:
        return None
    spreads = [s for found in angpt.alpha.values() for s in found]
    start = angpt.alpha_start or 0.0
    low, high = paper.ALPHA
    return Claim(
        f"α rises from 0.05 to between {low} and {high} (holds if |α| exceeds its start in every layer).",
        f"From {start:g}; mean |α| {span([s.size for s in spreads])}, mean α {span([s.mean for s in spreads])}.",
        all(s.size > start for s in spreads),
    )


def errors(angpt: Sequence[MeasuredFactor]) -> Claim | None:
    worst = max((f for f in angpt if f.error is not None), key=lambda f: f.error or 0.0, default=None)
    off = [f.off for f in angpt if f.off is not None and f.activation.startswith("lerp")]
    if worst is None:
        return None
    where = f"{ACTIVATIONS[worst.activation]}, layer {worst.layer}"
    return Claim(
        "A constant in place of the norm errs by less than 2 %.",
        f"Up to {percent(worst.error)} ({where}); ν(α)·√E‖·‖² is {span(off)}.",
        (worst.error or 0.0) < 0.02,
    )


def early(angpt: Moments, gpt: Moments) -> Claim:
    mine, theirs = (_mean([g.early for g in m.groups if g.group in BLOCK_MATRICES]) for m in (angpt, gpt))
    return Claim(
        "Adam's first moment is calm at the start in anGPT, while GPT+ spikes despite warm-up (holds if less of the "
        "variance falls on the first tenth of training, mean over the block matrices).",
        f"anGPT {percent(mine)}, GPT+ {percent(theirs)}.",
        mine < theirs,
    )


def warmup(gpt: Moments, without: Moments) -> Claim | None:
    if gpt is without:
        return None
    mine, theirs = (_mean([g.peak for g in m.groups if g.group in BLOCK_MATRICES]) for m in (without, gpt))
    return Claim(
        "Without warm-up the peaks of GPT+ are stronger (highest relative variance, mean over the block matrices).",
        f"{number(mine)} times the mean over training without, {number(theirs)} with.",
        mine > theirs,
    )


def shift(gpt: Robustness, angpt: Robustness) -> Claim | None:
    theirs, mine = (next((s.change for s in r.shifts if s.name == "same token"), None) for r in (gpt, angpt))
    if theirs is None or mine is None:
        return None
    return Claim(
        "On one token repeated, the residual norm changes 3.4-fold in GPT+ and 1.5-fold in anGPT (holds if less in "
        "anGPT).",
        f"{number(theirs)}-fold and {number(mine)}-fold.",
        mine < theirs,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


CLAIMS: tuple[tuple[Callable[..., Claim | None], str, tuple[str, ...]], ...] = (
    (depth, "norms", ("gpt+",)),
    (order_one, "norms", ("angpt",)),
    (sphere, "norms", ("ngpt",)),
    (ratios, "norms", ("angpt", "gpt+")),
    (gamma, "norms", ("gpt+",)),
    (rows, "norms", ("angpt",)),
    (alpha, "learned", ("angpt",)),
    (errors, "factors", ("angpt",)),
    (early, "moments", ("angpt", "gpt+")),
    (warmup, "moments", ("gpt+", "gpt+ without warm-up")),
    (shift, "robustness", ("gpt+", "angpt")),
)
"""What judges a claim, and what it takes: a part of the analysis, of these architectures."""
