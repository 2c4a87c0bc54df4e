"""Claims of the paper about its models, each judged by the measurements of an analysis."""

import statistics
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
"""A length is of order 1 if it is within this factor of 1."""
BLOCK_MATRICES = ("W_qkv", "W_p", "W_uz", "W_d")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and what was measured."""

    paper: str
    here: str
    holds: bool
    """True if the measurement meets the criterion that the text states."""


def claims(analysis: Analysis) -> list[Claim]:
    """The claims for which the necessary runs were measured."""
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
    """One part of the first run of an architecture, preferably with warm-up; None if there is no such run.

    `gpt+ without warm-up` selects runs without warm-up only.
    """
    architecture, _, without = name.partition(" ")
    found = [run for run in analysis.runs if run.architecture == architecture and getattr(run, part)]
    found = [run for run in found if without in run.label]
    return getattr(min(found, key=lambda run: "without" in run.label), part) if found else None


def stream_means(norms: Norms) -> list[float]:
    return [s.mean or 0.0 for s in norms.stream]


def depth(gpt: Norms) -> Claim:
    means = stream_means(gpt)
    first, last = means[0], means[-1]
    growth = last / first if first else 0.0
    text = "The residual norm of GPT+ grows with depth (holds if it at least doubles)."
    here = f"From {number(first)} into the first layer to {number(last)} after the last, {number(growth)} times."
    return Claim(text, here, growth >= 2)


def order_one(angpt: Norms) -> Claim:
    means = stream_means(angpt)
    text = f"The residual norm of anGPT stays of order 1 (within a factor of {ORDER_ONE:g}; the paper's mean is 2.48)."
    here = f"{span(means)} over the layers."
    return Claim(text, here, all(1 / ORDER_ONE <= mean <= ORDER_ONE for mean in means))


def sphere(ngpt: Norms) -> Claim:
    means = stream_means(ngpt)
    text = "The residual norm of nGPT does not grow at all (length 1 to within 1 %)."
    here = f"{span(means)} over the layers."
    return Claim(text, here, all(abs(mean - 1) < 0.01 for mean in means))


def ratios(angpt: Norms, gpt: Norms) -> Claim:
    mine, theirs = ([b.maps for b in (*norms.attention, *norms.mlp) if b.maps] for norms in (angpt, gpt))
    spreads = [max(values) / min(values) if values else 0.0 for values in (mine, theirs)]
    columns = {name: [block[name] for block in paper.RATIOS.values()] for name in ("angpt", "gpt+")}
    of_paper = {name: f"{min(values):.2f} to {max(values):.2f}" for name, values in columns.items()}
    return Claim(
        f"Output over input norm of the blocks is near 1 in anGPT ({of_paper['angpt']}) and varies widely in GPT+ "
        f"({of_paper['gpt+']}; holds if highest over lowest is larger in GPT+).",
        f"anGPT {span(mine)}, GPT+ {span(theirs)}.",
        spreads[1] > spreads[0],
    )


def gamma(gpt: Norms) -> Claim | None:
    if "norm_a" not in gpt.gamma or len(gpt.attention) < 3:
        return None
    found = correlation(gpt.gamma["norm_a"], stream_means(gpt)[:-1])
    text = "γ of GPT+ grows slightly with the norm of the stream (correlation over layers above 0)."
    here = f"γ_a: correlation {number(found, 2)}."
    return Claim(text, here, found is not None and found > 0)


def rows(angpt: Norms) -> Claim:
    means = [r.mean for r in angpt.rows]
    text = "Although only bounded, rows of anGPT's weights stay close to length 1 (means above 0.9)."
    here = f"Means over rows {span(means)}."
    return Claim(text, here, min(means) > 0.9)


def alpha(angpt: Learned) -> Claim | None:
    if not angpt.alpha:
        return None
    spreads, start = [s for found in angpt.alpha.values() for s in found], angpt.alpha_start or 0.0
    low, high = paper.ALPHA
    text = f"α rises from 0.05 to between {low} and {high} (holds if |α| exceeds its start in every layer)."
    here = f"From {start:g}; mean |α| {span([s.size for s in spreads])}, mean α {span([s.mean for s in spreads])}."
    return Claim(text, here, all(s.size > start for s in spreads))


def errors(angpt: Sequence[MeasuredFactor]) -> Claim | None:
    worst = max((f for f in angpt if f.error is not None), key=lambda f: f.error or 0.0, default=None)
    if worst is None:
        return None
    off = span([f.off for f in angpt if f.activation.startswith("lerp")])
    text = "The error of a constant in place of the norm is below 2 %."
    here = f"Up to {percent(worst.error)} ({ACTIVATIONS[worst.activation]}, layer {worst.layer}); ν(α)·√E‖·‖² is {off}."
    return Claim(text, here, (worst.error or 0.0) < 0.02)


def early(angpt: Moments, gpt: Moments) -> Claim:
    mine, theirs = _block_mean(angpt, "early"), _block_mean(gpt, "early")
    return Claim(
        "Adam's first moment is small at the start in anGPT, while GPT+ spikes despite warm-up (holds if the first "
        "tenth of training has a smaller share of the variance, mean over the block matrices).",
        f"anGPT {percent(mine)}, GPT+ {percent(theirs)}.",
        mine < theirs,
    )


def warmup(gpt: Moments, without: Moments) -> Claim | None:
    if gpt is without:
        return None
    mine, theirs = _block_mean(without, "peak"), _block_mean(gpt, "peak")
    text = "Without warm-up the peaks of GPT+ are higher (highest relative variance, mean over the block matrices)."
    here = f"{number(mine)} times the mean over training without, {number(theirs)} with."
    return Claim(text, here, mine > theirs)


def shift(gpt: Robustness, angpt: Robustness) -> Claim | None:
    theirs, mine = (next((s.change for s in r.shifts if s.name == "same token"), None) for r in (gpt, angpt))
    if theirs is None or mine is None:
        return None
    text = "On a repeated token the residual norm changes 3.4-fold in GPT+, 1.5-fold in anGPT (holds if less in anGPT)."
    here = f"{number(theirs)}-fold and {number(mine)}-fold."
    return Claim(text, here, mine < theirs)


def _block_mean(moments: Moments, field: str) -> float:
    return statistics.fmean(getattr(g, field) for g in moments.groups if g.group in BLOCK_MATRICES)


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
"""For each claim, the function that judges it, the part that it needs, and the architectures."""
