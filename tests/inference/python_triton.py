"""Triton kernels as plain Python, program by program on CPU tensors: slow, and enough to test what they compute.

Only what the kernels of angpt.inference use is here. Whether Triton can compile them is for a GPU to say.
"""

import importlib
import inspect
import itertools
import sys
import types

import torch

PROGRAM = {"id": (0, 0, 0), "count": (1, 1, 1)}


class Pointer:
    """Addresses inside of a tensor's storage."""

    def __init__(self, base, at=0):
        self.base, self.at = base, at
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset):
        return Pointer(self.base, self.at + offset)

    def flat(self):
        return self.base.as_strided((self.base.untyped_storage().nbytes() // self.base.element_size(),), (1,), 0)

    def place(self):
        return torch.as_tensor(self.at) + self.base.storage_offset()


def load(pointer, mask=None, other=None):
    at = pointer.place()
    if mask is None:
        return pointer.flat()[at]
    at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
    found = pointer.flat()[torch.where(mask, at, 0)]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(pointer, value, mask=None):
    at = pointer.place()
    value = torch.as_tensor(value).to(pointer.base.dtype).expand(at.shape)
    mask = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(at.shape)
    pointer.flat()[at[mask]] = value[mask]


class Kernel:
    def __init__(self, function):
        self.function = function
        annotated = inspect.signature(function).parameters
        self.constants = {n for n, p in annotated.items() if p.annotation is language.constexpr}

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, **kwargs):
            bound = inspect.signature(self.function).bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if isinstance(value, torch.Tensor):
                    bound.arguments[name] = Pointer(value.data)
                elif name not in self.constants:
                    bound.arguments[name] = torch.tensor(value)
            PROGRAM["count"] = (*grid, *(1,) * (3 - len(grid)))
            programs = list(itertools.product(*map(range, PROGRAM["count"])))
            for PROGRAM["id"] in reversed(programs):  # in no order that the kernels may count on
                self.function(*bound.args, **bound.kwargs)

        return launch


language = types.ModuleType("triton.language")
language.constexpr = type("constexpr", (), {})
language.float32, language.int32, language.int64 = torch.float32, torch.int32, torch.int64
language.load, language.store, language.where = load, store, torch.where
language.arange = torch.arange
language.zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
language.sum = lambda x, axis: x.sum(dim=axis)
language.max = lambda x, axis: x.amax(dim=axis)
language.exp, language.rsqrt, language.sigmoid = torch.exp, torch.rsqrt, torch.sigmoid
language.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
language.maximum = lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
language.program_id = lambda axis: torch.tensor(PROGRAM["id"][axis])
language.num_programs = lambda axis: torch.tensor(PROGRAM["count"][axis])
language.static_range = range

triton = types.ModuleType("triton")
triton.language, triton.jit = language, Kernel
triton.cdiv = lambda a, b: -(-a // b)
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()


def kernels(monkeypatch):
    """angpt.inference.kernels, computed by Python. Nothing of it is left for tests that come later."""
    import angpt.inference

    kept = sys.modules.pop("angpt.inference.kernels", None)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", triton)
        patch.setitem(sys.modules, "triton.language", language)
        module = importlib.import_module("angpt.inference.kernels")
    del sys.modules["angpt.inference.kernels"], angpt.inference.kernels
    if kept is not None:
        sys.modules["angpt.inference.kernels"] = angpt.inference.kernels = kept
    return module
