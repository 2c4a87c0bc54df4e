"""Claims of the paper about its models, each judged by the measurements of an analysis."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from angpt.analysis import paper
from angpt.analysis.analyse import Analysis
from angpt.analysis.factors import ACTIVATIONS, MeasuredFactor
from angpt.analysis.learned import Learned
from angpt.analysis.moments import EARLY, Moments
from angpt.analysis.norms import Norms
from angpt.analysis.robustness import Robustness
from angpt.present.tables import Strong, Table
from angpt.present.words import number, percent, span
from angpt.stats import correlation

ORDER_ONE = 3.0
"""A length is of order 1 if it is within this factor of 1; that of the paper, 2.48, is."""
NEAR_ONE = 2.0
"""A ratio is near 1 if it is within this factor of 1; those of the paper for anGPT, up to 1.86, are."""
BLOCK_MATRICES = ("W_qkv", "W_p", "W_uz", "W_d")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the test that decides whether it holds here, and what was measured."""

    paper: str
    """The claim, with the numbers of the paper."""
    test: str
    """What must be measured for the claim to hold."""
    here: str
    holds: bool


def claims(analysis: Analysis) -> list[Claim]:
    """The claims for which the necessary runs were measured."""
    found = []
    for judge, part, architectures in CLAIMS:
        measured = [measured_of(analysis, name, part) for name in architectures]
        if None not in measured and (claim := judge(*measured)) is not None:
            found.append(claim)
    return found


def claims_table(found: Sequence[Claim], title: str = "") -> Table:
    rows = [(c.paper, c.test, c.here, "yes" if c.holds else Strong("no")) for c in found]
    return Table(("the paper", "holds if", "here", "holds"), rows, title, prose=True)


def measured_of(analysis: Analysis, name: str, part: str) -> Any:
    """One part of the first run of an architecture with Adam, as in the paper, preferably with warm-up; None if there
    is no such run.

    `gpt+ without warm-up` selects runs without warm-up only.
    """
    architecture, _, without = name.partition(" ")
    found = [run for run in analysis.runs if run.architecture == architecture and getattr(run, part)]
    found = [run for run in found if without in run.label]
    return getattr(min(found, key=lambda run: "without" in run.label), part) if found else None


def stream_means(norms: Norms) -> list[float] | None:
    """None if a length overflowed, as in a run that diverged: that decides no claim."""
    means = [s.mean for s in norms.stream if s.mean is not None]
    return means if len(means) == len(norms.stream) else None


def within(values: Sequence[float], factor: float) -> bool:
    """True if there are values, and all are within a factor of 1."""
    return bool(values) and all(1 / factor <= value <= factor for value in values)


def depth(gpt: Norms) -> Claim | None:
    if (means := stream_means(gpt)) is None:
        return None
    first, last = means[0], means[-1]
    growth = last / first if first else 0.0
    return Claim(
        "The residual norm of GPT+ grows with depth.",
        "it at least doubles from the first layer to the end",
        f"From {number(first)} into the first layer to {number(last)} after the last, {number(growth)} times.",
        growth >= 2,
    )


def order_one(angpt: Norms) -> Claim | None:
    if (means := stream_means(angpt)) is None:
        return None
    return Claim(
        "The residual norm of anGPT stays of order 1 (2.48 on average).",
        f"every layer is within a factor of {ORDER_ONE:g} of 1",
        f"{span(means)} over the layers.",
        within(means, ORDER_ONE),
    )


def sphere(ngpt: Norms) -> Claim | None:
    if (means := stream_means(ngpt)) is None:
        return None
    return Claim(
        "The residual norm of nGPT does not grow at all.",
        "every layer is within 1 % of 1",
        f"{span(means)} over the layers.",
        all(abs(mean - 1) < 0.01 for mean in means),
    )


def ratios(angpt: Norms, gpt: Norms) -> Claim:
    mine, theirs = ([b.maps for b in (*norms.attention, *norms.mlp) if b.maps] for norms in (angpt, gpt))
    columns = {name: [block[name] for block in paper.RATIOS.values()] for name in ("angpt", "gpt+")}
    of_paper = {name: f"{min(values):.2f} to {max(values):.2f}" for name, values in columns.items()}
    return Claim(
        f"Output over input norm of the blocks is near 1 in anGPT ({of_paper['angpt']}) and varies widely in GPT+ "
        f"({of_paper['gpt+']}).",
        f"every block of anGPT is within a factor of {NEAR_ONE:g} of 1, and not every block of GPT+",
        f"anGPT {span(mine)}, GPT+ {span(theirs)}.",
        within(mine, NEAR_ONE) and not within(theirs, NEAR_ONE),
    )


def gamma(gpt: Norms) -> Claim | None:
    means = stream_means(gpt)
    if "norm_a" not in gpt.gamma or len(gpt.attention) < 3 or means is None:
        return None
    found = correlation(gpt.gamma["norm_a"], means[:-1])
    return Claim(
        "γ of GPT+ grows slightly with the norm of the stream.",
        "the correlation of γ_a, that before attention, with it over layers is above 0.5",
        f"γ_a: correlation {number(found, 2)} over {len(gpt.attention)} layers.",
        found is not None and found > 0.5,
    )


def rows(angpt: Norms) -> Claim:
    means = [r.mean for r in angpt.rows]
    return Claim(
        "Although only bounded, rows of anGPT's weights stay close to length 1.",
        "the mean over the rows of every matrix is above 0.9",
        f"Means over rows {span(means)}.",
        min(means) > 0.9,
    )


def alpha(angpt: Learned) -> Claim | None:
    if not angpt.alpha:
        return None
    spreads, start = [s for found in angpt.alpha.values() for s in found], angpt.alpha_start or 0.0
    low, high = paper.ALPHA
    return Claim(
        f"α rises from 0.05 to between {low} and {high}.",
        f"the mean α of every block is between {low} and {high}",
        f"From {start:g} to means of {span([s.mean for s in spreads])}; of |α|, {span([s.size for s in spreads])}.",
        all(low <= s.mean <= high for s in spreads),
    )


def errors(angpt: Sequence[MeasuredFactor]) -> Claim | None:
    worst = max((f for f in angpt if f.error is not None), key=lambda f: f.error or 0.0, default=None)
    if worst is None:
        return None
    off = span([f.off for f in angpt if f.activation.startswith("lerp")])
    return Claim(
        "The error of a constant in place of the norm is below 2 %.",
        "it is below 2 % for every activation and layer",
        f"Up to {percent(worst.error)} ({ACTIVATIONS[worst.activation]}, layer {worst.layer}); ν(α)·√E‖·‖² is {off}.",
        (worst.error or 0.0) < 0.02,
    )


def early(angpt: Moments, gpt: Moments) -> Claim:
    # A variance that is constant has as large a share of its sum in the first tenth of training.
    mine, theirs = _block_mean(angpt, "early"), _block_mean(gpt, "early")
    return Claim(
        "Adam's first moment is small at the start in anGPT, while GPT+ spikes despite warm-up.",
        f"the first tenth of training has less than {percent(EARLY, 0)} of the variance in anGPT and more than "
        f"{percent(2 * EARLY, 0)} in GPT+ (mean over the block matrices)",
        f"anGPT {percent(mine)}, GPT+ {percent(theirs)}.",
        mine < EARLY and theirs > 2 * EARLY,
    )


def warmup(gpt: Moments, without: Moments) -> Claim | None:
    if gpt is without:
        return None
    mine, theirs = _block_mean(without, "peak"), _block_mean(gpt, "peak")
    return Claim(
        "Without warm-up the peaks of Adam's first moment in GPT+ are higher.",
        "the highest variance over its mean is at least 10 % higher without (mean over the block matrices)",
        f"{number(mine)} times the mean over training without, {number(theirs)} with.",
        mine >= 1.1 * theirs,
    )


def shift(gpt: Robustness, angpt: Robustness) -> Claim | None:
    theirs, mine = (next((s.change for s in r.shifts if s.name == "same token"), None) for r in (gpt, angpt))
    if theirs is None or mine is None:
        return None
    return Claim(
        "On a repeated token the residual norm changes 3.4-fold in GPT+, 1.5-fold in anGPT.",
        f"it changes more than {NEAR_ONE:g}-fold in GPT+ and less in anGPT",
        f"{number(theirs)}-fold and {number(mine)}-fold.",
        mine < NEAR_ONE < theirs,
    )


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
