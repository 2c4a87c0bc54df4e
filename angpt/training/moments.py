"""The variance of Adam's first moment, recorded through training: how restless the direction of the updates is.

V(m_t) is the variance over the entries of one matrix. What the paper plots, each step's part of the sum over all steps,
is made from these records by `angpt.analysis.moments`.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from angpt.training.strategy import Shard

RECORDS = 200
"""Records that a long run leaves."""
CLOSEST = 10
"""Fewest steps between two of them: a record reads every first moment once, which is little beside a step but not
nothing where steps are short."""


def default_interval(steps: int) -> int:
    """Steps between records: a 200th of the run, but at least 10."""
    return max(CLOSEST, math.ceil(steps / RECORDS))


class MomentRecorder:
    """Notes the variances after a step without waiting for the device; they are read when the losses are."""

    def __init__(self, moments: Mapping[str, Shard], every: int, whole: Callable[[Shard], Tensor]) -> None:
        """`moments`: the first moment by the name of its matrix; `whole` gathers the rows of all ranks."""
        self.moments, self.every, self.whole = list(moments.values()), every, whole
        self.groups = [matrix_group(name) for name in moments]
        self.pending: list[tuple[int, Tensor]] = []

    def due(self, step: int) -> bool:
        """After the first step, and then at every interval."""
        return step == 1 or step % self.every == 0

    @torch.no_grad()
    def note(self, step: int) -> None:
        """Called after every step (counted from 1)."""
        if self.due(step):
            moments = map(self.whole, self.moments)
            self.pending.append((step, torch.stack([m.float().var(correction=0) for m in moments])))

    def drain(self) -> Iterator[tuple[int, dict[str, list[float] | float]]]:
        """What was noted since the last call: for each group the variances over layers, or a number for what the model
        has once."""
        for step, variances in self.pending:
            values: dict[str, list[float] | float] = {}
            for (group, layer), value in zip(self.groups, variances.tolist(), strict=True):
                if layer is None:
                    values[group] = value
                else:
                    of_layers = values.setdefault(group, [])
                    assert isinstance(of_layers, list)
                    of_layers.append(value)
            yield step, values
        self.pending.clear()


def matrix_group(name: str) -> tuple[str, int | None]:
    """Group and layer (from 0) of a matrix: `blocks.3.W_p.weight` is (W_p, 3), `W_e.weight` is (W_e, None)."""
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "blocks" else None
    return parts[-2], layer
