"""The variance V(m_t) of the first moment of Adam or Muon over the entries of each matrix, recorded during training.

`angpt.analysis.moments` computes what the paper plots, the share of each step in the sum over all steps.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from angpt.training.strategy import Shard

RECORDS = 200
"""Number of records of a long run."""
CLOSEST = 10
"""Fewest steps between two records, because a record reads every first moment once."""


def default_interval(steps: int) -> int:
    """Steps between records: a 200th of the run, but at least 10."""
    return max(CLOSEST, math.ceil(steps / RECORDS))


class MomentRecorder:
    """Computes variances after a step without waiting for the device; they are read with the losses."""

    def __init__(self, moments: Mapping[str, Shard], every: int, whole: Callable[[Shard], Tensor]) -> None:
        """`moments`: the first moment by the name of its matrix; `whole` gathers the rows of all ranks."""
        self.moments, self.every, self.whole = list(moments.values()), every, whole
        self.groups = [matrix_group(name) for name in moments]
        self.pending: list[tuple[int, Tensor]] = []

    @torch.no_grad()
    def note(self, step: int) -> None:
        """Call after every step (from 1); the first one and every interval are recorded."""
        if self.moments and (step == 1 or step % self.every == 0):
            moments = map(self.whole, self.moments)
            self.pending.append((step, torch.stack([m.float().var(correction=0) for m in moments])))

    def drain(self) -> Iterator[tuple[int, dict[str, list[float] | float]]]:
        """Steps and records since the last call: a list over layers, or a number for what the model has once."""
        for step, variances in self.pending:
            layers: dict[str, list[float]] = {}
            single: dict[str, float] = {}
            for (group, layer), value in zip(self.groups, variances.tolist(), strict=True):
                if layer is None:
                    single[group] = value
                else:
                    layers.setdefault(group, []).append(value)
            yield step, {**single, **layers}
        self.pending.clear()


def matrix_group(name: str) -> tuple[str, int | None]:
    """Group and layer (from 0) of a matrix: `blocks.3.W_p.weight` is (W_p, 3), `W_e.weight` is (W_e, None)."""
    parts = name.split(".")
    return parts[-2], int(parts[1]) if parts[0] == "blocks" else None
