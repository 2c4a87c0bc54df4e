"""Measurements in turns, in changing order, and their statistics.

Drift of the machine then affects all equally, and so does the state in which one leaves it to the next: a GPU at its
power limit takes seconds to settle at the clock of the current work.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from angpt.stats import Interval, mean_interval
from angpt.system import write_atomically
from angpt.training.hardware import synchronize
from angpt.training.run import environment


def in_turns(
    functions: Mapping[Any, Callable[[], Any]], device: torch.device, rounds: int, calls: int = 1
) -> dict[Any, list[float]]:
    """Seconds per call of each function in each round; the device is synchronized before and after each turn."""
    seconds: dict[Any, list[float]] = {name: [] for name in functions}
    for order in orders(list(functions), rounds):
        for name in order:
            with timed(device, seconds[name], calls):
                for _ in range(calls):
                    functions[name]()
    return seconds


@contextmanager
def timed(device: torch.device, seconds: list[float], calls: int = 1) -> Iterator[None]:
    """Append the time of the block, per call, to `seconds`."""
    synchronize(device)
    start = time.perf_counter()
    yield
    synchronize(device)
    seconds.append((time.perf_counter() - start) / calls)


def orders(names: Sequence[Any], rounds: int) -> Iterator[Sequence[Any]]:
    """The order of each round: forward and backward from each name in turn. Three names give all six orders."""
    for number in range(rounds):
        first = number // 2 % len(names)
        order = [*names[first:], *names[:first]]
        yield order[::-1] if number % 2 else order


def median(seconds: Sequence[float]) -> Interval:
    """The median, with the quartiles as its interval."""
    low, value, high = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    return Interval(value, low, high)


def ratio(seconds: Sequence[float], base: Sequence[float]) -> Interval:
    """The mean ratio of a round (geometric), with its 95 % interval by Student's t. A round has both, so that drift
    cancels; one alone gives no interval."""
    return mean_interval(np.log(np.divide(seconds, base)).tolist()).exp()


def between(value: Interval, form: str, ends: bool = True) -> tuple[str, str]:
    """Two cells of a table: the value, and the ends of its interval if it has one, unless `ends` is false."""
    return f"{value.mean:{form}}", f"{value.low:{form}}–{value.high:{form}}" if ends and value.low is not None else ""


def within(value: Interval, form: str) -> str:
    """A cell of a table: the value, with its interval in brackets if it has one."""
    text, ends = between(value, form)
    return f"{text} ({ends})" if ends else text


def write_json(path: Path | None, device: torch.device, results: Sequence[Any]) -> None:
    """Write the results (dataclasses) with the command and the machine."""
    if path is not None:
        record = {"command": ["angpt", *sys.argv[1:]], "environment": environment(device), "results": results}
        write_atomically(path, json.dumps(record, indent=1, default=_fields) + "\n")


def _fields(result: Any) -> dict[str, Any]:
    if isinstance(result, Interval):
        return {"value": result.mean, "low": result.low, "high": result.high}
    return vars(result)
