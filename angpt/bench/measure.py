"""Measuring in turns, each time in another order, and what follows from it.

Drift of the machine then falls on all alike, and so does the state in which each leaves it to the next: a GPU at its
power limit takes seconds to settle at the clock that the work at hand allows.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from angpt.errors import UserError
from angpt.stats import Interval
from angpt.system import write_atomically
from angpt.training.hardware import synchronize
from angpt.training.run import environment

RESAMPLES = 2000


def in_turns(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device,
    rounds: int,
    calls: int = 1,
) -> dict[str, list[float]]:
    """Seconds per call of each function in each round, the device idle before and after the calls of a round."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for order in orders(list(functions), rounds):
        for name in order:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                functions[name]()
            synchronize(device)
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def orders(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """Forward, backward, and then so again from the next on: in twice as many rounds as there are names, each has been
    at every place twice. For three these are all six orders."""
    for number in range(rounds):
        first = number // 2 % len(names)
        order = [*names[first:], *names[:first]]
        yield order[::-1] if number % 2 else order


def median(seconds: Sequence[float]) -> Interval:
    """Median and quartiles."""
    low, value, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    return Interval(float(value), float(low), float(high))


def ratio(seconds: Sequence[float], base: Sequence[float]) -> Interval:
    """Ratio of medians, with a 95 % interval from resampled rounds: a round holds both, so that drift cancels."""
    pairs = np.array([seconds, base])
    chosen = np.random.default_rng(0).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    tops, bottoms = np.median(pairs[:, chosen], axis=2)
    low, high = np.quantile(tops / bottoms, [0.025, 0.975])
    value = np.median(pairs[0]) / np.median(pairs[1])
    return Interval(float(value), float(low), float(high))


def between(value: Interval, form: str, ends: bool = True) -> tuple[str, str]:
    """Two cells of a table: the value, and the ends of its interval unless they say nothing."""
    return f"{value.mean:{form}}", f"{value.low:{form}}–{value.high:{form}}" if ends else ""


def positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UserError(f"--{name} {value}: at least 1 is needed")


def write_json(path: Path | None, device: torch.device, results: Sequence[Any]) -> None:
    """Write the results (dataclasses) with the machine and the command that they come from."""
    if path is not None:
        record = {"command": ["angpt", *sys.argv[1:]], "environment": environment(device), "results": results}
        write_atomically(path, json.dumps(record, indent=1, default=_fields) + "\n")


def _fields(result: Any) -> dict[str, Any]:
    if isinstance(result, Interval):
        return {"value": result.mean, "low": result.low, "high": result.high}
    return vars(result)
