"""Relatives of Muon on equal terms: a 32M model, every change alone, several seeds, in one process.

    python experiments/muon_relatives.py runs/relatives --data data/tuning --tokens 40M --seeds 0 1 2 --seconds 590

Losses are those on the tuning split. The same command skips what has ended. The table at the end compares each relative
with Muon as it is, seed by seed: one is kept only if the mean difference is below zero by two standard errors. With
three seeds that alone is weak (p = 0.09, and there are many): what wins is repeated with fresh seeds. A relative that
is worse than Muon by more than `--drop` with the first seed is not repeated."""

import argparse
import dataclasses
import gc
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from angpt.config import TrainConfig
from angpt.models.variants import build
from angpt.operations import Operation
from angpt.optim import muon
from angpt.optim.optimizer import Optimizer
from angpt.optim.states import ParameterState
from angpt.serialization import from_dict
from angpt.training import launch, reporter

START = time.monotonic()
ORIGINAL = muon.orthogonalize, muon.descend_, Optimizer.update
Changes = dict[str, Any]


def unit_rows() -> None:
    """Rows of the update have exactly length 1."""

    def orthogonalize(x: Tensor) -> Tensor:
        o = ORIGINAL[0](x)
        return o / o.float().norm(dim=-1, keepdim=True).clamp(min=1e-12).to(o.dtype) / muon.row_scale(*o.shape[-2:])

    muon.orthogonalize = orthogonalize


def second_moments() -> None:
    """NorMuon: rows of the update are divided by the root of a running mean of their squares, β₂ = 0.95."""
    moments: dict[torch.Size, Tensor] = {}

    def orthogonalize(x: Tensor) -> Tensor:
        o = ORIGINAL[0](x).float()
        squares = o.square().mean(dim=-1, keepdim=True)
        v = moments.setdefault(x.shape, torch.zeros_like(squares)).lerp_(squares, 0.05)
        scaled = o / (v.sqrt() + 1e-12)
        lengths = [t.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-12) for t in (o, scaled)]
        return (scaled * lengths[0] / lengths[1]).to(x.dtype)

    muon.orthogonalize = orthogonalize


def with_descent(
    change: Callable[[Tensor, Tensor, ParameterState, float, float], Tensor], constrained: bool = True
) -> None:
    """Replace W − lr · scale · update, before constraint and copy."""

    def descend(states: Sequence[ParameterState], updates: Sequence[Tensor], lr: float, scale: float) -> None:
        for state, update in zip(states, updates, strict=True):
            state.weight.copy_(change(state.weight, update.float(), state, lr, scale))
        muon.finish_(states if constrained else [dataclasses.replace(s, constraint=None) for s in states])

    muon.descend_ = Operation(descend)


def sphere() -> None:
    """MuonH: W ← R · Norm(W − ηR · Norm(u)), with R the Frobenius norm at the start, instead of the bound on rows."""
    radii: dict[int, Tensor] = {}

    def change(w: Tensor, u: Tensor, state: ParameterState, lr: float, scale: float) -> Tensor:
        radius = radii.setdefault(id(state.weight), w.norm())
        moved = w - lr * radius * u / u.norm().clamp(min=1e-12)
        return moved * (radius / moved.norm())

    with_descent(change, constrained=False)


def capped_angle(cap: float) -> None:
    """A row moves by at most `cap` times its own length."""

    def change(w: Tensor, u: Tensor, state: ParameterState, lr: float, scale: float) -> Tensor:
        step = lr * scale * u
        limit = cap * w.norm(dim=-1, keepdim=True) / step.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return w - step * limit.clamp(max=1.0)

    with_descent(change)


def row_norms() -> None:
    """Muown: W = diag(g) V with rows of V of length 1; Muon turns V, and g follows its own gradient as Adam would."""
    squares: dict[int, Tensor] = {}

    def change(w: Tensor, u: Tensor, state: ParameterState, lr: float, scale: float) -> Tensor:
        length = w.norm(dim=-1, keepdim=True)
        v = w / length.clamp(min=1e-12)
        along = (state.exp_avg * v).sum(dim=-1, keepdim=True)  # gradient of g
        second = squares.setdefault(id(state.weight), torch.zeros_like(along)).lerp_(along.square(), 0.05)
        turned = v - lr * scale * u
        return (length - 0.1 * lr * along / (second.sqrt() + 1e-12)) * turned / turned.norm(dim=-1, keepdim=True)

    with_descent(change)


def rate_of(pattern: str, factor: float) -> None:
    """Another rate of Adam for the parameters whose name contains the pattern: embedding, head, α or s_z."""

    def update(self: Optimizer, gradients: Sequence[Tensor], clip: Tensor, number: int, lr: float) -> None:
        before = [state.weight.clone() if pattern in NAMES[i] else None for i, state in enumerate(self.states)]
        ORIGINAL[2](self, gradients, clip, number, lr)
        for state, old in zip(self.states, before, strict=True):
            if old is not None:  # the step of Adam, scaled; then the constraint again
                state.weight.copy_(old + factor * (state.weight - old))
        muon.finish_([state for state, old in zip(self.states, before, strict=True) if old is not None])

    Optimizer.update = update  # type: ignore[method-assign]


NAMES: list[str] = []
RATES = {"lr": 0.046, "adam_lr": 0.0098}
"""Those of Muon without a change: near the best for anGPT at 40M tokens."""
RELATIVES: dict[str, tuple[Callable[[], None] | None, Changes]] = {
    "muon": (None, {}),
    "rate 0.02": (None, {"lr": 0.02}),
    "rate 0.08": (None, {"lr": 0.08}),
    "unit rows": (unit_rows, {}),
    "per-row second moments": (second_moments, {}),
    "Frobenius sphere": (sphere, {}),
    "row-norm factorisation": (row_norms, {}),
    "angle cap 0.02": (lambda: capped_angle(0.02), {}),
    "momentum 0.9": (None, {"momentum": 0.9}),
    "embedding × 3": (lambda: rate_of("W_e", 3.0), {}),
    "embedding × 1/3": (lambda: rate_of("W_e", 1 / 3), {}),
    "head × 3": (lambda: rate_of("W_h", 3.0), {}),
    "head × 1/3": (lambda: rate_of("W_h", 1 / 3), {}),
    "α × 3": (lambda: rate_of("alpha", 3.0), {}),
    "α × 1/3": (lambda: rate_of("alpha", 1 / 3), {}),
    "s_z × 3": (lambda: rate_of("s_z", 3.0), {}),
    "s_z × 1/3": (lambda: rate_of("s_z", 1 / 3), {}),
    "stored scale 0.001": (None, {"stored_scale": 0.001}),
    "stored scale 0.03": (None, {"stored_scale": 0.03}),
}


def configuration(args: argparse.Namespace, changes: Changes, seed: int) -> TrainConfig:
    scale, optimizer = changes.get("stored_scale"), {k: v for k, v in changes.items() if k != "stored_scale"}
    model = {"architecture": args.architecture, "d_model": args.width, "n_layers": 6, "n_heads": 4}
    model |= {"stored_scale": scale} if scale else {}
    values = {
        "model": model,
        "data": {"path": args.data, "tuning_split": 0.01},
        "optimizer": {"name": "muon", **RATES, **optimizer},
        "tokens": args.tokens,
        "batch_tokens": args.batch,
        "eval_tokens": 1_000_000_000,
        "layers_every": 0,
        "seed": seed,
    }
    return from_dict(TrainConfig, values)


def run_all(args: argparse.Namespace) -> None:
    torch._dynamo.config.recompile_limit = 64
    torch.compiler.reset = lambda: None  # type: ignore[assignment]  # compiled code stays for the next run
    wall = 30.0
    for seed in args.seeds:
        for name, (install, changes) in RELATIVES.items():
            folder = folder_of(args, name, seed)
            if (folder / "summary.json").exists() or name not in chosen(args):
                continue
            if seed != args.seeds[0] and first_difference(args, name) > args.drop:
                continue
            begin = time.monotonic()
            if begin - START + 1.05 * wall > args.seconds:
                print(f"{folder.name} would not end in time; the same command goes on from here")
                return
            muon.orthogonalize, muon.descend_, Optimizer.update = ORIGINAL  # type: ignore[method-assign]
            config = configuration(args, changes, seed)
            if install is not None:
                install()
            gc.collect()
            launch.start(config, folder, reporter.Quiet(), again=True)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            wall = time.monotonic() - begin
            print(f"{begin - START:5.0f} s + {wall:.1f} s {folder.name} {loss(folder)}", flush=True)


def chosen(args: argparse.Namespace) -> Sequence[str]:
    return args.only or list(RELATIVES)


def folder_of(args: argparse.Namespace, name: str, seed: int) -> Path:
    base: Path = args.runs
    return base / f"{args.architecture}-{name.replace(' ', '-').replace('/', '.')}-s{seed}"


def first_difference(args: argparse.Namespace, name: str) -> float:
    return loss(folder_of(args, name, args.seeds[0])) - loss(folder_of(args, "muon", args.seeds[0]))


def loss(folder: Path) -> float:
    if not (folder / "summary.json").exists():
        return math.nan
    summary = json.loads((folder / "summary.json").read_text())
    return summary["val_loss"] if summary["status"] == "finished" else math.inf


def table(args: argparse.Namespace) -> str:
    lines = ["| | seeds | loss | difference | standard error | verdict |", "|---|---|---|---|---|---|"]
    for name in RELATIVES:
        pairs = [(loss(folder_of(args, name, s)), loss(folder_of(args, "muon", s))) for s in args.seeds]
        pairs = [(a, b) for a, b in pairs if not math.isnan(a) and not math.isnan(b)]
        if not pairs:
            continue
        if any(math.isinf(a) or math.isinf(b) for a, b in pairs):
            lines.append(f"| {name} | {len(pairs)} | diverged | | | loses |")
            continue
        differences = [a - b for a, b in pairs]
        mean = statistics.fmean(differences)
        error = statistics.stdev(differences) / len(pairs) ** 0.5 if len(pairs) > 1 else math.inf
        verdict = "wins" if mean < -2 * error else "loses" if mean > 2 * error else "not told apart"
        if name == "muon":
            verdict = ""
        elif len(pairs) == 1:
            verdict = "worse by more than the limit" if mean > args.drop else "one seed only"
        mine, width = statistics.fmean(a for a, _ in pairs), f"{error:.4f}" if len(pairs) > 1 else "–"
        lines.append(f"| {name} | {len(pairs)} | {mine:.4f} | {mean:+.4f} | {width} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data", help="folder of tokens; without it nothing is trained")
    parser.add_argument("--architecture", default="angpt", choices=("gpt+", "ngpt", "angpt"))
    parser.add_argument("--drop", type=float, default=0.01)
    parser.add_argument("--tokens", default="40M")
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--only", nargs="*", choices=tuple(RELATIVES))
    args = parser.parse_args()
    if args.data:
        with torch.device("meta"):
            NAMES.extend(dict(build(configuration(args, {}, 0).model).named_parameters()))
        run_all(args)
    print(table(args))


if __name__ == "__main__":
    main()
