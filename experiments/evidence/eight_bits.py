"""Losses of training in 8 bits against bf16: the runs, in pairs that differ in the precision alone, and their table for
docs/fp8.md."""

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from angpt.config import ModelConfig
from angpt.present.tables import Table
from angpt.present.words import label
from experiments.evidence.protocol import EVIDENCE, Item, Protocol, configured

STAGE = "fp8"
ARCHITECTURES = ("angpt", "ngpt", "gpt+")
BATCHES = {"32M": 65_536, "125M": 32_768}
"""Tokens of a step by size; 100M tokens are 1,526 and 3,052 steps."""
TOKENS, SEEDS, PRECISIONS = "100M", (0, 1, 2), ("bf16", "fp8")
RECORDS = 100
"""Records of saturated numbers per run."""
LARGEST = 0.01
"""A mean difference of losses above this is a cost, whatever its standard error."""


def run_name(architecture: str, size: str, precision: str, seed: int) -> str:
    return f"{architecture}-{size}-{precision}-s{seed}"


def items() -> Iterator[Item]:
    """All runs: small models first, anGPT before the others, and both precisions of a pair one after the other."""
    for size, architecture, seed, precision in product(BATCHES, ARCHITECTURES, SEEDS, PRECISIONS):
        build = partial(config, architecture, size, precision, seed)
        yield Item(STAGE, run_name(architecture, size, precision, seed), build)


def config(architecture: str, size: str, precision: str, seed: int) -> Any:
    """The configuration of a run: the defaults of `angpt train` for this size and budget, with Adam."""
    batch, model = BATCHES[size], ModelConfig.size(size)
    steps = round(float(TOKENS[:-1]) * 1e6 / batch)
    in_8_bits = precision == "fp8"
    return configured(
        {
            "model": {
                "architecture": architecture,
                "d_model": model.d_model,
                "n_layers": model.n_layers,
                "n_heads": model.n_heads,
            },
            "data": {"path": "data/all"},
            "tokens": TOKENS,
            "batch_tokens": batch,
            "micro_batch": batch // model.context,
            "precision": precision,
            "record_fp8": in_8_bits,
            "layers_every": steps // RECORDS if in_8_bits else 0,
            "eval_tokens": 1_000_000_000,
            "checkpoint_every": steps,
            "seed": seed,
        }
    )


@dataclass(frozen=True)
class Pair:
    """A run in bf16 and the same in 8 bits."""

    losses: tuple[float, float]
    """Validation losses; NaN of one that diverged."""
    training: float
    """Difference of the mean training losses of the last tenth of the steps, which have the same batches."""
    saturated: tuple[float, str]
    """The largest share of an input or output gradient that saturated, in any layer and record, and which it was."""

    @property
    def difference(self) -> float:
        return self.losses[1] - self.losses[0]


def read_pair(root: Path, architecture: str, size: str, seed: int) -> Pair | None:
    """The pair of a seed; None until both runs have ended."""
    protocol = Protocol((root,))
    names = [run_name(architecture, size, precision, seed) for precision in PRECISIONS]
    losses = [protocol.loss(STAGE, name) for name in names]
    low, high = (math.nan if loss == math.inf else loss for loss in losses)
    if low is None or high is None:
        return None
    records = [_records(root / STAGE / name) for name in names]
    tails = [_last_tenth([r["loss"] for r in run if r["kind"] == "train"]) for run in records]
    shares = [
        (max(share), name.removesuffix("_saturated"))
        for record in records[1]
        if record["kind"] == "fp8"
        for name, share in record.items()
        if name.endswith("_saturated")
    ]
    return Pair((low, high), tails[1] - tails[0], max(shares, default=(math.nan, "")))


def _records(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "metrics.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _last_tenth(losses: list[float]) -> float:
    return fmean(losses[-max(1, len(losses) // 10) :])


def table(root: Path = EVIDENCE) -> Table:
    """A row for each pair and, where all seeds have ended, the mean of an architecture and size with its verdict."""
    head = ("", "size", "seed", "bf16", "fp8", "fp8 − bf16", "at the end of training", "largest share that saturates")
    rows: list[tuple[str, ...]] = []
    for size, architecture in product(BATCHES, ARCHITECTURES):
        pairs = [read_pair(root, architecture, size, seed) for seed in SEEDS]
        for seed, pair in zip(SEEDS, pairs, strict=True):
            rows.append((label(architecture), size, str(seed), *_cells(pair)))
        known = [pair for pair in pairs if pair is not None and not math.isnan(pair.difference)]
        if len(known) == len(SEEDS):
            rows.append((label(architecture), size, "mean", "", "", *_means(known), ""))
    return Table(head, rows, left=(0,))


def _cells(pair: Pair | None) -> tuple[str, ...]:
    if pair is None:
        return "not run yet", "", "", "", ""
    losses = ["diverged" if math.isnan(loss) else f"{loss:.4f}" for loss in pair.losses]
    share, name = pair.saturated
    differences = ["" if math.isnan(pair.difference) else f"{x:+.4f}" for x in (pair.difference, pair.training)]
    return *losses, *differences, f"{share:.2g} ({name})" if share else "0"


def _means(pairs: list[Pair]) -> tuple[str, str]:
    """Mean differences with the standard error over seeds; that of the validation losses with its verdict."""
    found = []
    for values in ([pair.difference for pair in pairs], [pair.training for pair in pairs]):
        mean, error = fmean(values), stdev(values) / len(values) ** 0.5
        found.append((mean, error, f"{mean:+.4f} ± {error:.4f}"))
    mean, error, text = found[0]
    return f"{text}: {'equal' if abs(mean) <= 2 * error and mean < LARGEST else 'not equal'}", found[1][2]
