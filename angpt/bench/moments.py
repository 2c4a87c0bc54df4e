"""`angpt bench moments`: what recording Adam's first moment adds to a training step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table

from angpt.bench.measure import in_turns, median, ratio
from angpt.bench.train import Subject, record_alike
from angpt.config import ModelConfig
from angpt.stats import Interval
from angpt.training.moments import CLOSEST, MomentRecorder


@dataclass(frozen=True)
class Result:
    architecture: str
    step_ms: Interval
    record_ms: Interval
    """One record, with the device idle before and after it."""
    overhead: Interval
    """Time of records over time of steps at the closest interval that a run uses."""


def bench_moments(
    configs: Sequence[ModelConfig], rows: int, device: torch.device, dtype: torch.dtype, compiled: bool, rounds: int
) -> list[Result]:
    """Steps and records in turns, for each model alone."""
    results = []
    for config in configs:
        subject = Subject(config, rows, device, dtype, compiled)
        record_alike([subject])
        recorder = MomentRecorder(subject.engine.optimizer, subject.engine.model.matrices(), CLOSEST)

        def record(recorder: MomentRecorder = recorder) -> None:
            recorder.note(CLOSEST)
            list(recorder.drain())

        in_turns({"step": subject.step, "record": record}, device, rounds=2)
        seconds = in_turns({"step": subject.step, "record": record}, device, rounds)
        results.append(
            Result(
                architecture=config.architecture,
                step_ms=median(seconds["step"]).times(1e3),
                record_ms=median(seconds["record"]).times(1e3),
                overhead=ratio(seconds["record"], seconds["step"]).times(1 / CLOSEST),
            )
        )
    return results


def table(results: Sequence[Result]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    out.title, out.title_justify = f"Recording Adam's first moment every {CLOSEST} steps", "left"
    for heading in ("", "step ms", "record ms", "overhead %", "95 %"):
        out.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for r in results:
        percent = r.overhead.times(100)
        out.add_row(
            r.architecture,
            f"{r.step_ms.mean:.2f}",
            f"{r.record_ms.mean:.3f}",
            f"{percent.mean:.3f}",
            f"{percent.low:.3f}–{percent.high:.3f}",
        )
    return out
