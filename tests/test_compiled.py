"""Kernels as the compiler makes them for a GPU of today: they fit, and read sixteen bytes at a time."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (it is there for Linux only)")

SHARED = 99 * 1024
"""Bytes that one program can have on the smallest GPUs in use (Ada); Hopper has more than twice as many."""
WIDE = ("update backward, 16384", "rms backward, 16384", "heads backward, 40 of 128")
"""Several times as wide as the models of the paper: they must run there, if not fast."""
NARROW = {
    "heads backward, 16 of 64": 4,  # angles: all heads share them, so that a tile has few
    **dict.fromkeys(("project, 1024", "project, 2048"), 64),  # of each head, as many splits as there can be
    **{f"project, 1024, {kind}": 68 for kind in ("fp8e4nv", "i8")},  # and the scales of eight rows
    "attend, split": 8,  # the partners of rotated dimensions, angles
    **{f"attend, {length}, {d}": 13 for length in ("short", "long") for d in (64, 128, 256)},
    "combine": 8,  # numbers of each head
    **{f"read {name}, 1024, {kind}": 8 for name in ("qkv", "uz") for kind in ("fp8e4nv", "i8")},
    "product uz, 128 rows, fp8e4nv": 8,  # scales of rows, which several warps have
}
"""Loads of single numbers, where there may be more than two: a scale, a target, the factor of clipping."""


TENSOR_CORES = {True: "wgmma.mma_async", False: "mma.sync"}


@pytest.mark.parametrize("folder", ["training", "models", "inference"])
def test_they_fit_the_registers_and_read_wide(folder):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.compiled", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) >= 3
    for name, found in kernels.items():
        assert found["shared"] <= SHARED, name
        if name in WIDE:
            continue
        assert found["stack"] <= 24, name  # up to six registers at the edge; what this is for are hundreds of bytes
        assert found["loads"].get("v4.b32", 0) > 0, name
        if ", e4m3" in name:
            assert found["stores"].keys() - {"b32"} == {"v4.b32"}, name  # also the transpose; terms are single numbers
        narrow = found["loads"].get("b16", 0) + found["loads"].get("b32", 0)
        assert narrow <= NARROW.get(name, 2), (name, found["loads"])
        large = name.startswith("product") and int(name.split()[2]) >= 64  # tiles for Hopper's own instruction
        multiplies = name.startswith(("product", "attend, short", "attend, long"))
        assert not multiplies or found["products"].keys() == {TENSOR_CORES[large]}, name
