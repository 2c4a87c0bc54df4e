"""`angpt bench moments`: the time that recording the first moment adds to a training step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from angpt.bench.measure import between, in_turns, median, ratio
from angpt.bench.train import Case, TrainingModel, record_alike
from angpt.config import Recipe
from angpt.present.tables import Table
from angpt.stats import Interval
from angpt.training.moments import CLOSEST, MomentRecorder


@dataclass(frozen=True)
class Result:
    architecture: str
    step_ms: Interval
    record_ms: Interval
    """Time of one record; the device is synchronized before and after it."""
    overhead: Interval
    """Time of records relative to that of steps, at the shortest interval between records."""


def bench_moments(
    recipes: Sequence[Recipe], case: Case, context: int, device: torch.device, dtype: torch.dtype, rounds: int
) -> list[Result]:
    """Measure steps and records in turns, one model after the other."""
    results = []
    for recipe in recipes:
        subject = TrainingModel(recipe, case, context, device, dtype, compiled=device.type == "cuda")
        record_alike([subject])
        recorder = MomentRecorder(subject.engine.first_moments(), CLOSEST, subject.engine.strategy.whole)

        def record(recorder: MomentRecorder = recorder) -> None:
            recorder.note(CLOSEST)
            list(recorder.drain())

        in_turns({"step": subject.step, "record": record}, device, rounds=2)
        seconds = in_turns({"step": subject.step, "record": record}, device, rounds)
        step_ms, record_ms = (median(seconds[name]).times(1e3) for name in ("step", "record"))
        overhead = ratio(seconds["record"], seconds["step"]).times(1 / CLOSEST)
        results.append(Result(recipe, step_ms, record_ms, overhead))
    return results


def tables(results: Sequence[Result]) -> list[Table]:
    rows = [
        (r.architecture, f"{r.step_ms.mean:.2f}", f"{r.record_ms.mean:.3f}", *between(r.overhead.times(100), ".3f"))
        for r in results
    ]
    title = f"Recording the first moment every {CLOSEST} steps"
    return [Table(("", "step ms", "record ms", "overhead %", "95 %"), rows, title)]
