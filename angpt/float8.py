"""The 8-bit numbers of training: the format e4m3, its devices, conversion to it, and the scale of bounded matrices.

e4m3 has 4 significant bits, a largest number of 448, full precision down to 2⁻⁶, and steps of 2⁻⁹ below. Scales are
powers of two, so multiplying by them is exact. docs/fp8.md derives them.
"""

import math

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number in e4m3."""
CAPABILITY = (8, 9)
"""The lowest compute capability of a GPU with instructions for e4m3: Ada."""
HALF_STEP = 2.0**-10
"""Half of the step between numbers in e4m3 below 2⁻⁶: the largest rounding error there; up to it, numbers become 0."""
WEIGHT_SCALE = 256.0
"""Scale of a matrix whose rows or columns have at most length 1: no entry exceeds 1, so none exceeds 256, scaled."""


def has_e4m3(device: torch.device) -> bool:
    """True unless the device is a GPU without instructions for e4m3."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY


def scale_of_bound(bound: float) -> float:
    """The largest power of two that keeps numbers of up to `bound` within e4m3."""
    (top, power), (mantissa, exponent) = math.frexp(LARGEST), math.frexp(bound)
    return 2.0 ** (power - exponent - (mantissa > top))


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is not above a positive number in fp32, up to the rounding of its logarithm."""
    return torch.exp2(torch.floor(torch.log2(x)))


def measured_scale(x: Tensor) -> Tensor:
    """The largest power of two that keeps these numbers within e4m3, as a tensor, so that the device need not wait."""
    largest = x.detach().abs().amax().float().clamp(min=1e-30)
    return power_of_two(LARGEST / largest)


def to_e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    """x · scale, rounded to e4m3; what exceeds 448 becomes 448."""
    return (x * scale).clamp(-LARGEST, LARGEST).to(E4M3)
