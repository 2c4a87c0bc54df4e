"""Tables of what was measured, for the terminal, for Markdown and for the page."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from angpt.analysis import paper
from angpt.analysis.analyse import Analysis, RunAnalysis
from angpt.analysis.attention import LayerAttention
from angpt.analysis.factors import ACTIVATIONS, SYMBOLS, MeasuredFactor
from angpt.analysis.learned import Learned
from angpt.analysis.moments import Moments
from angpt.analysis.norms import ON_BOUND, BlockNorms, Norms
from angpt.analysis.robustness import Robustness, factor
from angpt.present.tables import Table
from angpt.present.words import NONE, label, number, percent, quantity, span

T = TypeVar("T")
Measured = Sequence[tuple[RunAnalysis, T]]
"""The runs that something was measured of, and what."""
GROUPS = ("W_e", "W_qkv", "W_p", "W_uz", "W_d", "W_h")


def printed(value: float | None) -> str:
    """A number of the paper, which prints two decimals."""
    return NONE if value is None else f"{value:,.2f}"


def places(layers: int) -> dict[str, int]:
    """First, middle and last layer, from 0."""
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
        name="streams",
    )


def ratios(runs: Measured[Norms]) -> Table:
    readings: dict[str, Callable[[BlockNorms], float | None]] = {
        "maps": lambda b: b.maps,
        "update": lambda b: b.relative_update,
        "stream": lambda b: b.growth,
    }
    rows = []
    for reading, value in readings.items():
        for place in ("first", "middle", "last"):
            for part in ("attention", "MLP"):
                of_paper = paper.RATIOS[f"{place} {part}"] if reading == "maps" else {}
                cells = [printed(of_paper.get(name)) for name in ("gpt+", "angpt")]
                for run, norms in runs:
                    blocks = norms.attention if part == "attention" else norms.mlp
                    cells.append(number(value(blocks[places(run.layers)[place]])))
                rows.append((f"{reading}: {place} {part}", *cells))
    return Table(
        ("", *(f"{label(name)}, paper" for name in ("gpt+", "angpt")), *(run.label for run, _ in runs)),
        rows,
        "Mean output norm over mean input norm of the blocks",
        "maps: behind the block's last linear map over in front of its first; update: what the residual stream "
        "receives over the stream; stream: the stream after the update over the stream before. The paper (0.5B) does "
        "not say which it means; its values for GPT+ are possible for maps.",
        name="ratios",
    )


def gammas(runs: Measured[Norms]) -> Table:
    names = {"norm_a": "γ_a", "norm_m": "γ_m", "norm_h": "γ_h"}
    rows = []
    for run, norms in runs:
        for name, values in norms.gamma.items():
            chosen = [values[i] for i in places(run.layers).values()] if len(values) > 1 else [None, None, values[0]]
            rows.append((f"{run.label}, ‖{names.get(name, name)}‖", *(number(value) for value in chosen)))
    return Table(
        ("", "first layer", "middle", "last"),
        rows,
        "Length of γ",
        "At the start every entry of γ is 1 and its length √d_m.",
        name="gammas",
    )


def rows_on_bound(runs: Measured[Norms]) -> Table:
    rows = []
    for group in GROUPS:
        cells = []
        for _, norms in runs:
            found = [r for r in norms.rows if r.group == group]
            count = sum(r.vectors for r in found)
            bound = sum((r.on_bound or 0) * r.vectors for r in found) / count if count else None
            known = found and found[0].on_bound is not None
            cells.append(span([r.mean for r in found]) + (f", {percent(bound, 0)}" if known else ""))
        rows.append((group, *cells))
    return Table(
        ("", *(run.label for run, _ in runs)),
        rows,
        "Mean row norm by layer, and rows on the bound",
        f"The lowest and the highest layer. On the bound: length within {ON_BOUND:g} of 1 (nGPT holds the columns of "
        "W_p and W_d at 1, the rows elsewhere).",
        name="rows",
    )


def factors(runs: Measured[tuple[MeasuredFactor, ...]]) -> Table:
    runs = [(run, found) for run, found in runs if any(f.nu is not None for f in found)]
    rows = []
    for run, found in runs:
        prefix = f"{run.label}, " if len(runs) > 1 else ""
        for name, symbol in SYMBOLS.items():
            if mine := [f for f in found if f.activation == name]:
                rows.append((f"{prefix}{symbol}, {ACTIVATIONS[name]}", *_factor_cells(mine, symbol)))
    return Table(
        ("", "ν", "1/√E‖·‖²", "of unit inputs", "ν·√E‖·‖²", "spread", "error", "error, paper"),
        rows,
        "Factors in the wild",
        "The lowest and the highest layer, on validation text. 1/√E‖·‖² is what ν should be; of unit inputs: what it "
        "would be if the input had the length that the derivation assumes; ν·√E‖·‖² is 1 where ν is exact. spread: "
        "standard deviation over mean of the length. error: of the best constant against exact normalization.",
        name="factors",
    )


def _factor_cells(found: Sequence[MeasuredFactor], symbol: str) -> tuple[str, ...]:
    return (
        span([f.nu for f in found]),
        span([f.measured for f in found]),
        span([f.unit for f in found]),
        span([f.off for f in found]),
        _percent_span([f.variation for f in found]),
        _percent_span([f.error for f in found]),
        f"{paper.FACTOR_ERRORS[symbol]:.2f} %",
    )


def _percent_span(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    low, high = f"{100 * min(known):.1f}", f"{100 * max(known):.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def learned(runs: Measured[Learned]) -> Table:
    rows = []
    for run, found in runs:
        alphas = [found.alpha.get(name, ()) for name in ("alpha_a", "alpha_m")]
        entries = [s for spreads in alphas for s in spreads]
        negative = sum(s.negative for s in entries) / len(entries) if entries else None
        s_z = found.s_z
        rows.append(
            (
                run.label,
                *(span([s.size for s in spreads]) for spreads in alphas),
                span([s.mean for s in entries]),
                percent(negative, 0),
                span(list(found.g)),
                number(s_z.mean if s_z else None),
                number(s_z.correlation if s_z else None, 2),
            )
        )
    low, high = paper.ALPHA
    rows.append(("anGPT, paper", f"{low} to {high}", f"{low} to {high}", *[NONE] * 5))
    return Table(
        ("", "|α_a|", "|α_m|", "mean α", "α < 0", "g", "|s_z|", "s_z and frequency"),
        rows,
        "Learned parameters",
        "The lowest and the highest layer, each a mean over dimensions; α starts at 0.05, g at √d_h, s_z at 1. Last "
        "column: rank correlation of |s_z| with how often its token occurs in the training text.",
        name="learned",
    )


def moments(runs: Measured[Moments]) -> Table:
    rows = []
    for group in GROUPS:
        cells = []
        for _, measured in runs:
            found = next((g for g in measured.groups if g.group == group), None)
            cells.append(
                f"{number(found.peak)}× at {percent(found.peak_at, 0)}; {percent(found.early, 0)}" if found else NONE
            )
        rows.append((group, *cells))
    return Table(
        ("", *(run.label for run, _ in runs)),
        rows,
        "Variance of Adam's first moment relative to its sum over training",
        "The highest value (as a multiple of the mean over training) and when it is reached, then the part of the sum "
        "that falls on the first tenth of training (10 % if it is as restless throughout). Means over layers.",
        name="moments",
    )


def distribution_shift(runs: Measured[Robustness]) -> Table:
    """The paper's own table."""
    rows = []
    for name, theirs in paper.ROBUSTNESS.items():
        text, same = theirs["text"], theirs["same token"]
        cells = [printed(v) for v in (text.mean, text.std, same.mean, same.std, factor(text.mean, same.mean))]
        rows.append((f"{label(name)}, paper", *cells))
    for run, found in runs:
        shifts = {s.name: s for s in found.shifts}
        if "same token" in shifts:
            a, b = shifts["text"], shifts["same token"]
            rows.append((run.label, *(number(v) for v in (a.mean, a.std, b.mean, b.std, b.change))))
    return Table(
        ("", "text", "std", "same token", "std", "change"),
        rows,
        "Mean residual norm on text and on repetitions of one token",
        "Mean over tokens and places (in front of each layer and after the last); std: over tokens within a place. "
        "change: the larger mean over the smaller.",
        name="shift",
    )


def robustness(runs: Measured[Robustness]) -> Table:
    rows = []
    for run, found in runs:
        for s in found.shifts:
            worst = NONE if s.worst_change is None else f"{number(s.worst_change)}×"
            if s.worst_layer is not None and worst != "1.00×":
                worst += f" {_place(s.worst_layer, run.layers)}"
            change = NONE if s.change is None else f"{number(s.change)}×"
            rows.append((f"{run.label}, {s.name}", number(s.mean), number(s.std), change, worst, number(s.loss, 4)))
    return Table(
        ("", "mean", "std", "change", "worst layer", "loss"),
        rows,
        "Residual norms and loss on inputs unlike the training text",
        "change: of the mean against that on text, the larger over the smaller; worst layer: where the stream that "
        "enters it changes most. Of longer contexts only what lies beyond the trained one counts.",
        name="robustness",
    )


def _place(layer: int, layers: int) -> str:
    return "after the last" if layer > layers else f"at {layer}"


def attention(runs: Measured[tuple[LayerAttention, ...]]) -> Table:
    rows = []
    for run, layers in runs:
        for name, i in places(run.layers).items():
            found = layers[i]
            end = found.bins[-1]
            rows.append(
                (
                    f"{run.label}, {name} layer",
                    number(found.total.scaled),
                    span(list(found.heads)),
                    f"{end.first} to {end.last}",
                    number(end.norm),
                    number(end.dense),
                    number(end.effective),
                )
            )
    return Table(
        ("", "√r·‖a_r‖", "heads", "at r", "‖a_r‖", "1/√r", "tokens"),
        rows,
        "Rows of the attention matrices",
        "√r·‖a_r‖: mean over all rows, and the lowest and highest head; 1 for dense attention. The other columns are "
        "of the longest rows. tokens: 1/‖a_r‖², attended to effectively.",
        name="attention",
    )


MAKERS: tuple[tuple[str, Callable[[Any], Table]], ...] = (
    ("norms", streams), ("norms", ratios), ("norms", gammas), ("norms", rows_on_bound), ("factors", factors),
    ("learned", learned), ("moments", moments), ("robustness", distribution_shift), ("robustness", robustness),
    ("attention", attention),
)  # fmt: skip
"""The part of an analysis that each table shows, and the function that makes it."""


def tables(analysis: Analysis) -> list[Table]:
    """The tables for which something was measured."""
    found = []
    for part, make in MAKERS:
        if runs := [(run, measured) for run in analysis.runs if (measured := getattr(run, part))]:
            found.append(make(runs))
    return [table for table in found if table.rows]
