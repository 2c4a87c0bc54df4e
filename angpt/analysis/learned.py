"""Part 3, learned parameters: α of each layer, |s_z| against token frequency, g of each layer."""

from collections.abc import Iterable
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
    """Statistics of the entries of a learned vector of one layer."""

    layer: int
    """Number of the layer, from 1."""
    mean: float
    size: float
    """Mean of the absolute values: anGPT does not restrict the sign of α."""
    std: float
    low: float
    high: float
    negative: float
    """Share of entries below 0."""


@dataclass(frozen=True)
class FrequencyBin:
    """Tokens that occur about equally often in the training text."""

    first: int
    """Smallest number of occurrences; 0 for the tokens that do not occur."""
    last: int
    """Largest number of occurrences."""
    tokens: int
    mean: float
    """Mean of |s_z|."""
    low: float
    """10 % quantile of |s_z|."""
    high: float
    """90 % quantile of |s_z|."""


@dataclass(frozen=True)
class LogitScale:
    """|s_z|, the magnitude of the learned scale of each logit. The sign has no meaning: −s_z with the negated row of
    W_h is the same model."""

    start: float
    mean: float
    std: float
    negative: float
    """Share of tokens whose s_z is negative."""
    counted: int
    """Number of training tokens in which occurrences were counted."""
    correlation: float | None
    """Spearman correlation of |s_z| with the number of occurrences, over the tokens that occur."""
    bins: tuple[FrequencyBin, ...]


@dataclass(frozen=True)
class Learned:
    alpha: dict[str, tuple[Spread, ...]]
    """α of attention and MLP by layer; empty for models without."""
    alpha_start: float | None
    g: tuple[float, ...]
    """Scale of the attention scores by layer; empty for models without."""
    g_start: float | None
    s_z: LogitScale | None
    history: History
    """Means over the entries of α and g during training, as recorded by the run."""


def measure(model: Decoder, counts: NDArray[np.int64] | None, history: History | None = None) -> Learned:
    """The learned parameters of a model; `counts` are the occurrences of each token in the training text."""
    alphas = {name: found for name in ALPHAS if (found := _scales(model.blocks, name))}
    gains, logits = _scales(model.blocks, "g"), _scales([model], "s_z")
    return Learned(
        alpha={name: tuple(_spread(i, a) for i, a in enumerate(found, 1)) for name, found in alphas.items()},
        alpha_start=next((found[0].init for found in alphas.values()), None),
        g=tuple(_values(g).mean().item() for g in gains),
        g_start=gains[0].init if gains else None,
        s_z=logit_scale(_values(logits[0]), counts, logits[0].init) if logits and counts is not None else None,
        history=(history or History()).only("alpha_", "g", "s_z"),
    )


def logit_scale(s_z: NDArray[np.float64], counts: NDArray[np.int64], start: float) -> LogitScale:
    """|s_z| in bins of the number of occurrences, two per decade and one for tokens that do not occur."""
    size, seen = np.abs(s_z), counts > 0
    number = np.where(seen, np.floor(2 * np.log10(np.maximum(counts, 1))), -1)
    return LogitScale(
        start=start,
        mean=float(size.mean()),
        std=float(size.std()),
        negative=float((s_z < 0).mean()),
        counted=int(counts.sum()),
        correlation=correlation(size[seen], counts[seen], ranks=True),
        bins=tuple(_bin(size[number == n], counts[number == n]) for n in np.unique(number)),
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


def _scales(owners: Iterable[torch.nn.Module], name: str) -> list[LearnedScale]:
    return [scale for owner in owners if isinstance(scale := getattr(owner, name, None), LearnedScale)]


@torch.no_grad()
def _values(scale: LearnedScale) -> NDArray[np.float64]:
    return scale().double().cpu().numpy()
