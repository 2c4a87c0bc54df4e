"""Low-precision copies: matrices in bf16 or e4m3 beside the fp32 parameters, so that no forward pass casts them.

The optimizer writes the copy of a matrix in the pass in which it updates the matrix.
"""

import copy
from typing import Any

import torch
from torch import nn

from angpt.constraints import is_matrix
from angpt.float8 import E4M3
from angpt.models.decoder import Decoder
from angpt.models.float8 import use_float8


def stream_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of the residual stream, and of products that are not in 8 bits, with matrices in `dtype`."""
    return torch.bfloat16 if dtype == E4M3 else dtype


def low_precision(model: Decoder, dtype: torch.dtype) -> Decoder:
    """A copy of the model with matrices in `dtype` that shares the model's vectors; for fp32 the model itself.

    In e4m3 those of blocks compute in 8 bits; embedding and head are bf16.
    """
    if dtype == torch.float32:
        return model
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(stream_dtype(dtype))) if is_matrix(p) else p for p in model.parameters()
    }
    compute = copy.deepcopy(model, memo)
    if dtype == E4M3:
        use_float8(compute, copied=True)
    return compute
