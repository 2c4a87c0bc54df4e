"""Losses of training in 8 bits against bf16: the runs, in pairs that differ in the precision alone, and their table for
docs/fp8.md."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from angpt.config import ModelConfig, TrainConfig, parse_budget
from angpt.present.tables import Table
from angpt.present.words import bracketed, label
from angpt.stats import mean_interval
from experiments.evidence.items import KEPT_EVERY, Item, LossOf, configured, records

STAGE = "fp8"
ARCHITECTURES = ("angpt", "ngpt", "gpt+")
BATCHES = {"32M": 65_536, "125M": 32_768}
"""Tokens of a step by size; 100M tokens are 1,526 and 3,052 steps."""
TOKENS, SEEDS, PRECISIONS = "100M", (0, 1, 2), ("bf16", "fp8")
RECORDS = 30
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


def config(architecture: str, size: str, precision: str, seed: int) -> TrainConfig:
    """The configuration of a run: the defaults of `angpt train` for this size and budget, with Adam."""
    batch, model = BATCHES[size], ModelConfig.size(size)
    steps = round(parse_budget(TOKENS, 1) / batch)
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
    """Difference of the mean training losses of `last_tenth`, which have the same batches."""
    saturated: tuple[float, str]
    """The largest share of an input or output gradient that saturated, in any layer and record, and which it was; NaN
    without records."""

    @property
    def difference(self) -> float:
        return self.losses[1] - self.losses[0]


def read_pair(root: Path, loss: LossOf, architecture: str, size: str, seed: int) -> Pair | None:
    """The pair of a seed; None until both runs have ended."""
    names = [run_name(architecture, size, precision, seed) for precision in PRECISIONS]
    bf16, fp8 = (math.nan if end == math.inf else end for end in (loss(STAGE, name) for name in names))
    if bf16 is None or fp8 is None:
        return None
    of_both = [records(root / STAGE / name) for name in names]
    tails = [last_tenth(run) for run in of_both]
    shares = [
        (max(share), name.removesuffix("_saturated"))
        for record in of_both[1]
        if record["kind"] == "fp8"
        for name, share in record.items()
        if name.endswith("_saturated")
    ]
    return Pair((bf16, fp8), tails[1] - tails[0], max(shares, default=(math.nan, "")))


def last_tenth(run: Sequence[Mapping[str, Any]]) -> float:
    """The mean training loss of the stored steps of the last tenth of a run, which are evenly spaced; of its last step
    if there are none, and NaN without records."""
    steps = {r["step"]: r["loss"] for r in run if r["kind"] == "train" and r["loss"] is not None}
    if not steps:
        return math.nan
    last = max(steps)
    return fmean([loss for s, loss in steps.items() if s > 0.9 * last and s % KEPT_EVERY == 0] or [steps[last]])


def table(root: Path, loss: LossOf) -> Table:
    """A row for each pair and, where all seeds have ended, the mean of an architecture and size with its verdict."""
    head = ("", "size", "seed", "bf16", "fp8", "fp8 − bf16", "at the end of training", "largest share that saturates")
    rows: list[tuple[str, ...]] = []
    for size, architecture in product(BATCHES, ARCHITECTURES):
        found = [read_pair(root, loss, architecture, size, seed) for seed in SEEDS]
        for seed, pair in zip(SEEDS, found, strict=True):
            rows.append((label(architecture), size, str(seed), *_cells(pair)))
        pairs = [pair for pair in found if pair is not None]
        if len(pairs) == len(SEEDS):
            rows.append((label(architecture), size, "mean", "", "", *_means(pairs), ""))
    return Table(head, rows, left=(0,))


def _cells(pair: Pair | None) -> tuple[str, ...]:
    if pair is None:
        return "not run yet", "", "", "", ""
    losses = ["diverged" if math.isnan(loss) else f"{loss:.4f}" for loss in pair.losses]
    share, name = pair.saturated
    both = pair.difference, pair.training
    differences = ["" if math.isnan(pair.difference + x) else f"{x:+.4f}" for x in both]
    return *losses, *differences, "" if math.isnan(share) else f"{share:.2g} ({name})" if share else "0"


def _means(pairs: list[Pair]) -> tuple[str, str]:
    """Mean differences with the standard error over seeds; that of the validation losses with its 95 % interval and its
    verdict. Without a run that diverged there is no mean; if it was one in 8 bits alone, they are not equal."""
    if any(math.isnan(pair.difference) for pair in pairs):
        worse = sum(math.isnan(pair.losses[1]) and not math.isnan(pair.losses[0]) for pair in pairs)
        return (f"{worse} of {len(pairs)} diverged in fp8 alone: not equal" if worse else "no mean: diverged"), ""
    differences = [pair.difference for pair in pairs]
    mean, error = _mean(differences)
    interval = mean_interval(differences)
    certain = interval.high is not None and interval.high < LARGEST
    close = abs(mean) <= 2 * error and mean < LARGEST
    verdict = "not equal" if not close else "equal" if certain else "too noisy to tell"
    text = bracketed(interval, "+.4f").replace("]", f"], ± {error:.4f}: {verdict}")
    training = [pair.training for pair in pairs]
    if any(map(math.isnan, training)):
        return text, ""
    return text, "{:+.4f} ± {:.4f}".format(*_mean(training)).replace("-", "−")


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return fmean(values), stdev(values) / len(values) ** 0.5
