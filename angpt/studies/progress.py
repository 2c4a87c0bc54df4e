"""How far a study is, what is left, and what that costs: `angpt study status` and `angpt study plan`."""

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from angpt.present.tables import Table
from angpt.present.words import duration, label, plural, quantity
from angpt.results import State
from angpt.studies.cluster import in_queue
from angpt.studies.jobs import Job, ended, failure_of, state_of
from angpt.studies.study import Study
from angpt.system import available_threads
from angpt.training.hardware import peak_flops
from angpt.training.record import newest_values
from angpt.training.run import Run

ASSUMED_TFLOPS = 125.0
"""Rate of a GPU of which nothing is known: an A100 at 40 % of its 312 TFLOP/s in bf16."""
HERE = 0.4
"""Part of the matmul rate of this machine that a training is taken to reach."""
LONG_SECONDS = 100 * 3600.0
MOST_ROWS = 40


@dataclass(frozen=True)
class Progress:
    """A run, how far it is, and its newest figures."""

    job: Job
    state: State
    done: float
    """Fraction of the steps."""
    loss: float | None
    flops_per_s: float | None
    """As measured; None for a run that has not begun."""
    note: str = ""

    @property
    def left(self) -> float:
        """FLOPs that are left to do."""
        return 0.0 if self.state in ("finished", "diverged") else (1 - self.done) * self.job.flops


def progress(study: Study) -> list[Progress]:
    jobs = study.planned()
    queue = in_queue(study.folder, [job.folder.name for job in jobs]) if shutil.which("squeue") else {}
    return [_progress(job, queue.get(job.folder.name)) for job in jobs]


def _progress(job: Job, queued: str | None) -> Progress:
    summary = ended(job.folder)
    if summary is not None:
        rate = summary.tokens_per_s * summary.flops_per_token if summary.tokens_per_s else None
        done = summary.step / summary.steps
        return Progress(job, state_of(job, running=False), done, summary.val_loss, rate)
    under_way = queued == "RUNNING" or (job.folder.exists() and Run(job.folder).busy())
    state: State = "queued" if queued is not None and not under_way else state_of(job, under_way)
    record = newest_values(job.folder)
    speed, note = record.get("tokens_per_s"), failure_of(job) if state == "failed" else None
    rate = speed * job.plan.flops_per_token if speed else None
    return Progress(job, state, record.get("step", 0) / job.plan.steps, record.get("val_loss"), rate, note or "")


def seconds_left(runs: Sequence[Progress]) -> float | None:
    """Device time that the open runs need at the rates that were measured: those of the same architecture and size
    where there are some, else the mean of all. None where nothing was measured."""
    rates: dict[object, list[float]] = {}
    for run in runs:
        if run.flops_per_s:
            rates.setdefault((run.job.config.recipe, run.job.config.model), []).append(run.flops_per_s)
    if not rates:
        return None
    every = [rate for group in rates.values() for rate in group]
    total = 0.0
    for run in runs:
        own = rates.get((run.job.config.recipe, run.job.config.model), every)
        total += run.left * len(own) / sum(own)
    return total


def status_table(runs: Sequence[Progress]) -> Table:
    """A row for each run, or where they are many for each architecture and size."""
    rows: list[tuple[str, ...]] = []
    if len(runs) <= MOST_ROWS:
        for run in runs:
            left = seconds_left([run]) if run.state == "running" else None
            loss = "" if run.loss is None else f"{run.loss:.4f}"
            time = "" if left is None else duration(left)
            rows.append((run.job.folder.name, run.state, f"{run.done:.0%}", loss, time))
        return Table(("run", "state", "done", "val loss", "left"), rows, left=(0, 1))
    groups: dict[tuple[str, int], list[Progress]] = {}
    for run in runs:
        groups.setdefault((run.job.config.recipe, run.job.plan.parameters), []).append(run)
    for (architecture, parameters), members in groups.items():
        done = 1 - sum(run.left for run in members) / sum(run.job.flops for run in members)
        left = seconds_left(members)
        cells = label(architecture), quantity(parameters), str(len(members)), states(members), f"{done:.0%}"
        rows.append((*cells, "" if left is None else duration(left)))
    return Table(("architecture", "parameters", "runs", "states", "done", "left"), rows, left=(0, 3))


def states(runs: Sequence[Progress]) -> str:
    return ", ".join(f"{n} {state}" for state, n in Counter(run.state for run in runs).most_common())


def status_lines(study: Study, runs: Sequence[Progress]) -> list[str]:
    """Lines below the table: the total, the time left, and which runs failed and why."""
    whole = sum(run.job.flops for run in runs)
    left = sum(run.left for run in runs)
    lines = [f"{plural(len(runs), 'run')}: {states(runs)}; {1 - left / whole:.0%} of {whole:.3g} FLOPs done"]
    seconds, running = seconds_left(runs), sum(run.state == "running" for run in runs)
    if left and seconds is not None:
        eta = f", {duration(seconds / running)} with the {running} under way" if running else ""
        lines.append(f"left: {duration(seconds)} of device time at the rates measured so far{eta}")
    if growth := study.growth():
        lines.append(f"the grids may grow by {plural(len(growth), 'run')} at most")
    lines += [f"failed: {run.job.folder.name}: {run.note}" for run in runs if run.state == "failed"]
    return lines


def gpu_rate(study: Study, runs: Sequence[Progress]) -> float | None:
    """TFLOP/s of a GPU of which nothing is known; None for a study that is for the CPU: its file says so, or this
    machine has no GPU and would train it in reasonable time."""
    import torch

    device = study.config.train.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available() and _short(runs))
    return None if on_cpu else ASSUMED_TFLOPS


def _short(runs: Sequence[Progress]) -> bool:
    return seconds_here(sum(run.left for run in runs)) < LONG_SECONDS


def plan_table(runs: Sequence[Progress], tflops: float | None) -> Table:
    """The runs of a study and their cost: a row for each architecture, size and budget. `tflops` is the rate of a GPU;
    None: there are no GPU hours."""
    groups: dict[tuple[str, int, int], list[Progress]] = {}
    for run in runs:
        key = run.job.config.recipe, run.job.plan.parameters, int(run.job.config.tokens)
        groups.setdefault(key, []).append(run)
    rows = []
    for (architecture, parameters, tokens), members in groups.items():
        left, to_do = sum(run.left for run in members), sum(run.left > 0 for run in members)
        cells = str(len(members)), str(to_do), f"{left:.3g}", *([hours(left, tflops)] if tflops else [])
        rows.append((label(architecture), quantity(parameters), quantity(tokens), *cells))
    columns = ("architecture", "parameters", "tokens", "runs", "to do", "FLOPs", *(["GPU hours"] if tflops else []))
    return Table(columns, rows)


def plan_lines(study: Study, runs: Sequence[Progress], tflops: float | None) -> list[str]:
    left = sum(run.left for run in runs)
    to_do = sum(run.left > 0 for run in runs)
    on_gpu = f", {hours(left, tflops)} GPU hours at {tflops:g} TFLOP/s" if tflops else ""
    of = f"{to_do} of {plural(len(runs), 'run')} to do"
    lines = [f"{of}: {left:.3g} FLOPs{on_gpu} (evaluation and compiling not counted)"]
    measured = seconds_left(runs)
    if left and measured is not None:
        lines.append(f"at the rates measured in this study so far: {duration(measured)} of device time")
    elif left and (guess := seconds_here(left)) < LONG_SECONDS:
        lines.append(f"on this machine: about {duration(guess)} ({HERE:.0%} of its matmul rate)")
    if growth := study.growth():
        flops = sum(job.flops for job in growth)
        lines.append(
            f"the grids grow while their best point is at an edge: by {plural(len(growth), 'run')} and "
            f"{f'{hours(flops, tflops)} GPU hours' if tflops else f'{flops:.3g} FLOPs'} at most"
        )
    return lines


def seconds_here(flops: float) -> float:
    """The time on all devices of this machine: a guess, for a study of which nothing was measured yet."""
    import torch

    if devices := torch.cuda.device_count():
        rate = devices * peak_flops(torch.device("cuda"), torch.bfloat16)
    else:
        torch.set_num_threads(1)  # the cores are shared among runs, not within one
        rate = available_threads() * peak_flops(torch.device("cpu"), torch.float32)
    return flops / (HERE * rate)


def gpu_hours(flops: float, tflops: float) -> float:
    return flops / (tflops * 1e12) / 3600


def hours(flops: float, tflops: float) -> str:
    value = gpu_hours(flops, tflops)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
