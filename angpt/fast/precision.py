"""Low-precision copies: matrices in bf16 beside the fp32 parameters, so that no forward pass casts them.

The optimizer writes the copy of a matrix in the pass in which it updates the matrix.
"""

import copy
from typing import Any

import torch
from torch import nn

from angpt.constraints import is_matrix
from angpt.models.decoder import Decoder


def low_precision(model: Decoder, dtype: torch.dtype) -> Decoder:
    """A copy of the model with matrices in `dtype` that shares the model's vectors; for fp32 the model itself."""
    if dtype == torch.float32:
        return model
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(dtype)) if is_matrix(p) else p for p in model.parameters()
    }
    return copy.deepcopy(model, memo)
