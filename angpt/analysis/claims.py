"""What the paper says about the inside of its models, and whether it holds for the runs at hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from angpt.analysis import paper
from angpt.analysis.analyse import Analysis, RunAnalysis
from angpt.analysis.factors import ACTIVATIONS
from angpt.analysis.tables import number, percent, span
from angpt.present.tables import Strong, Table
from angpt.stats import correlation

ORDER_ONE = 3.0
"""A length is of order 1 if it lies within this factor of it."""


@dataclass(frozen=True)
class Claim:
    paper: str
    here: str
    holds: bool
    """By the criterion that stands in the text."""


def claims(analysis: Analysis) -> list[Claim]:
    """Those that there are runs for."""
    makers: tuple[Callable[[Analysis], Claim | None], ...] = (
        depth, order_one, sphere, ratios, gamma, rows, alpha, errors, early, warmup, shift,
    )  # fmt: skip
    return [claim for make in makers if (claim := make(analysis)) is not None]


def claims_table(found: Sequence[Claim], title: str = "") -> Table:
    rows = [(claim.paper, claim.here, "yes" if claim.holds else Strong("no")) for claim in found]
    return Table(("the paper", "here", "holds"), rows, title, prose=True)


def run_of(analysis: Analysis, architecture: str, needs: str) -> RunAnalysis | None:
    """The first run of an architecture that has been measured so; GPT+ with its warm-up, where there are both."""
    found = [run for run in analysis.runs if run.architecture == architecture and getattr(run, needs)]
    return min(found, key=lambda run: "without" in run.label, default=None)


def depth(analysis: Analysis) -> Claim | None:
    run = run_of(analysis, "gpt+", "norms")
    if run is None or run.norms is None:
        return None
    means = [s.mean or 0.0 for s in run.norms.stream]
    growth = means[-1] / means[0] if means[0] else 0.0
    return Claim(
        "The residual norm of GPT+ grows with depth (holds if it at least doubles).",
        f"From {number(means[0])} into the first layer to {number(means[-1])} after the last, {number(growth)} times.",
        growth >= 2,
    )


def order_one(analysis: Analysis) -> Claim | None:
    run = run_of(analysis, "angpt", "norms")
    if run is None or run.norms is None:
        return None
    means = [s.mean or 0.0 for s in run.norms.stream]
    return Claim(
        f"That of anGPT stays of order 1 (within a factor of {ORDER_ONE:g}; the paper's mean is 2.48).",
        f"{span(means)} over the layers.",
        all(1 / ORDER_ONE <= mean <= ORDER_ONE for mean in means),
    )


def sphere(analysis: Analysis) -> Claim | None:
    run = run_of(analysis, "ngpt", "norms")
    if run is None or run.norms is None:
        return None
    means = [s.mean or 0.0 for s in run.norms.stream]
    return Claim(
        "nGPT eliminates the growth altogether (length 1 to 1 %).",
        f"{span(means)} over the layers.",
        all(abs(mean - 1) < 0.01 for mean in means),
    )


def ratios(analysis: Analysis) -> Claim | None:
    one, two = run_of(analysis, "angpt", "norms"), run_of(analysis, "gpt+", "norms")
    if one is None or two is None:
        return None
    spreads = []
    for run in (one, two):
        assert run.norms
        spreads.append([b.maps for b in (*run.norms.attention, *run.norms.mlp) if b.maps])
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


def gamma(analysis: Analysis) -> Claim | None:
    run = run_of(analysis, "gpt+", "norms")
    if run is None or run.norms is None or "norm_a" not in run.norms.gamma or run.layers < 3:
        return None
    found = correlation(run.norms.gamma["norm_a"], [s.mean or 0.0 for s in run.norms.stream[:-1]])
    return Claim(
        "γ of GPT+ grows with the norm of the stream, slightly (correlation over layers above 0).",
        f"γ_a: correlation {number(found, 2)}.",
        found is not None and found > 0,
    )


def rows(analysis: Analysis) -> Claim | None:
    run = run_of(analysis, "angpt", "norms")
    if run is None or run.norms is None:
        return None
    means = [r.mean for r in run.norms.rows]
    return Claim(
        "Despite the bound, rows of anGPT's weights stay close to length 1 (means above 0.9).",
        f"Means over rows {span(list(means))}.",
        min(means) > 0.9,
    )


def alpha(analysis: Analysis) -> Claim | None:
    run = run_of(analysis, "angpt", "learned")
    if run is None or run.learned is None or not run.learned.alpha:
        return None
    spreads = [s for found in run.learned.alpha.values() for s in found]
    start = run.learned.alpha_start or 0.0
    low, high = paper.ALPHA
    return Claim(
        f"α rises from 0.05 to between {low} and {high} (holds if |α| exceeds its start in every layer).",
        f"From {start:g}; mean |α| {span([s.size for s in spreads])}, mean α {span([s.mean for s in spreads])}.",
        all(s.size > start for s in spreads),
    )


def errors(analysis: Analysis) -> Claim | None:
    run = run_of(analysis, "angpt", "factors")
    if run is None or run.factors is None:
        return None
    worst = max((f for f in run.factors if f.error is not None), key=lambda f: f.error or 0.0, default=None)
    off = [f.off for f in run.factors if f.off is not None and f.activation.startswith("lerp")]
    if worst is None:
        return None
    where = f"{ACTIVATIONS[worst.activation]}, layer {worst.layer}"
    return Claim(
        "A constant in place of the norm errs by less than 2 %.",
        f"Up to {percent(worst.error)} ({where}); ν(α)·√E‖·‖² is {span(off)}.",
        (worst.error or 0.0) < 0.02,
    )


def early(analysis: Analysis) -> Claim | None:
    one, two = run_of(analysis, "angpt", "moments"), run_of(analysis, "gpt+", "moments")
    if one is None or two is None:
        return None
    mine, theirs = early_part(one), early_part(two)
    return Claim(
        "Adam's first moment is calm at the start in anGPT, while GPT+ spikes despite warm-up (holds if less of the "
        "variance falls on the first tenth of training, mean over the block matrices).",
        f"anGPT {percent(mine)}, GPT+ {percent(theirs)}.",
        mine < theirs,
    )


def warmup(analysis: Analysis) -> Claim | None:
    found = [run for run in analysis.runs if run.architecture == "gpt+" and run.moments]
    with_it = next((run for run in found if run.moments and run.moments.warmup > 0), None)
    without = next((run for run in found if run.moments and run.moments.warmup == 0), None)
    if with_it is None or without is None:
        return None
    mine, theirs = peak(without), peak(with_it)
    return Claim(
        "Without warm-up the peaks of GPT+ are stronger (highest relative variance, mean over the block matrices).",
        f"{number(mine)} times the mean over training without, {number(theirs)} with.",
        mine > theirs,
    )


def shift(analysis: Analysis) -> Claim | None:
    runs = [run_of(analysis, name, "robustness") for name in ("gpt+", "angpt")]
    changes = []
    for run in runs:
        if run is None or run.robustness is None:
            return None
        changes.append(next((s.change for s in run.robustness.shifts if s.name == "same token"), None))
    if changes[0] is None or changes[1] is None:
        return None
    return Claim(
        "On one token repeated, the residual norm changes 3.4-fold in GPT+ and 1.5-fold in anGPT (holds if less in "
        "anGPT).",
        f"{number(changes[0])}-fold and {number(changes[1])}-fold.",
        changes[1] < changes[0],
    )


BLOCK_MATRICES = ("W_qkv", "W_p", "W_uz", "W_d")


def early_part(run: RunAnalysis) -> float:
    assert run.moments
    found = [g.early for g in run.moments.groups if g.group in BLOCK_MATRICES]
    return sum(found) / len(found)


def peak(run: RunAnalysis) -> float:
    assert run.moments
    found = [g.peak for g in run.moments.groups if g.group in BLOCK_MATRICES]
    return sum(found) / len(found)
