"""`angpt bench optimizer`: an optimizer step with clipping and constraint, compared with PyTorch's and with the bytes
that it must move."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from angpt.bench.measure import between, in_turns, median, ratio
from angpt.config import ModelConfig, OptimizerConfig
from angpt.constraints import constrain, is_matrix
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.present.tables import Table
from angpt.stats import Interval
from angpt.training.engine import Engine
from angpt.training.hardware import bandwidth

LR, CLIP = 1e-3, 1.0


@dataclass(frozen=True)
class Result:
    architecture: str
    size: str
    ours_ms: Interval
    torch_ms: Interval
    """PyTorch: clip_grad_norm_, fused AdamW, the constraint as a hook; gradients and parameters in fp32."""
    speedup: Interval
    floor_ms: float
    """Lower bound: bytes that the step must move, divided by the measured bandwidth of a copy."""


def floor_bytes(model: Decoder, low_precision: bool) -> int:
    """Bytes that a step must move: the gradient twice (norm, step), the parameter and two moments read and written in
    fp32; with bf16 copies of matrices, their gradient has 2 bytes, and the copy is written."""
    total = 0
    for p in model.parameters():
        gradient, copied = (2, 2) if low_precision and is_matrix(p) else (4, 0)
        total += p.numel() * (2 * gradient + 3 * 8 + copied)
    return total


def bench_optimizer(
    size: str, architectures: Sequence[str], device: torch.device, dtype: torch.dtype, rounds: int
) -> list[Result]:
    """Measure both optimizers in turns, one architecture after the other."""
    results = []
    for name in architectures:
        config = ModelConfig.size(size, architecture=name)
        with device:
            model, twin = build(config), build(config)
        engine = Engine(twin, OptimizerConfig(weight_decay=0.0, clip=CLIP), dtype, compiled=False)
        fused = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        constrain(fused, model, model.constraints())
        holders = [state.weight if state.copy is None else state.copy for state in engine.optimizer.states]
        gradients = [torch.randn_like(p) for p in holders]
        for p in model.parameters():
            p.grad = torch.randn_like(p)

        def ours(
            holders: list[torch.Tensor] = holders, gradients: list[torch.Tensor] = gradients, engine: Engine = engine
        ) -> None:
            for p, g in zip(holders, gradients, strict=True):
                p.grad = g if is_matrix(p) else g.clone()  # a step scales gradients of vectors in place
            engine.step(1, LR)

        def theirs(model: Decoder = model, fused: torch.optim.Optimizer = fused) -> None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            fused.step()

        in_turns({"ours": ours, "torch": theirs}, device, rounds=2)
        seconds = in_turns({"ours": ours, "torch": theirs}, device, rounds, calls=3)
        ours_ms, torch_ms = (median(seconds[key]).times(1e3) for key in ("ours", "torch"))
        floor_ms = 1e3 * floor_bytes(model, dtype != torch.float32) / bandwidth(device)
        results.append(Result(name, size, ours_ms, torch_ms, ratio(seconds["torch"], seconds["ours"]), floor_ms))
    return results


def tables(results: Sequence[Result]) -> list[Table]:
    rows = []
    for r in results:
        speedup, ends = between(r.speedup, ".2f")
        cells = f"{r.torch_ms.mean:.2f}", f"{speedup}×", ends, f"{r.floor_ms:.2f}", f"{r.ours_ms.mean / r.floor_ms:.2f}"
        rows.append((r.architecture, *between(r.ours_ms, ".2f"), *cells))
    columns = ("", "ours", "quartiles", "PyTorch", "speed-up", "95 %", "floor", "÷ floor")
    return [Table(columns, rows, f"Optimizer step, {results[0].size}, ms")]
