"""Where the time of a decode step goes on a GPU: one kernel left out at a time.

    python experiments/decode_profile.py [--size 0.5B] [--architecture angpt] [--rows 1 32]

A step with a kernel left out computes nonsense, in less time: what is saved is the kernel, its launch, and what its
neighbours gain by its absence. Two further rows: the weights of the first layer in all layers, which then come from the
L2 cache as far as they fit, and kernels that only wait for each other in place of all, the cost of launching them.
docs/speed-log.md has the result of an earlier version."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from angpt.bench.measure import timed
from angpt.config import ModelConfig
from angpt.fast import decode_kernels, rows_kernels, tuning
from angpt.fast.attention_kernels import _await
from angpt.inference.engine import Engine
from angpt.inference.fold import fold
from angpt.inference.sampling import GREEDY
from angpt.models.folded import Folded
from angpt.models.variants import build
from angpt.present.tables import Table

KERNELS = ("_read", "_attend", "_attend_whole", "_project", "_down", "_product", "_combine", "_advance")
MATRICES = ("W_qkv", "W_p", "W_uz", "W_d")
PROMPT, SLOTS, REPLAYS, TURNS = 128, 256, 100, 5
"""Tokens of the prompt, slots of the cache, steps that are timed together, and the number of such turns."""
Chosen = Callable[[str, Sequence[Any]], bool]
"""Called with the name and the arguments of a kernel; True if it is left out."""


@triton.jit
def _wait_only(out_ptr, OVERLAP: tl.constexpr):
    """Wait for the previous kernel, and write one number per program."""
    _await(OVERLAP)
    tl.store(out_ptr + tl.program_id(0), 0.0)


class Launcher:
    """Stands in for a kernel: launches it, or, if it is chosen, nothing or a kernel that only waits."""

    def __init__(self, name: str, kernel: Any, chosen: Chosen, instead: Tensor | None) -> None:
        self.name, self.kernel, self.chosen, self.instead = name, kernel, chosen, instead

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            if not self.chosen(self.name, args):
                self.kernel[grid](*args, **options)
            elif self.instead is not None:
                kept = {name: options[name] for name in ("OVERLAP", "launch_pdl") if name in options}
                _wait_only[grid](self.instead, **kept)

        return launch


@contextmanager
def left_out(chosen: Chosen, instead: Tensor | None = None) -> Iterator[None]:
    """Leave out the chosen kernels of decode steps; `instead`: launch kernels that only wait, and write there."""
    modules = (decode_kernels, rows_kernels)
    before = [(m, name, getattr(m, name)) for m in modules for name in KERNELS if hasattr(m, name)]
    for module, name, kernel in before:
        setattr(module, name, Launcher(name, kernel, chosen, instead))
    try:
        yield
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)


def reads(shape: torch.Size) -> Chosen:
    """The kernels that read a matrix of this shape."""
    return lambda name, args: any(isinstance(x, Tensor) and x.shape == shape for x in args[:2])


@contextmanager
def first_layer_everywhere(model: Folded) -> Iterator[None]:
    """Let all layers have the matrices of the first."""
    before = [(layer, name, getattr(layer, name)) for layer in model.layers for name in MATRICES]
    for layer, name, _ in before:
        setattr(layer, name, getattr(model.layers[0], name))
    try:
        yield
    finally:
        for layer, name, own in before:
            setattr(layer, name, own)


def step_ms(model: Folded, rows: int) -> float:
    """Milliseconds of a step with greedy sampling, the median over turns."""
    engine = Engine(model, rows, SLOTS, REPLAYS, GREEDY, "kernels")
    engine.start([[1] * PROMPT] * rows, seed=0)
    engine.advance()
    (graph,) = engine.graphs.values()
    seconds: list[float] = []
    for _ in range(TURNS + 1):  # the first warms up
        engine.positions.fill_(PROMPT + 2)
        engine.count.zero_()
        with timed(model.device, seconds, REPLAYS):
            for _ in range(REPLAYS):
                graph.replay()
    return 1e3 * median(seconds[1:])


def profile(model: Folded, rows: int) -> Table:
    """A row for each way of computing a step."""
    shapes = {name: getattr(model.layers[0], name).shape for name in MATRICES}
    if rows <= tuning.DECODE_ROWS:  # with more, the head is PyTorch's product
        shapes["W_h"] = model.W_h.shape
    ways: dict[str, Any] = {f"without {name}": left_out(reads(shape)) for name, shape in shapes.items()}
    for kernel in ("_attend", "_advance"):
        ways[f"without {kernel}"] = left_out(lambda name, args, kernel=kernel: name.startswith(kernel))
    ways["weights of one layer"] = first_layer_everywhere(model)
    buffer = torch.empty(1 << 20, device=model.device)
    ways["kernels that only wait"] = left_out(lambda name, args: True, buffer)
    whole = step_ms(model, rows)
    found = [("as it is", f"{whole:.4f}", "")]
    for name, way in ways.items():
        with way:
            ms = step_ms(model, rows)
        found.append((name, f"{ms:.4f}", f"{1e3 * (whole - ms) / len(model.layers):.1f}"))
    return Table((f"{rows} rows", "ms", "saved per layer, µs"), found, left=(0,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--architecture", default="angpt")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    args = parser.parse_args()
    with torch.device("cuda"):
        trained = build(ModelConfig.size(args.size, architecture=args.architecture))
    model = fold(trained).prepare("cuda", torch.bfloat16)
    for rows in args.rows:
        print(profile(model, rows).markdown(), flush=True)


if __name__ == "__main__":
    main()
