"""8-bit matrices for a folded model: fp8 (e4m3) or int8, with one scale per row.

A row w becomes w_q = round(w / s) with s = max|w| / largest number of the format. The scale multiplies the product, not
the matrix: w · x = s (w_q · x), so that a product reads 8 bits per weight.
"""

import torch
from torch import Tensor

from angpt.config import Weights
from angpt.errors import UserError
from angpt.models.folded import EIGHT_BITS, Folded


@torch.no_grad()
def quantize(model: Folded, weights: Weights) -> Folded:
    """The model with 8-bit matrices, on the same device; its vectors are those of the model, which is not changed."""
    if weights not in EIGHT_BITS:
        raise UserError(f"weights must be {' or '.join(EIGHT_BITS)}, not {weights!r}")
    if model.weights != "full":
        raise UserError(f"the model has {model.weights} weights already; quantize the model that it was made from")
    with torch.device(model.device):
        found = Folded(model.cfg, model.design, weights).prepare(model.device, model.dtype).eval()
    targets = dict(found.named_parameters())
    for name, p in model.named_parameters():
        if p.ndim == 2:
            stored, scale = quantize_rows(p, EIGHT_BITS[weights])
            targets[name].copy_(stored)
            targets[f"{name}_scale"].copy_(scale)
        else:
            targets[name].copy_(p)
    return found


def quantize_rows(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The matrix in 8 bits and the scales of its rows in fp32; a row of zeros has scale 1."""
    if not matrix.isfinite().all():
        raise UserError("a matrix has an infinite weight or one that is not a number; 8 bits cannot hold it")
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = (matrix.double().abs().amax(dim=1) / largest).float()
    scale = torch.where(scale > 0, scale, 1.0)
    steps = (matrix.double() / scale.double()[:, None]).clamp(-largest, largest)
    return (steps if dtype.is_floating_point else steps.round()).to(dtype), scale
