"""A comparison made by hand: run folders with invented curves and tiny checkpoints, and the result of them."""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from angpt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from angpt.data.loader import Batch
from angpt.data.tokenizers import load_tokenizer
from angpt.models.variants import build
from angpt.results import Cost, Result, Row, RunResult, SpeedUp
from angpt.stats import Interval
from angpt.training import checkpoint
from angpt.training.layers import layer_scalars
from angpt.training.run import Run, Summary
from angpt.training.strategy import SingleProcess

BUDGETS = (40_000, 80_000)
SEEDS = (0, 1)
ARCHITECTURES = ("gpt+", "ngpt", "angpt")
BATCH = 1_000


def make_data(folder: Path, tokenizer: bool = True) -> Path:
    """Raw tokens of bytes, with or without the tokenizer beside them."""
    folder.mkdir()
    text = b"def f(x):\n    return x + 1  # <b>no markup</b>\n" * 40
    for split in ("train", "val"):
        np.frombuffer(text, np.uint8).astype("<u2").tofile(folder / f"{split}.bin")
    if tokenizer:
        load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    return folder


def make_run(folder: Path, run: RunResult, data: Path, layers: bool = True, saved: bool = True) -> Path:
    """A run folder as a trainer leaves it, up to the progress of `run`."""
    import torch

    model_config = ModelConfig(architecture="angpt", d_model=16, n_layers=3, n_heads=2, vocab_size=257, context=32)
    if run.architecture in ARCHITECTURES:
        model_config = dataclasses.replace(model_config, architecture=run.architecture)
    config = TrainConfig(
        model=model_config,
        data=DataConfig(path=str(data)),
        optimizer=OptimizerConfig(lr=run.lr),
        tokens=str(run.tokens),
        batch_tokens=BATCH,
        seed=run.seed,
        device="cpu",
        precision="fp32",
    )
    made = Run.create(folder, config)
    model = build(model_config, run.seed)
    zeros = torch.zeros(1, 8, dtype=torch.long)
    scalars = layer_scalars(model, Batch(zeros, zeros, None), SingleProcess())
    steps = run.tokens // BATCH
    done = round(run.progress * steps)
    lines: list[dict[str, Any]] = []
    for step in range(0, done + 1, max(1, steps // 20)):
        head = {"step": step, "tokens": step * BATCH}
        if layers:
            lines.append({"kind": "layers", **head, **grown(scalars, step / steps)})
        if step:
            lines.append({"kind": "train", **head, "loss": curve(run, step / steps), "lr": run.lr,
                          "grad_norm": 1 + math.cos(step) / 2, "mfu": None, "seconds": 0.1 * step})  # fmt: skip
            lines.append({"kind": "val", **head, "val_loss": curve(run, step / steps), "seconds": 0.1 * step})
    if run.status == "diverged":
        head = {"step": done, "tokens": done * BATCH}
        lines.append({"kind": "val", **head, "val_loss": None, "seconds": 0.1 * done})
        lines.append({"kind": "layers", **head, "input_norm": [1.0, None, None, None], "W_e": None})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    made.metrics.write_text(text + ('{"kind": "tr' if run.status == "stopped" else ""))
    if saved:
        state = checkpoint.State(
            done, model_config.architecture, 0, 0.1 * done, run.val_loss, "", None, {}, made.config()
        )
        checkpoint.save(made.checkpoints, model.state_dict(), {}, state, keep=1)
    if run.status in ("finished", "diverged"):
        made.write_summary(
            Summary(run.status, done, steps, done * BATCH, run.val_loss, 0.1 * done, 0.0, 1e4, 0.5, 20_000, 10**5,
                    f"step-{done:09d}", {"angpt": "0.1", "torch": "2.13.0", "cpu": "A <fast> one", "commit": "c0ffee"})
        )  # fmt: skip
    return folder


def curve(run: RunResult, progress: float) -> float:
    quality = {"gpt+": 2.5, "ngpt": 2.4}.get(run.architecture, 2.3)
    return quality + 4 * math.exp(-6 * progress) + 2_000 / run.tokens + 0.01 * run.seed


def grown(scalars: dict[str, Any], progress: float) -> dict[str, Any]:
    return {
        name: [v * (1 + progress * i) for i, v in enumerate(values)] if isinstance(values, list) else values
        for name, values in scalars.items()
    }


def run_result(name: str, architecture: str, tokens: int, seed: int, val_loss: float, seconds: float) -> RunResult:
    """A run that has finished."""
    steps = tokens // BATCH
    return RunResult(
        name, architecture, "", 20_000, tokens, BATCH, 0.01, seed, "finished", 1.0, val_loss, steps, 1e9, seconds, 0.5
    )


def run_results(architectures: Iterable[str] = ARCHITECTURES, budgets: Iterable[int] = BUDGETS) -> list[RunResult]:
    return [
        run_result(f"{number}-{budget}-{seed}", architecture, budget, seed, 2.5 + 0.1 * seed, 8.0)
        for number, architecture in enumerate(architectures)
        for budget in budgets
        for seed in SEEDS
    ]


def make_result(runs: Sequence[RunResult], complete: bool = True) -> Result:
    """Numbers with many digits, so that a page that shows others is found out."""
    architectures = tuple(dict.fromkeys(run.architecture for run in runs))
    budgets = tuple(sorted({run.tokens for run in runs}))
    rows, costs = [], []
    for i, architecture in enumerate(architectures):
        step = 100.123 + 7.77 * i
        more = Interval(0.0776 * i, 0.0776 * i - 0.0102, 0.0776 * i + 0.0102, 4) if i else None
        costs.append(
            Cost(architecture, "", 20_000 + i, Interval(step, step - 1.5, step + 1.5, 4), more, 0.5 + 0.01 * i)
        )
        for j, budget in enumerate(budgets):
            mine = [run for run in runs if (run.architecture, run.tokens) == (architecture, budget)]
            n = sum(run.status == "finished" for run in mine)
            mean, half = 2.71828 - 0.1234 * i - 0.2345 * j, 0.012345 * (1 + i)
            loss = Interval(mean, mean - half if n > 1 else None, mean + half if n > 1 else None, n) if n else None
            tokens = SpeedUp(1.41421 + i, 1.31, 1.55, "=") if j == 0 else SpeedUp(1.73205 + i, None, None, ">")
            time = SpeedUp(0.87654 / i, None, None, "<") if i else None
            diverged = sum(run.status == "diverged" for run in mine)
            names = tuple(run.name for run in mine)
            speedups = tokens if i and n else None, time if n else None
            best = (BATCH, 0.01, 0, 0, 1, len(mine), diverged)
            rows.append(Row(architecture, "", str(budget), 20_000 + i, budget, *best, loss, None, *speedups, names))
    return Result(
        baseline=architectures[0],
        complete=complete,
        verdicts={"": f"{architectures[-1]} needs fewer tokens."},
        rows=tuple(sorted(rows, key=lambda row: row.tokens)),
        costs=tuple(costs),
        notes=(),
        runs=tuple(runs),
    )


def make_study(folder: Path, runs: Sequence[RunResult], data: Path, **options: bool) -> list[Path]:
    """The run folders of those that have started."""
    return [make_run(folder / "runs" / run.name, run, data, **options) for run in runs if run.status != "waiting"]
