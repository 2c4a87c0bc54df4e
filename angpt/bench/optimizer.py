"""`angpt bench optimizer`: an optimizer step with clipping and constraint, compared with PyTorch's and with the bytes
that it must move and the matrix products that it must compute."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from angpt.bench.measure import between, in_turns, median, ratio
from angpt.config import ModelConfig, OptimizerConfig, Recipe, TrainConfig
from angpt.constraints import constrain, is_matrix
from angpt.errors import UserError
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.optim.muon import iteration_groups
from angpt.present.tables import Table
from angpt.stats import Interval
from angpt.training.engine import Engine
from angpt.training.hardware import bandwidth, peak_flops

LR, CLIP = 1e-3, 1.0


@dataclass(frozen=True)
class Result:
    architecture: Recipe
    size: str
    ours_ms: Interval
    torch_ms: Interval
    """PyTorch: clip_grad_norm_, fused AdamW and torch.optim.Muon, the constraint as a hook; parameters in fp32."""
    speedup: Interval
    gigabytes: float
    """Memory traffic that the step cannot do without, in 10⁹ bytes."""
    traffic_ms: float
    """The time of that traffic at the measured bandwidth of a copy."""
    teraflops: float
    """Matrix products of the step, in 10¹² FLOPs."""
    products_ms: float
    """The time of these products at the measured rate of a large one."""

    @property
    def floor_ms(self) -> float:
        """Lower bound of the step."""
        return self.traffic_ms + self.products_ms


def floor_bytes(model: Decoder, optimizer: OptimizerConfig, low_precision: bool) -> int:
    """Bytes that a step must move.

    The gradient twice (norm, step), the parameter and its moments read and written in fp32; with bf16 copies of
    matrices, their gradient has 2 bytes, and the copy is written. Adam has two moments. Muon has one, and its update is
    written before the products and read after them.
    """
    total, hidden = 0, model.hidden_matrices() if optimizer.name == "muon" else {}
    for name, p in model.named_parameters():
        gradient, copied = (2, 2) if low_precision and is_matrix(p) else (4, 0)
        moments = 8 + 2 * gradient if name in hidden else 16
        total += p.numel() * (2 * gradient + 8 + moments + copied)
    return total


def floor_flops(model: Decoder, optimizer: OptimizerConfig) -> int:
    """FLOPs of Muon's five iterations on all matrices, with half the work for symmetric products.

    A group of iterations has two products with the rectangular matrix, of which one is symmetric, a polynomial for each
    iteration, and three symmetric products for each iteration after the first.
    """
    total = 0
    for name, maps in model.hidden_matrices().items() if optimizer.name == "muon" else ():
        rows, columns = model.get_parameter(name).shape
        short, long = sorted((rows // maps, columns))
        n = len(iteration_groups(rows // maps, columns))
        total += maps * (n * 3 * short**2 * long + (5 + 3 * (5 - n)) * short**3)
    return total


def torch_step(model: Decoder, optimizer: OptimizerConfig) -> Callable[[], None]:
    """A step with the optimizers of PyTorch."""
    hidden = set(model.hidden_matrices()) if optimizer.name == "muon" else set()
    if hidden and not hasattr(torch.optim, "Muon"):
        raise UserError(f"PyTorch {torch.__version__} has no Muon to compare with; leave out :muon")
    named = dict(model.named_parameters())
    others = [p for name, p in named.items() if name not in hidden]
    steps: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=LR, weight_decay=0.0, fused=True)]
    if hidden:
        steps.append(torch.optim.Muon([named[name] for name in hidden], lr=LR, weight_decay=0.0))
    for each, names in zip(steps, (named.keys() - hidden, hidden), strict=False):
        constrain(each, model, {name: c for name, c in model.constraints().items() if name in names})

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for each in steps:
            each.step()

    return step


def our_step(engine: Engine) -> Callable[[], None]:
    """A step of the engine, on the same gradients each time."""
    holders = [state.holder for state in engine.optimizer.states]
    gradients = [torch.randn_like(p) for p in holders]

    def step() -> None:
        for p, g in zip(holders, gradients, strict=True):
            p.grad = g if is_matrix(p) else g.clone()  # a step scales gradients of vectors in place
        engine.step(1, LR)

    return step


def bench_optimizer(
    size: str, recipes: Sequence[Recipe], device: torch.device, dtype: torch.dtype, rounds: int
) -> list[Result]:
    """Measure our optimizer and PyTorch's in turns, one recipe after the other."""
    results = []
    for recipe in recipes:
        train = TrainConfig(model=ModelConfig.size(size)).with_recipe(recipe)
        config = dataclasses.replace(train.optimizer, weight_decay=0.0, clip=CLIP)
        with device:
            model, twin = build(train.model), build(train.model)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        steps = {
            "ours": our_step(Engine(twin, config, dtype, compiled=False)),
            "torch": torch_step(model, config),
        }
        in_turns(steps, device, rounds=2)
        seconds = in_turns(steps, device, rounds, calls=3)
        ours_ms, torch_ms = (median(seconds[key]).times(1e3) for key in ("ours", "torch"))
        traffic, flops = floor_bytes(model, config, dtype != torch.float32), floor_flops(model, config)
        results.append(
            Result(
                architecture=recipe,
                size=size,
                ours_ms=ours_ms,
                torch_ms=torch_ms,
                speedup=ratio(seconds["torch"], seconds["ours"]),
                gigabytes=traffic / 1e9,
                traffic_ms=1e3 * traffic / bandwidth(device),
                teraflops=flops / 1e12,
                products_ms=1e3 * flops / peak_flops(device, dtype),
            )
        )
    return results


def tables(results: Sequence[Result]) -> list[Table]:
    rows, floors = [], []
    for r in results:
        parts = r.gigabytes, r.traffic_ms, r.teraflops, r.products_ms, r.floor_ms
        floors.append((r.architecture, *(f"{value:.1f}" for value in parts)))
        speedup, ends = between(r.speedup, ".2f")
        cells = f"{r.torch_ms.mean:.2f}", f"{speedup}×", ends, f"{r.floor_ms:.2f}", f"{r.ours_ms.mean / r.floor_ms:.2f}"
        rows.append((r.architecture, *between(r.ours_ms, ".2f"), *cells))
    columns = ("", "ours", "quartiles", "PyTorch", "speed-up", "95 %", "floor", "÷ floor")
    floor_columns = ("", "memory, GB", "ms", "products, TFLOP", "ms", "floor, ms")
    return [
        Table(columns, rows, f"Optimizer step, {results[0].size}, ms"),
        Table(floor_columns, floors, "Floor: the bytes and products of a step at the rates above"),
    ]
