"""Relatives of Muon on equal terms: a 32M anGPT, 40M tokens, every change alone, losses on the tuning split.

Each is compared with Muon as it is, seed by seed: one is kept only if the mean difference is below zero by two standard
errors. With three seeds that alone is weak (p = 0.09, and there are many): what wins is repeated with fresh seeds. A
relative that is worse than Muon by more than `DROP` with the first seed is not repeated."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from angpt.operations import Operation
from angpt.optim import muon
from angpt.optim.optimizer import Optimizer
from angpt.optim.states import ParameterState
from experiments.evidence.items import Item, LossOf, configured

ORIGINAL = muon.orthogonalize, muon.descend_, Optimizer.update, Optimizer.__init__
Changes = dict[str, Any]
STAGE, BASE = "relatives", "muon"
SEEDS, DROP = (0, 1, 2), 0.01


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

    chosen: set[int] = set()

    def begin(self: Optimizer, parameters: Mapping[str, Tensor], *args: Any, **options: Any) -> None:
        ORIGINAL[3](self, parameters, *args, **options)
        chosen.clear()
        chosen.update(id(parameter) for name, parameter in parameters.items() if pattern in name)

    def update(self: Optimizer, gradients: Sequence[Tensor], clip: Tensor, number: int, lr: float) -> None:
        before = [(state, state.weight.clone()) for state in self.states if id(state.parameter) in chosen]
        ORIGINAL[2](self, gradients, clip, number, lr)
        for state, old in before:  # the step of Adam, scaled; then the constraint again
            state.weight.copy_(old + factor * (state.weight - old))
        muon.finish_([state for state, _ in before])

    Optimizer.__init__ = begin  # type: ignore[method-assign]
    Optimizer.update = update  # type: ignore[method-assign]


MODEL: dict[str, Any] = {"architecture": "angpt", "d_model": 256, "n_layers": 6, "n_heads": 4}
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


@contextmanager
def installed(name: str) -> Iterator[None]:
    """Train with a change of Muon inside a `with` block."""
    install, _ = RELATIVES[name] if name else (None, {})
    if install is not None:
        install()
    try:
        yield
    finally:
        muon.orthogonalize, muon.descend_, Optimizer.update, Optimizer.__init__ = ORIGINAL  # type: ignore[method-assign]


def folder_name(name: str, seed: int) -> str:
    return f"angpt-{name.replace(' ', '-').replace('/', '.')}-s{seed}"


def items(loss: LossOf) -> Iterator[Item]:
    """The runs that are called for: the first seed of all, then the other seeds of those that are not worse."""
    for seed in SEEDS:
        for name, (_, changes) in RELATIVES.items():
            if seed != SEEDS[0] and first_difference(loss, name) > DROP:
                continue
            own = {f"{'model' if key == 'stored_scale' else 'optimizer'}.{key}": v for key, v in changes.items()}
            rates = {"name": "muon", **RATES}
            data = {"path": "data/one", "tuning_split": 0.01}
            common = {"tokens": "40M", "batch_tokens": 65536, "eval_tokens": 1_000_000_000, "layers_every": 0}
            tables = {"model": MODEL, "data": data, "optimizer": rates}
            build = partial(configured, tables, common, own, {"seed": seed})
            waits = seed != SEEDS[0] and math.isnan(first_difference(loss, name))
            yield Item(STAGE, folder_name(name, seed), build, change=name, provisional=waits)


def first_difference(loss: LossOf, name: str) -> float:
    """Loss above that of Muon as it is with the first seed; NaN while it is not known."""
    one, base = (loss(STAGE, folder_name(which, SEEDS[0])) for which in (name, BASE))
    return math.nan if one is None or base is None else one - base


def table(loss: LossOf) -> str:
    """A row for each relative that ran, as Markdown."""
    lines = ["| | seeds | loss | difference | standard error | verdict |", "|---|---|---|---|---|---|"]
    for name in RELATIVES:
        losses = [(loss(STAGE, folder_name(name, seed)), loss(STAGE, folder_name(BASE, seed))) for seed in SEEDS]
        pairs = [(a, b) for a, b in losses if a is not None and b is not None]
        if not pairs:
            lines.append(f"| {name} | 0 | not run yet | | | |")
            continue
        if any(math.isinf(value) for pair in pairs for value in pair):
            lines.append(f"| {name} | {len(pairs)} | diverged | | | loses |")
            continue
        differences = [a - b for a, b in pairs]
        mean = statistics.fmean(differences)
        error = statistics.stdev(differences) / len(pairs) ** 0.5 if len(pairs) > 1 else math.inf
        verdict = "wins" if mean < -2 * error else "loses" if mean > 2 * error else "not told apart"
        if name == BASE:
            verdict = ""
        elif len(pairs) == 1:
            verdict = f"worse by more than {DROP:g}" if mean > DROP else "more seeds needed"
        mine, width = statistics.fmean(a for a, _ in pairs), f"{error:.4f}" if len(pairs) > 1 else "–"
        shown = "" if name == BASE else f"{mean:+.4f}".replace("-", "−")
        lines.append(f"| {name} | {len(pairs)} | {mine:.4f} | {shown} | {'' if name == BASE else width} | {verdict} |")
    return "\n".join(lines) + "\n"
