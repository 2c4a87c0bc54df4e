"""Matrices in 8 bits under FSDP: ranks exchange e4m3 values, half the bytes of bf16.

The optimizer keeps the rows of a rank in fp32. FSDP lets a tensor choose what is sent in its place
(`fsdp_pre_all_gather`) and what is made of what has been received (`fsdp_post_all_gather`).
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from angpt.float8 import E4M3, WEIGHT_SCALE, to_e4m3
from angpt.models.float8 import Float8Linear
from angpt.models.primitives import Linear

aten = torch.ops.aten
KEPT = {
    aten.detach.default, aten.view.default, aten.slice.Tensor, aten.split.Tensor, aten.new_zeros.default,
    aten.as_strided.default, aten.clone.default, aten._to_copy.default,
}  # fmt: skip
"""Operations by which FSDP shards a parameter. Their results stay `GatheredInE4M3`; all others are plain tensors."""


class GatheredInE4M3(Tensor):
    """The rows of a bounded matrix on one rank, gathered as e4m3.

    The values of all ranks go to the `Float8Linear`. Its weight then has no storage and only receives the gradient.
    """

    rows: Tensor
    owner: Linear
    """Layer whose weight this is; it has become a `Float8Linear` before the rows are gathered."""

    @staticmethod
    def __new__(cls, rows: Tensor, owner: Linear) -> "GatheredInE4M3":
        self: GatheredInE4M3 = Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), storage_offset=rows.storage_offset(), dtype=rows.dtype,
            device=rows.device,
        )  # fmt: skip
        self.rows, self.owner = rows, owner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        owners: list[Linear] = []

        def rows(tensor: GatheredInE4M3) -> Tensor:
            owners.append(tensor.owner)
            return tensor.rows

        plain, options = tree_map_only(cls, rows, (args, kwargs or {}))
        result = function(*plain, **options)
        return tree_map_only(Tensor, lambda x: cls(x, owners[0]), result) if function in KEPT else result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """The rows of this rank in e4m3, padded with zeros so that all ranks send the same number of rows."""
        missing = -(-outer_size[0] // mesh.size()) - len(self.rows)
        values = to_e4m3(self.rows, WEIGHT_SCALE).view(torch.uint8)
        return (nn.functional.pad(values, (0, 0, 0, missing)),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Store the gathered e4m3 values in the `Float8Linear`. At the first call, return the tensor for its weight."""
        assert isinstance(self.owner, Float8Linear)
        shape = self.owner.weight.shape
        self.owner.values = outputs[0][: shape[0]].view(E4M3)
        if out is not None:
            return None
        return outputs[0].new_zeros((), dtype=dtype).expand(shape).as_subclass(_WithoutStorage), ()


class _WithoutStorage(Tensor):
    """Zeros expanded from one element. FSDP calls `torch.as_strided` on them, which would need the storage of a whole
    matrix; here it returns them as they are."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.as_strided:
            return args[0].as_subclass(Tensor)
        return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]


def gather_in_e4m3(block: nn.Module, bounded: Collection[str]) -> None:
    """Let FSDP, which is to shard a block on its device, gather in e4m3 those of its matrices that are bounded, by the
    names of their parameters."""
    for name, part in block.named_modules():
        if isinstance(part, Linear) and f"{name}.weight" in bounded:
            part.weight = nn.Parameter(GatheredInE4M3(part.weight.detach(), part))
