"""Part 3, learned parameters: α of each layer, |s_z| against the frequency of its token, g of each layer."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from angpt.analysis.history import History
from angpt.models.decoder import Decoder
from angpt.models.primitives import LearnedScale
from angpt.stats import correlation

ALPHAS = ("alpha_a", "alpha_m")


@dataclass(frozen=True)
class Spread:
    """The entries of a learned vector of one layer."""

    layer: int
    """Number of the layer, from 1."""
    mean: float
    size: float
    """Mean of the absolute values: anGPT leaves the sign of α free."""
    std: float
    low: float
    high: float
    negative: float
    """Part of the entries below 0."""


@dataclass(frozen=True)
class FrequencyBin:
    """Tokens that occur about equally often in the training text."""

    first: int
    """Least number of occurrences in what was counted; 0 for the tokens that do not occur."""
    last: int
    tokens: int
    mean: float
    """Mean of |s_z|."""
    low: float
    """10 % of the tokens have a smaller |s_z|."""
    high: float
    """10 % have a larger one."""


@dataclass(frozen=True)
class LogitScale:
    """|s_z|, the size of the learned scale of each token's logit. Its sign means nothing: with the row of W_h turned
    around it is the same model."""

    start: float
    mean: float
    std: float
    negative: float
    """Part of the tokens whose s_z is negative."""
    counted: int
    """Training tokens in which occurrences were counted."""
    correlation: float | None
    """Rank correlation (Spearman) of |s_z| with the number of occurrences, over the tokens that occur."""
    bins: tuple[FrequencyBin, ...]


@dataclass(frozen=True)
class Learned:
    alpha: dict[str, tuple[Spread, ...]]
    """α of attention and MLP by layer; empty where the model has no such scale."""
    alpha_start: float | None
    g: tuple[float, ...]
    """Scale of the attention scores by layer; empty where the model has no such scale."""
    g_start: float | None
    s_z: LogitScale | None
    history: History
    """α and g through training, as the run recorded them: means over the entries."""


def measure(model: Decoder, counts: NDArray[np.int64] | None, history: History | None = None) -> Learned:
    """`counts` are the occurrences of each token in the training text."""
    blocks = list(model.blocks)
    alphas = {name: [a for b in blocks if (a := _scale(b, name)) is not None] for name in ALPHAS}
    gains = [g for b in blocks if (g := _scale(b, "g")) is not None]
    s_z = _scale(model, "s_z")
    first = next((a[0] for a in alphas.values() if a), None)
    return Learned(
        alpha={name: tuple(_spread(i + 1, a) for i, a in enumerate(found)) for name, found in alphas.items() if found},
        alpha_start=None if first is None else first.init,
        g=tuple(_values(g).mean().item() for g in gains),
        g_start=gains[0].init if gains else None,
        s_z=None if s_z is None or counts is None else logit_scale(_values(s_z), counts, s_z.init),
        history=(history or History.empty()).only("alpha_", "g", "s_z"),
    )


def logit_scale(s_z: NDArray[np.float64], counts: NDArray[np.int64], start: float) -> LogitScale:
    """|s_z| by how often its token occurs: bins of a factor of √10, those that do not occur apart."""
    negative = float((s_z < 0).mean())
    s_z, seen = np.abs(s_z), counts > 0
    bins = []
    if (~seen).any():
        bins.append(_bin(s_z[~seen], counts[~seen]))
    if seen.any():
        number = np.floor(2 * np.log10(counts[seen])).astype(int)
        bins += [_bin(s_z[seen][number == n], counts[seen][number == n]) for n in np.unique(number)]
    return LogitScale(
        start=start,
        mean=float(s_z.mean()),
        std=float(s_z.std()),
        negative=negative,
        counted=int(counts.sum()),
        correlation=correlation(s_z[seen], counts[seen], ranks=True),
        bins=tuple(bins),
    )


def _bin(size: NDArray[np.float64], counts: NDArray[np.int64]) -> FrequencyBin:
    low, high = np.quantile(size, [0.1, 0.9]).tolist()
    return FrequencyBin(int(counts.min()), int(counts.max()), len(size), float(size.mean()), low, high)


def _spread(layer: int, scale: LearnedScale) -> Spread:
    values = _values(scale)
    return Spread(
        layer=layer,
        mean=float(values.mean()),
        size=float(np.abs(values).mean()),
        std=float(values.std()),
        low=float(values.min()),
        high=float(values.max()),
        negative=float((values < 0).mean()),
    )


def _scale(owner: torch.nn.Module, name: str) -> LearnedScale | None:
    part = getattr(owner, name, None)
    return part if isinstance(part, LearnedScale) else None


@torch.no_grad()
def _values(scale: LearnedScale) -> NDArray[np.float64]:
    return scale().double().cpu().numpy()
