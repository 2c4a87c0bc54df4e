"""From logits to a token: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Each row has one uniform number per token, drawn in advance; the token is the first whose cumulative probability exceeds
it. So the same seed gives the same text on every device, alone or in a batch, and sampling can be part of a CUDA graph.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from angpt.errors import UserError
from angpt.serialization import check_settings

if TYPE_CHECKING:  # the command line reads the defaults without loading PyTorch
    from torch import Tensor

LEAST_TEMPERATURE = 1e-6
"""Below this temperature, sampling is greedy: logits divided by it could overflow."""

LEAST_PENALTY, MOST_PENALTY = 1e-6, 1e6
"""Logits that are divided or multiplied by other repetition penalties could overflow."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The filters apply in the order of the fields."""

    repetition_penalty: float = 1.0
    """Logits of tokens that have occurred are divided by this where positive and multiplied where negative; 1: off."""
    temperature: float = 0.8
    """Logits are divided by this; 0, or less than 1e-6, takes the likeliest token."""
    top_k: int | None = 50
    """Keep only the k likeliest tokens; 0: all."""
    top_p: float | None = None
    """Keep only the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Keep only tokens with at least this fraction of the probability of the likeliest."""

    def __post_init__(self) -> None:
        rule = f"from {LEAST_PENALTY:g} to {MOST_PENALTY:,.0f}"
        check_settings(self, rule, lambda value: LEAST_PENALTY <= value <= MOST_PENALTY, "repetition_penalty")
        check_settings(self, "finite and 0 or more", lambda value: 0 <= value < math.inf, "temperature")
        check_settings(self, "0 or more", lambda value: value >= 0, "top_k")
        check_settings(self, "in (0, 1]", lambda value: 0 < value <= 1, "top_p")
        check_settings(self, "in [0, 1]", lambda value: 0 <= value <= 1, "min_p")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature < LEAST_TEMPERATURE


GREEDY = Sampling(temperature=0, top_k=None)


def pick(logits: "Tensor", sampling: Sampling, uniform: "Tensor | None", seen: "Tensor | None" = None) -> "Tensor":
    """One token (B) per row of logits (B, V), given uniform numbers (B) in [0, 1), which greedy sampling does not need,
    and a mask (B, V) of the tokens that have occurred in each row."""
    if sampling.repetition_penalty != 1 and seen is not None:
        penalty = sampling.repetition_penalty
        logits = (logits / penalty).where(logits > 0, logits * penalty).where(seen, logits)
    if sampling.greedy:
        return logits.argmax(dim=-1)
    assert uniform is not None
    logits = logits / sampling.temperature
    ids = None
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        logits, ids = logits.topk(sampling.top_k, dim=-1)  # exactly k, also if several share the k-th logit
    elif sampling.top_p is not None:
        logits, ids = logits.sort(dim=-1, descending=True)
    p = logits.softmax(dim=-1)
    allowed = p > 0
    if sampling.top_p is not None:
        allowed &= p.cumsum(dim=-1) - p < sampling.top_p  # includes the token that passes top_p
    if sampling.min_p is not None:
        allowed &= p >= sampling.min_p * p.amax(dim=-1, keepdim=True)
    p = p.where(allowed, 0)
    below = p.cumsum(dim=-1)
    reached = allowed & (below > uniform[:, None] * below[:, -1:])
    # Rounding may leave a uniform number close to 1 unreached.
    drawn = reached.int().argmax(dim=-1).where(reached.any(dim=-1), p.argmax(dim=-1))
    return drawn if ids is None else ids.gather(-1, drawn[:, None])[:, 0]


def uniforms(seed: int) -> Iterator[float]:
    """The uniform numbers of one row. Row b of a batch has the seed of the batch plus b, so that its text is that of
    its prompt alone with that seed."""
    if seed < 0:
        raise UserError(f"seed must not be negative, not {seed}")
    rng = np.random.Generator(np.random.PCG64(seed))
    while True:
        yield from rng.random(256, dtype=np.float32).tolist()
