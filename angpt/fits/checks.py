"""Plausibility of the records of a fit: comparable losses, units, perplexities, finite losses of runs that diverged.

What cannot be right is an error, one line that says what to do; what is merely unusual is a note.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import lsq_linear

from angpt.errors import UserError
from angpt.fits.powerlaw import Floats
from angpt.fits.records import Record
from angpt.present.words import listed, plural, quantity

FEWEST_PARAMETERS, FEWEST_TOKENS = 1e4, 1e3
RATIO = 1e-3, 1e6
"""Least and most tokens per parameter."""
NATS = 8.0
"""A quarter of the runs lies below this loss unless it is a perplexity: that of random guessing is log of the
vocabulary, 10.8 for 50,000 tokens."""
SMALL_BATCH, MANY_STEPS, MOST_STEPS = 4096, 3e5, 5e6
HIGH_LR, HIGH_LR_OF_LARGE, LARGE_MODEL = 0.5, 0.1, 2e7
"""Learning rates that half of the runs do not exceed, of small and of large models."""
FAR = math.log(1.6)
"""Excess of log loss over that of similar runs beyond which a run counts as diverged."""
STEEPEST = -0.5
"""Lowest plausible exponent of the loss over parameters or tokens."""


def check_comparable(records: Sequence[Record]) -> None:
    """Raise an error for runs whose losses cannot be compared: of other data, context, vocabulary or precision."""
    known = [r for r in records if r.loss_settings and r.status != "unfinished"]
    for record in known:
        pairs = ((name, value, known[0].loss_settings[name]) for name, value in record.loss_settings.items())
        if differ := [f"{name} ({first}, {value})" for name, value, first in pairs if value != first]:
            raise UserError(
                f"{known[0].source} and {record.source} differ in {listed(differ)}: their losses cannot be compared; "
                "fit such runs separately (where the same data has moved, set data.path in each config.toml)"
            )


def check_units(records: Sequence[Record]) -> list[str]:
    """Raise an error for units that cannot be right; return notes on unusual learning rates."""
    _refuse(
        records,
        "parameters",
        lambda r: r.parameters < FEWEST_PARAMETERS,
        lambda r: f"parameters = {r.parameters:g} cannot be the count; write 125e6, not millions or billions",
    )
    _refuse(
        records,
        "tokens",
        lambda r: r.tokens < FEWEST_TOKENS or r.tokens / r.parameters < RATIO[0],
        lambda r: (
            f"tokens = {r.tokens:g} cannot be the count for {quantity(r.parameters)} parameters; write 2.5e9, not "
            "millions or billions"
        ),
    )
    _refuse(
        records,
        "parameters",
        lambda r: r.tokens / r.parameters > RATIO[1],
        lambda r: (
            f"parameters = {r.parameters:g} for {quantity(r.tokens)} tokens cannot be the counts of one run; write "
            "125e6, not millions"
        ),
    )
    _refuse(
        records,
        "batch_tokens",
        lambda r: _steps(r) > (MANY_STEPS if (r.batch_tokens or 0) < SMALL_BATCH else MOST_STEPS),
        lambda r: (
            f"batch_tokens = {r.batch_tokens:g} would make {_steps(r):,.0f} steps; write tokens per step, not sequences"
        ),
    )
    losses = [r.loss for r in records if r.status == "finished"]
    if losses and float(np.quantile(losses, 0.25)) > NATS:
        raise UserError(
            f"{records[0].source}: losses from {min(losses):.4g} to {max(losses):.4g} look like perplexities; write "
            "their natural logarithms"
        )
    rates = sorted((r for r in records if r.lr is not None), key=lambda r: r.lr or 0.0)
    if not rates:
        return []
    large = float(np.median([r.parameters for r in rates])) > LARGE_MODEL
    if (rates[len(rates) // 2].lr or 0.0) <= (HIGH_LR_OF_LARGE if large else HIGH_LR):
        return []
    low, high = f"{rates[0].lr:g}", f"{rates[-1].lr:g} ({rates[-1].source})"
    return [f"check: learning rates from {low} to {high} are unusually high; are they in per cent, or times 100?"]


def _steps(record: Record) -> float:
    return record.tokens / record.batch_tokens if record.batch_tokens else 0.0


def _refuse(
    records: Sequence[Record], name: str, wrong: Callable[[Record], bool], message: Callable[[Record], str]
) -> None:
    """Raise an error that names the first wrong record, and says if units of the field `name` are mixed."""
    judged = [r for r in records if r.status != "unfinished"]
    if not (found := [r for r in judged if wrong(r)]):
        return
    # In one wrong unit the largest values may pass, but they are not far from the others.
    usual = [value for r in judged if not wrong(r) and (value := getattr(r, name))]
    mixed = usual and min(usual) > 100 * max(getattr(r, name) for r in found)
    some = f" ({len(found):,} of {len(judged):,} runs: units are mixed)" if mixed else ""
    raise UserError(f"{found[0].source}: {message(found[0])}{some}")


def mark_diverged(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """The records, with finite losses far above those of similar runs marked as diverged, and a note that names them.

    Similar runs are those of the architecture: log loss is compared with a plane over log parameters and log tokens,
    below which a quarter of the runs lie. A rate below the best one of its size and budget is too low, not diverged.
    """
    changed, named = list(records), []
    for architecture in dict.fromkeys(r.architecture for r in records):
        mine = [i for i, r in enumerate(records) if r.architecture == architecture and r.status == "finished"]
        if len(mine) < 3:
            continue
        y = np.log([records[i].loss for i in mine])
        expected = _lower_plane(np.log([(records[i].parameters, records[i].tokens) for i in mine]), y)
        below = expected - y
        limit = max(FAR, 3 * float(np.quantile(np.maximum(below, 0.0), 0.95)))
        for place, i in enumerate(mine):
            if -below[place] > limit and not _too_low(records[i], records):
                named.append(f"{records[i].source} ({records[i].loss:.4g}, others {math.exp(expected[place]):.3g})")
                changed[i] = replace(records[i], loss=math.nan, status="diverged")
    if not named:
        return changed, []
    more = f" and {len(named) - 5:,} more" if len(named) > 5 else ""
    subject = f"{plural(len(named), 'run')} with a loss far above those of similar runs"
    return changed, [f"{subject} count as diverged: {', '.join(named[:5])}{more}"]


def _lower_plane(x: Floats, y: Floats) -> Floats:
    """The values of the quantile regression of y on x for a quarter, by iteratively reweighted least squares.

    Losses fall with size and tokens, at most as STEEPEST says, so that in few runs no absurd loss tilts the plane.
    """
    design = np.column_stack([np.ones(len(y)), x - x.mean(axis=0)])
    bounds = [-np.inf, STEEPEST, STEEPEST], [np.inf, 0.0, 0.0]
    weight = np.ones(len(y))
    for _ in range(50):
        q, r = np.linalg.qr(design * np.sqrt(weight)[:, None])
        fitted = design @ lsq_linear(r, q.T @ (y * np.sqrt(weight)), bounds, method="bvls").x
        off = y - fitted
        weight = np.where(off > 0, 0.25, 0.75) / np.maximum(np.abs(off), 1e-3)
    return fitted


def _too_low(record: Record, records: Sequence[Record]) -> bool:
    """True if the best run of this size, budget and batch has a higher learning rate."""
    if record.lr is None:
        return False

    def sweep(r: Record) -> tuple[object, ...]:
        return r.architecture, r.parameters, r.batch_tokens, r.status

    near = (r for r in records if sweep(r) == sweep(record) and abs(math.log(r.tokens / record.tokens)) < 0.05)
    return (min(near, key=lambda r: r.loss).lr or 0.0) > record.lr
