"""The device: its choice, the measured rates of matrix products and copies on it, and the memory in use."""

import resource
import sys
import time
from collections.abc import Callable
from functools import cache

import torch

from angpt.config import Device, TrainPrecision
from angpt.errors import UserError
from angpt.float8 import CAPABILITY, has_e4m3


def choose_device(name: Device) -> torch.device:
    """The device of this name, which need not be present."""
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def present(device: torch.device) -> torch.device:
    """The device itself; an error if it is not present."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but torch sees no GPU here; use --device cpu")
    return device


def check_precision(device: torch.device, precision: TrainPrecision) -> None:
    """Raise an error if the device has no products in this precision."""
    if precision == "fp8" and not has_e4m3(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"precision = 'fp8', but the {torch.cuda.get_device_name(device)} has compute capability {major}.{minor} "
            f"and no products in 8 bits, which begin with {CAPABILITY[0]}.{CAPABILITY[1]}; use --precision bf16"
        )


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this device, measured: the peak that MFU refers to."""
    n = 8192 if device.type == "cuda" else 512  # larger ones are no faster on a core, and cost every run a second
    rng = torch.Generator(device).manual_seed(0)  # the global one belongs to the run
    a, b = (torch.randn(n, n, device=device, generator=rng).to(dtype) for _ in range(2))
    best = _best_seconds(lambda: [a @ b for _ in range(4)], device) / 4
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the run's own peak is what counts
    return 2 * n**3 / best


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy on this device, measured."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(act: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        act()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])  # the first warms up


def synchronize(device: torch.device) -> None:
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory in use so far: allocated on a GPU, resident in the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
