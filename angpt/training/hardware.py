"""The device: which one, the rate of a large matrix product on it, and the memory in use."""

import resource
import sys
import time
from functools import cache

import torch

from angpt.config import Device
from angpt.errors import UserError


def choose_device(name: Device) -> torch.device:
    """By its name; it need not be here."""
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def present(device: torch.device) -> torch.device:
    """The device, if it is here."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but torch sees no GPU here; use --device cpu")
    return device


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this device, measured: the peak that MFU refers to."""
    n = 8192 if device.type == "cuda" else 512  # larger ones are no faster on a core, and cost every run a second
    rng = torch.Generator(device).manual_seed(0)  # the global one belongs to the run
    a, b = (torch.randn(n, n, device=device, generator=rng).to(dtype) for _ in range(2))
    best = float("inf")
    for attempt in range(6):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        synchronize(device)
        if attempt:  # the first warms up
            best = min(best, (time.perf_counter() - start) / 4)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # the run's own peak is what counts
    return 2 * n**3 / best


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on this device, read and written, measured."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory in use so far: allocated on a GPU, resident in the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
