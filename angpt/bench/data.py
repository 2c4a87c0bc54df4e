"""`angpt bench data`: how many tokens per second reach the device, by batch size."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Tokens per second that arrive on the device, with what the thread does beside."""


def bench_data(path: Path, context: int, rows: Sequence[int], device: torch.device, rounds: int) -> list[Result]:
    data = TokenData.open(path, "train")
    results = []
    for count in rows:
        loader = Loader(data, context, count, seed=0)
        step = 0

        def gather(loader: Loader = loader) -> None:
            nonlocal step
            for _ in range(BATCHES):
                loader.batch(step)
                step += 1

        with Prefetcher(loader, 0, device) as batches:

            def deliver(batches: Prefetcher = batches) -> None:
                for _ in range(BATCHES):
                    next(batches)

            deliver()
            delivered = in_turns({"": deliver}, device, rounds)[""]
        gather()
        gathered = in_turns({"": gather}, device, rounds)[""]
        tokens = BATCHES * count * context
        results.append(Result(context, count, _rate(gathered, tokens), _rate(delivered, tokens)))
    return results


def _rate(seconds: Sequence[float], tokens: int) -> Interval:
    return median([tokens / s for s in seconds])


def tables(results: Sequence[Result]) -> list[Table]:
    columns = ("context", "sequences", "loader", "quartiles", "on the device", "quartiles")
    rows = [
        (str(r.context), str(r.rows), *between(r.loader.times(1e-6), ",.1f"), *between(r.delivered.times(1e-6), ",.1f"))
        for r in results
    ]
    return [Table(columns, rows, "Million tokens per second", left=())]
