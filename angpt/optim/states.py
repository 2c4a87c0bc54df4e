"""The state that an optimizer keeps of each parameter, and how processes share it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from angpt.constraints import Constraint
from angpt.float8 import E4M3, WEIGHT_SCALE, to_e4m3
from angpt.operations import Operation

ALIGNMENT = 16
"""Base-pointer alignment of tensors that the kernels assume, in bytes."""


@dataclass(frozen=True)
class ParameterState:
    """A parameter with its moments, low-precision copy, weight decay and constraint."""

    parameter: Tensor
    weight: Tensor
    """The rows of the parameter that this process holds."""
    copy: Tensor | None
    """Copy in low precision, which the model computes with. In e4m3 it is the weight times WEIGHT_SCALE."""
    exp_avg: Tensor
    exp_avg_sq: Tensor | None
    """None for Muon, which has no second moment."""
    decay: float
    constraint: Constraint | None
    """Constraint on vectors that lie in `weight` as a whole."""
    maps: int = 0
    """Number of linear maps, stacked row-wise, that Muon orthogonalizes one by one; 0 for Adam."""
    by_columns: bool = False
    """True if the constrained vectors are columns, also where they are split over processes."""
    leaf: Tensor | None = None
    """The tensor that receives the gradient if there is a copy: the copy itself, unless it is in e4m3."""

    @property
    def holder(self) -> Tensor:
        """The tensor that receives the gradient of a pass."""
        return self.parameter if self.leaf is None else self.leaf

    def write_copy(self) -> None:
        """Set the copy to the weight."""
        if self.copy is not None:
            self.copy.copy_(to_e4m3(self.weight, WEIGHT_SCALE) if self.copy.dtype == E4M3 else self.weight)

    @property
    def sharded(self) -> bool:
        """True if other processes hold the other rows."""
        return self.weight is not self.parameter


class Shards:
    """How the rows of matrices are sharded over processes. Here: one process holds all rows."""

    workers = 1
    """Number of processes that share the work on whole matrices."""

    def local(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor that this process holds; the tensor itself if it is not sharded."""
        return tensor

    def sum_shards(self, value: Tensor) -> Tensor:
        """The sum over the processes that together hold one copy of the parameters."""
        return value

    def rows_each(self, rows: int) -> int:
        """The largest number of rows that a process holds of a matrix."""
        return rows

    def take_share(self, batch: Tensor, rows: int) -> Tensor:
        """This process's share of a batch of matrices with `rows` rows, as whole matrices.

        `batch` has the rows of this process, padded: (multiple of `workers`, `rows_each(rows)`, columns).
        """
        return batch

    def return_shares(self, share: Tensor) -> Tensor:
        """The inverse of `take_share`: the rows of this process of all matrices, from the shares of all processes."""
        return share


UNSHARDED = Shards()


def by_form(op: Operation[..., Any], *lists: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """Split parallel lists into the entries that the fast form of an operation can take, and the others."""
    rows = list(zip(*lists, strict=True))
    fast = [op.applies(*([entry] for entry in row)) for row in rows]
    for wanted in (True, False):
        if chosen := [row for row, applies in zip(rows, fast, strict=True) if applies is wanted]:
            yield [list(column) for column in zip(*chosen, strict=True)]
