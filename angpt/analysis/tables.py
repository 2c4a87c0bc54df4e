"""Tables of an analysis, for the terminal, for Markdown and for the page."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from angpt.analysis import paper
from angpt.analysis.analyse import Analysis, RunAnalysis
from angpt.analysis.attention import LayerAttention
from angpt.analysis.factors import ACTIVATIONS, SYMBOLS, MeasuredFactor
from angpt.analysis.learned import ALPHAS, Learned
from angpt.analysis.moments import Moments
from angpt.analysis.norms import ON_BOUND, Norms
from angpt.analysis.robustness import Robustness, factor
from angpt.present.tables import Table
from angpt.present.words import NONE, label, number, percent, quantity, span

T = TypeVar("T")
Measured = Sequence[tuple[RunAnalysis, T]]
"""Runs with one part of their measurements."""
GROUPS = ("W_e", "W_qkv", "W_p", "W_uz", "W_d", "W_h")


def printed(value: float | None) -> str:
    """A number with two decimals, as the paper prints it."""
    return NONE if value is None else f"{value:,.2f}"


def places(layers: int) -> dict[str, int]:
    """Indices of the first, middle and last layer."""
    return {"first": 0, "middle": layers // 2, "last": layers - 1}


def streams(runs: Measured[Norms]) -> Table:
    rows = []
    for run, norms in runs:
        means = [stats.mean for stats in norms.stream]
        chosen = [number(means[i]) for i in (*places(run.layers).values(), run.layers)]
        rows.append((run.label, *chosen, span(means), number(run.loss, 4)))
    measured = " or ".join(dict.fromkeys(quantity(run.measured_tokens) for run, _ in runs))
    return Table(
        ("", "into the first layer", "middle", "last", "after the last", "range", "loss"),
        rows,
        "Length of the residual stream",
        f"Means over {measured} tokens of validation text.",
    )


def ratios(runs: Measured[Norms]) -> Table:
    rows = []
    for reading, field in {"maps": "maps", "update": "relative_update", "stream": "growth"}.items():
        for block, theirs in paper.RATIOS.items():
            place, part = block.split()
            cells = [printed(theirs[name] if reading == "maps" else None) for name in theirs]
            for run, norms in runs:
                found = getattr(norms, part.lower())[places(run.layers)[place]]
                cells.append(number(getattr(found, field)))
            rows.append((f"{reading}: {block}", *cells))
    return Table(
        ("", *(f"{label(name)}, paper" for name in ("gpt+", "angpt")), *(run.label for run, _ in runs)),
        rows,
        "Mean output norm over mean input norm of the blocks",
        "maps: after the block's last linear map over before its first; update: what is added to the residual stream "
        "(after minus before) over the stream; stream: the stream after the update over the stream before. The paper "
        "(0.5B) does not say which it means; its values for GPT+ are possible for maps only.",
    )


def gammas(runs: Measured[Norms]) -> Table:
    names = {"norm_a": "γ_a", "norm_m": "γ_m", "norm_h": "γ_h"}
    rows = []
    for run, norms in runs:
        for name, values in norms.gamma.items():
            chosen = [values[i] for i in places(run.layers).values()] if len(values) > 1 else [None, None, values[0]]
            rows.append((f"{run.label}, ‖{names.get(name, name)}‖", *map(number, chosen)))
    return Table(
        ("", "first layer", "middle", "last"),
        rows,
        "Length of γ",
        "At the start every entry of γ is 1 and its length √d_m.",
    )


def by_group(runs: Measured[T], cell: Callable[[T, str], str], title: str, note: str) -> Table:
    """A table with a row per group of matrices and a column per run."""
    rows = [(group, *(cell(found, group) for _, found in runs)) for group in GROUPS]
    return Table(("", *(run.label for run, _ in runs)), rows, title, note)


def rows_on_bound(runs: Measured[Norms]) -> Table:
    def cell(norms: Norms, group: str) -> str:
        found = [r for r in norms.rows if r.group == group]
        means = span([r.mean for r in found])
        if not found or found[0].on_bound is None:
            return means
        bound = sum((r.on_bound or 0) * r.vectors for r in found) / sum(r.vectors for r in found)
        return f"{means}, {percent(bound, 0)}"

    return by_group(
        runs,
        cell,
        "Mean row norm by layer, and rows on the bound",
        f"The lowest and the highest layer. On the bound: length within {ON_BOUND:g} of 1 (nGPT keeps the columns of "
        "W_p and W_d at 1, and the rows of the other matrices).",
    )


def factors(runs: Measured[tuple[MeasuredFactor, ...]]) -> Table:
    runs = [(run, found) for run, found in runs if any(f.nu is not None for f in found)]
    rows, percentage = [], lambda value: f"{100 * value:.1f}"
    for run, found in runs:
        prefix = f"{run.label}, " if len(runs) > 1 else ""
        for name, symbol in SYMBOLS.items():
            if mine := [f for f in found if f.activation == name]:
                lengths = [span([getattr(f, field) for f in mine]) for field in ("nu", "measured", "unit", "off")]
                errors = [span([getattr(f, field) for f in mine], percentage, " %") for field in ("variation", "error")]
                theirs = f"{paper.FACTOR_ERRORS[symbol]:.2f} %"
                rows.append((f"{prefix}{symbol}, {ACTIVATIONS[name]}", *lengths, *errors, theirs))
    return Table(
        ("", "ν", "1/√E‖·‖²", "of unit inputs", "ν·√E‖·‖²", "spread", "error", "error, paper"),
        rows,
        "Factors in trained models",
        "The lowest and the highest layer, on validation text. 1/√E‖·‖² is what ν should be; of unit inputs: what it "
        "would be if the input had the length that the derivation assumes; ν·√E‖·‖² is 1 if ν is exact. spread: "
        "standard deviation over mean of the length. error: of the best constant against exact normalization.",
    )


def learned(runs: Measured[Learned]) -> Table:
    rows = []
    for run, found in runs:
        alphas = [found.alpha.get(name, ()) for name in ALPHAS]
        entries = [s for spreads in alphas for s in spreads]
        negative = sum(s.negative for s in entries) / len(entries) if entries else None
        scale, rank = (found.s_z.mean, found.s_z.correlation) if found.s_z else (None, None)
        sizes = [span([s.size for s in spreads]) for spreads in alphas]
        cells = (span([s.mean for s in entries]), percent(negative, 0), span(found.g), number(scale), number(rank, 2))
        rows.append((run.label, *sizes, *cells))
    low, high = paper.ALPHA
    rows.append(("anGPT, paper", f"{low} to {high}", f"{low} to {high}", *[NONE] * 5))
    return Table(
        ("", "|α_a|", "|α_m|", "mean α", "α < 0", "g", "|s_z|", "s_z and frequency"),
        rows,
        "Learned parameters",
        "The lowest and the highest layer, each a mean over dimensions; α starts at 0.05, g at √d_h, s_z at 1. Last "
        "column: rank correlation of |s_z| with how often its token occurs in the training text.",
    )


def moments(runs: Measured[Moments]) -> Table:
    def cell(measured: Moments, group: str) -> str:
        found = next((g for g in measured.groups if g.group == group), None)
        return f"{number(found.peak)}× at {percent(found.peak_at, 0)}; {percent(found.early, 0)}" if found else NONE

    return by_group(
        runs,
        cell,
        "Variance of the first moment relative to its sum over training",
        "The highest value (as a multiple of the mean over training) and when it is reached, then the share of the sum "
        "in the first tenth of training (10 % if the variance is constant). Means over layers.",
    )


def distribution_shift(runs: Measured[Robustness]) -> Table:
    """The paper's own table."""
    rows = []
    for name, theirs in paper.ROBUSTNESS.items():
        text, same = theirs["text"], theirs["same token"]
        cells = [printed(v) for v in (*text, *same, factor(text[0], same[0]))]
        rows.append((f"{label(name)}, paper", *cells))
    for run, found in runs:
        shifts = {s.name: s for s in found.shifts}
        if "same token" in shifts:
            a, b = shifts["text"], shifts["same token"]
            rows.append((run.label, *map(number, (a.mean, a.std, b.mean, b.std, b.change))))
    return Table(
        ("", "text", "std", "same token", "std", "change"),
        rows,
        "Mean residual norm on text and on repetitions of one token",
        "Mean over tokens and places (before each layer and after the last); std: over tokens at one place. "
        "change: the larger mean over the smaller.",
    )


def robustness(runs: Measured[Robustness]) -> Table:
    rows = []
    for run, found in runs:
        for s in found.shifts:
            change, worst = (NONE if v is None else f"{number(v)}×" for v in (s.change, s.worst_change))
            if s.worst_layer is not None and worst != "1.00×":
                worst += " after the last" if s.worst_layer > run.layers else f" at {s.worst_layer}"
            rows.append((f"{run.label}, {s.name}", number(s.mean), number(s.std), change, worst, number(s.loss, 4)))
    return Table(
        ("", "mean", "std", "change", "worst layer", "loss"),
        rows,
        "Residual norms and loss on inputs unlike the training text",
        "change: ratio of the mean to that on text, the larger over the smaller; worst layer: where the stream that "
        "enters it changes most. In longer contexts only the positions beyond the trained context count.",
    )


def attention(runs: Measured[tuple[LayerAttention, ...]]) -> Table:
    rows = []
    for run, layers in runs:
        for name, i in places(run.layers).items():
            found, end = layers[i], layers[i].bins[-1]
            cells = (number(found.total.scaled), span(found.heads), f"{end.first} to {end.last}")
            rows.append((f"{run.label}, {name} layer", *cells, *map(number, (end.norm, end.dense, end.effective))))
    return Table(
        ("", "√r·‖a_r‖", "heads", "at r", "‖a_r‖", "1/√r", "tokens"),
        rows,
        "Rows of the attention matrices",
        "√r·‖a_r‖: mean over all rows, and the lowest and highest head; 1 for dense attention. The other columns: the "
        "longest rows. tokens: 1/‖a_r‖², the effective number attended to.",
    )


MAKERS: tuple[tuple[str, Callable[[Any], Table]], ...] = (
    ("norms", streams), ("norms", ratios), ("norms", gammas), ("norms", rows_on_bound), ("factors", factors),
    ("learned", learned), ("moments", moments), ("robustness", distribution_shift), ("robustness", robustness),
    ("attention", attention),
)  # fmt: skip
"""For each table, the part of an analysis that it shows and the function that makes it."""


def tables(analysis: Analysis) -> list[Table]:
    """All tables for which something was measured."""
    parts = {part: [(run, found) for run in analysis.runs if (found := getattr(run, part))] for part, _ in MAKERS}
    found = [make(parts[part]) for part, make in MAKERS if parts[part]]
    return [table for table in found if table.rows]
