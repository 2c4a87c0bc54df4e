"""The input of every fit: run records from run folders or CSV files, averaged over seeds.

Notes say which runs were left out or merged; every output repeats them.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from angpt.errors import UserError, nearest
from angpt.present.words import LABELS
from angpt.stats import mean_log

COLUMNS = {
    "architecture": "name of the architecture; `model` if the column is missing",
    "parameters": "all parameters, including embedding and head",
    "tokens": "tokens trained on",
    "loss": "validation loss; empty, nan or inf: diverged",
    "batch_tokens": "tokens per step",
    "lr": "peak learning rate",
    "seed": "runs that differ only in it are averaged",
    "settings": "other settings, as text; of runs that differ only in it, the best is taken",
    "embedding_parameters": "parameters of the embedding, for --count head or none",
    "head_parameters": "parameters of the head, for --count none",
    "attention_flops": "FLOPs of attention per token, for --attention",
    "flops": "training FLOPs of the run, for --count given",
    "run": "name of the run; its rows are the points of its curve, the one with the most tokens is the end",
}
"""Columns of a CSV file, with their meaning."""
REQUIRED = ("parameters", "tokens", "loss")
POSITIVE = ("parameters", "tokens", "batch_tokens", "lr", "embedding_parameters", "head_parameters", "flops")
NUMBERS = (*POSITIVE, "attention_flops")
Status = Literal["finished", "diverged", "unfinished"]
Count = Literal["all", "head", "none", "given"]
"""Choices of --count; see compute.py."""


@dataclass(frozen=True)
class Record:
    """One run."""

    source: str
    """Its folder, or file and line, for messages."""
    architecture: str
    parameters: float
    tokens: float
    loss: float
    """Final loss; NaN if the run diverged."""
    status: Status = "finished"
    batch_tokens: float | None = None
    lr: float | None = None
    seed: str = "0"
    settings: str = ""
    embedding_parameters: float | None = None
    head_parameters: float | None = None
    attention_flops: float | None = None
    flops: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    """(tokens, loss) of every evaluation, the last included; empty if unknown or not read."""

    @property
    def point(self) -> tuple[object, ...]:
        """The settings that are equal in runs which differ only in the seed."""
        return self.architecture, self.parameters, self.tokens, self.batch_tokens, self.lr, self.settings


@dataclass(frozen=True)
class Cell:
    """The runs with equal settings, averaged over seeds."""

    record: Record
    """One of the runs; everything but its loss and seed holds for all."""
    log_loss: float
    """Mean of the log losses."""
    seeds: int
    diverged: int
    """Number of further runs with these settings, which diverged."""


@dataclass(frozen=True)
class RunTable:
    """The runs that a fit reads, averaged over seeds."""

    cells: tuple[Cell, ...]
    diverged: tuple[Record, ...]
    notes: tuple[str, ...]

    def architectures(self) -> list[str]:
        return list(dict.fromkeys(cell.record.architecture for cell in self.cells))


def read_table(sources: Sequence[Path], needed: Iterable[str] = (), curves: bool = False) -> RunTable:
    """The runs of study folders, run folders and CSV files; every finished one must have the `needed` columns."""
    if not sources:
        raise UserError("name study folders, run folders or CSV files to read runs from")
    records: list[Record] = []
    notes: list[str] = []
    seen: set[Path] = set()
    for source in sources:
        if not source.exists():
            raise UserError(f"{source}: does not exist")
        if not source.is_dir():
            records += _csv_records(source, notes)
            continue
        runs = source / "runs" if (source / "study.toml").exists() else source  # without trials
        folders = {path.resolve(): path for path in _run_folders(runs)}
        if not folders:
            raise UserError(f"{source}: has no runs")
        records += [_run_record(path, curves) for key, path in folders.items() if key not in seen]
        seen |= set(folders)
    for name in needed:
        if missing := [r for r in records if r.status == "finished" and getattr(r, name) is None]:
            raise UserError(
                f"{missing[0].source}: has no {name} ({COLUMNS[name]}), which this fit needs; "
                f"it is missing in {len(missing):,} of {len(records):,} runs"
            )
    return average(records, notes)


def average(records: Sequence[Record], notes: Sequence[str] = ()) -> RunTable:
    """Average the finished runs over seeds, without those that diverged or did not finish."""
    total = len(records)
    diverged = tuple(r for r in records if r.status == "diverged")
    unfinished = sum(r.status == "unfinished" for r in records)
    groups: dict[tuple[object, ...], list[Record]] = {}
    copies = 0
    for record in (r for r in records if r.status == "finished"):
        group = groups.setdefault(record.point, [])
        if any((r.seed, r.loss) == (record.seed, record.loss) for r in group):
            copies += 1
        else:
            group.append(record)
    if not groups:
        raise UserError(f"none of the {total:,} runs has finished with a finite loss; there is nothing to fit")
    repeated = [group for group in groups.values() if len(group) > 1]
    runs, again = sum(map(len, repeated)), sum(len(group) > len({r.seed for r in group}) for group in repeated)
    lost = Counter(r.point for r in diverged)
    partly = sum(point in lost for point in groups)
    first = diverged[0].source if diverged else ""
    counted = (
        (len(diverged), f"{len(diverged):,} of {total:,} runs diverged and are left out (first: {first})"),
        (unfinished, f"{unfinished:,} of {total:,} runs have not finished and are left out"),
        (copies, f"{copies:,} runs are copies of another (same settings, seed and loss) and are left out"),
        (runs, f"{runs:,} runs differ only in the seed and are averaged (mean log loss) to {len(repeated):,} points"),
        (again, f"{again:,} points have several losses for one seed; they count as further seeds"),
        (partly, f"{partly:,} points are averages over some of their seeds; the others diverged"),
    )
    cells = [
        Cell(replace(group[0], curve=_mean_curve(group)), mean_log([r.loss for r in group]), len(group), lost[point])
        for point, group in groups.items()
    ]
    known = list(LABELS)  # the columns of Table 1 come first, in its order

    def order(cell: Cell) -> tuple[int, str, float, float]:
        r = cell.record
        rank = known.index(r.architecture) if r.architecture in known else len(known)
        return rank, r.architecture, r.parameters, r.tokens

    notes = (*notes, *(note for count, note in counted if count))
    return RunTable(tuple(sorted(cells, key=order)), diverged, notes)


def _mean_curve(group: Sequence[Record]) -> tuple[tuple[float, float], ...]:
    """The geometric mean of the curves at the tokens where all were evaluated."""
    if len(group) == 1:
        return group[0].curve
    curves = [dict(r.curve) for r in group]
    common = sorted(set.intersection(*map(set, curves)))
    return tuple((t, math.exp(mean_log([c[t] for c in curves]))) for t in common)


def _run_folders(folder: Path) -> Iterator[Path]:
    if (folder / "config.toml").exists():
        yield folder
    elif folder.is_dir():
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):  # a hidden folder is a run that is being created
                yield from _run_folders(child)


def _run_record(path: Path, curves: bool) -> Record:
    from angpt.models.decoder import attention_flops
    from angpt.training.record import RunRecord

    record = RunRecord.open(path)
    config, summary, model = record.config, record.summary, record.config.model
    status: Status = "unfinished"
    loss = parameters = tokens = math.nan
    flops = None
    if summary is not None:
        loss = math.nan if summary.val_loss is None else summary.val_loss
        if summary.status != "interrupted":
            status = "finished" if summary.status == "finished" and summary.val_loss is not None else "diverged"
        # The planned budget, also for a run that diverged: it groups the run with others of this budget.
        tokens = summary.steps * float(config.batch_tokens or summary.tokens / summary.step)
        parameters, flops = float(summary.parameters), float(summary.flops_per_token) * tokens
    # Settings that distinguish runs, besides those with a column; logging and checkpoints do not.
    other: dict[str, Any] = {name: asdict(getattr(config, name)) for name in ("model", "data", "optimizer")}
    del other["model"]["architecture"], other["optimizer"]["lr"]
    evaluations = record.evaluations if curves and status == "finished" else ()
    table = float(model.vocab_size * model.d_model)
    return Record(
        source=str(path),
        architecture=model.architecture,
        parameters=parameters,
        tokens=tokens,
        loss=loss,
        status=status,
        batch_tokens=None if config.batch_tokens is None else float(config.batch_tokens),
        lr=config.optimizer.lr,
        seed=str(config.seed),
        settings=json.dumps(other),
        embedding_parameters=table,
        head_parameters=table,
        attention_flops=float(attention_flops(model, model.context)),
        flops=flops,
        curve=tuple((float(e.tokens), e.loss) for e in evaluations),
    )


def _csv_records(path: Path, notes: list[str]) -> list[Record]:
    records: list[Record] = []
    runs: dict[str, list[Record]] = {}
    for line, row in _csv_rows(path, notes):
        name = row.get("run", "")
        (runs.setdefault(name, []) if name else records).append(_csv_record(f"{path}:{line}", row))
    for run, points in runs.items():
        last = max(points, key=lambda r: r.tokens)
        for name in ("architecture", "parameters", "batch_tokens", "lr", "seed", "settings"):
            if any(getattr(r, name) != getattr(last, name) for r in points):
                raise UserError(f"{last.source}: rows of the run {run!r} differ in {name}")
        if twice := [t for t, n in Counter(r.tokens for r in points).items() if n > 1]:
            raise UserError(f"{last.source}: the run {run!r} has two rows at {twice[0]:g} tokens")
        curve = sorted((r.tokens, r.loss) for r in points if r.status == "finished")
        records.append(replace(last, curve=tuple(curve)))
    if not records:
        raise UserError(f"{path}: has no runs")
    return records


def _csv_rows(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, reader.fieldnames, notes)
            for row in reader:
                values = {k: (v or "").strip() for k, v in row.items() if k is not None}
                if None in row or None in row.values():
                    raise UserError(f"{path}:{reader.line_num}: its number of cells differs from the first line's")
                if any(values.values()):
                    yield reader.line_num, values
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV ({error})") from error


def _check_columns(path: Path, found: Sequence[str] | None, notes: list[str]) -> None:
    names = list(found or ())
    if missing := [name for name in REQUIRED if name not in names]:
        raise UserError(
            f"{path}: has no column {' and no column '.join(missing)} (found: {', '.join(names) or 'nothing'}); "
            "docs/fits.md lists the columns"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{path}: has the column {Counter(names).most_common(1)[0][0]} twice")
    for name in (unknown := [name for name in names if name not in COLUMNS]):
        if (hint := nearest(name, set(COLUMNS) - set(names))).startswith("did you mean"):
            raise UserError(f"{path}: unknown column {name!r}: {hint} (if it should be ignored, rename it)")
    if unknown:
        notes.append(f"{path.name}: unused columns: {', '.join(unknown)}")


def _csv_record(source: str, row: dict[str, str]) -> Record:
    def number(name: str) -> float | None:
        text = row.get(name, "")
        if not text and name not in REQUIRED:
            return None
        value = _number(source, name, text)
        if not math.isfinite(value) or value < 0 or (value == 0 and name in POSITIVE):
            raise UserError(f"{source}: {name} = {text} must be positive and finite")
        return value

    text = row["loss"].lower()
    loss = math.nan if text in ("", "diverged", "none", "null") else _number(source, "loss", text)
    if loss <= 0:
        raise UserError(f"{source}: loss = {text} must be positive")
    finite = math.isfinite(loss)
    numbers: dict[str, Any] = {name: number(name) for name in NUMBERS}
    return Record(
        source=source,
        architecture=row.get("architecture", "") or "model",
        loss=loss if finite else math.nan,
        status="finished" if finite else "diverged",
        seed=row.get("seed", "") or "0",
        settings=row.get("settings", ""),
        **numbers,
    )


def _number(source: str, name: str, text: str) -> float:
    if not text:
        raise UserError(f"{source}: {name} is empty")
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{source}: {name} = {text!r} is not a number") from None
