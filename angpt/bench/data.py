"""`angpt bench data`: tokens per second that reach the device, by batch size."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from angpt.bench.measure import between, in_turns, median
from angpt.data.loader import Loader, Prefetcher
from angpt.data.shards import TokenData
from angpt.present.tables import Table
from angpt.stats import Interval

BATCHES = 32
"""Batches per measurement."""


@dataclass(frozen=True)
class Result:
    context: int
    rows: int
    loader: Interval
    """Tokens per second that the loader gathers, in one thread."""
    delivered: Interval
    """Tokens per second that the prefetcher delivers to the device."""


def bench_data(path: Path, context: int, rows: Sequence[int], device: torch.device, rounds: int) -> list[Result]:
    """Measure the loader alone, and the prefetcher on top of it, at each number of sequences."""
    data = TokenData.open(path, "train")
    results = []
    for count in rows:
        loader, steps = Loader(data, context, count, seed=0), itertools.count()

        def rate(call: Callable[[], object], tokens: int = count * context) -> Interval:
            in_turns({"": call}, device, 1, BATCHES)
            return median([tokens / s for s in in_turns({"": call}, device, rounds, BATCHES)[""]])

        with Prefetcher(loader, 0, device) as batches:
            delivered = rate(partial(next, batches))
        gathered = rate(lambda loader=loader, steps=steps: loader.batch(next(steps)))  # type: ignore[misc]
        results.append(Result(context, count, gathered, delivered))
    return results


def tables(results: Sequence[Result]) -> list[Table]:
    columns = ("context", "sequences", "loader", "quartiles", "on the device", "quartiles")
    rows = [
        (str(r.context), str(r.rows), *between(r.loader.times(1e-6), ",.1f"), *between(r.delivered.times(1e-6), ",.1f"))
        for r in results
    ]
    return [Table(columns, rows, "Million tokens per second", left=())]
