"""Tests of kernels run on a GPU in bf16; without one, Triton's interpreter computes them on the CPU, in fp32.

What the interpreter cannot say is whether a kernel compiles and how fast it is.
"""

import contextlib
import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, that is before its module is imported
pytest.importorskip("triton", reason="Triton is not installed (it is there for Linux only)")


@pytest.fixture(autouse=True)
def kernels_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conditions under which kernels are used hold for DTYPE on DEVICE."""
    torch.manual_seed(0)
    if ON_GPU:
        return
    from angpt.fast import block_kernels, float8_kernels, head_kernels, models

    monkeypatch.setattr(models, "bf16_on_gpu", lambda x: x.dtype == DTYPE)
    for module in (block_kernels, float8_kernels, head_kernels):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)  # for the compiler, which does not take part
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
