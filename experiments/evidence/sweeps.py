"""Laws of the best learning rate and batch of anGPT, fitted to all sweeps in docs/evidence, as tables."""

import math
from functools import cache

from angpt.fits.hparams import SETTINGS, FittedLaw, HparamFit, SizeFit, Sweep, fit_hparams
from angpt.fits.reading import read_table
from angpt.present.tables import Table
from angpt.present.words import bracketed, label, quantity
from experiments.evidence.items import EVIDENCE
from experiments.evidence.protocol import SWEEPS


@cache
def fitted() -> HparamFit:
    return fit_hparams(read_table([EVIDENCE / stage for stage in SWEEPS], ("batch_tokens", "lr")))


def rates() -> Table:
    """The laws of the best learning rate."""
    rows = [(label(trend.architecture), *_law(trend.lr, list(SETTINGS))) for trend in fitted().trends]
    return Table(("", "best rates", *(f"exponent of {symbol}" for symbol in SETTINGS.values())), rows)


def batch_laws() -> Table:
    """The laws of the best batch."""
    names = list(SETTINGS)[:2]
    rows = [
        (label(trend.architecture), *_law(trend.batch_tokens, names)) for trend in fitted().trends if trend.batch_tokens
    ]
    return Table(("", "best batches", *(f"exponent of {SETTINGS[name]}" for name in names)), rows)


def _law(fit: FittedLaw, names: list[str]) -> tuple[str, ...]:
    exponents = (fit.law.exponents.get(name) for name in names)
    return str(len(fit.points)), *("not measured" if e is None else bracketed(e, ".2f") for e in exponents)


def batches() -> Table:
    """The best batch of every size and budget with several, and the lowest loss of each batch."""
    chosen = [size for size in fitted().sizes if len(size.sweeps) > 1]
    tried = sorted({sweep.batch_tokens for size in chosen for sweep in size.sweeps})
    rows = [_row(size, tried) for size in chosen]
    return Table(("", "N", "D", "best batch", *(f"{batch:,.0f}" for batch in tried)), rows)


def _row(size: SizeFit, tried: list[float]) -> tuple[str, ...]:
    lowest = min((loss for sweep in size.sweeps for loss in sweep.losses), default=math.inf)
    of_batch = {sweep.batch_tokens: _loss(sweep, lowest) for sweep in size.sweeps}
    best = "not inside" if size.optimum is None else f"{size.optimum.batch_tokens:,.0f}"
    model = label(size.architecture), quantity(size.parameters), quantity(size.tokens)
    return *model, best, *(of_batch.get(batch, "") for batch in tried)


def _loss(sweep: Sweep, lowest: float) -> str:
    if not sweep.losses:
        return "diverged"
    loss = min(sweep.losses)
    text = f"{loss:.3f}" + ("†" if sweep.minimum is None else "")
    return f"**{text}**" if loss == lowest else text
