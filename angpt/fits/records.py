"""Run records, from run folders or from CSV files: what every fit starts from.

Whatever is left out or put together on the way is said in the notes, which every output repeats.
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
from angpt.results import RESULT, Result
from angpt.stats import mean_log

COLUMNS = {
    "architecture": "which model it is; `model` where the column is missing",
    "parameters": "all parameters, those of embedding and head included",
    "tokens": "tokens trained on",
    "loss": "validation loss; empty, nan or inf: diverged",
    "batch_tokens": "tokens per step",
    "lr": "peak learning rate",
    "seed": "runs that differ in it alone are averaged",
    "settings": "anything else that sets runs apart, as text; of runs that differ in it alone the best is taken",
    "embedding_parameters": "of the embedding, for --count head or none",
    "head_parameters": "of the head, for --count none",
    "attention_flops": "FLOPs of attention per token, for --attention",
    "flops": "training FLOPs of the run, for --count given",
    "run": "name of the run; rows of the same run are points of its curve, that with the most tokens its end",
}
"""Columns of a CSV file, with their meaning."""

REQUIRED = ("parameters", "tokens", "loss")
POSITIVE = ("parameters", "tokens", "batch_tokens", "lr", "embedding_parameters", "head_parameters", "flops")
Status = Literal["finished", "diverged", "unfinished"]
Count = Literal["all", "head", "none", "given"]
"""What counts as parameters and compute; see compute.py."""


@dataclass(frozen=True)
class Record:
    """One run."""

    source: str
    """Folder, or file and line, for messages."""
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
    """(tokens, loss) of the evaluations, the last included; empty where there are none or they were not asked for."""

    @property
    def point(self) -> tuple[object, ...]:
        """The settings that runs share which differ in the seed alone."""
        return self.architecture, self.parameters, self.tokens, self.batch_tokens, self.lr, self.settings


@dataclass(frozen=True)
class Cell:
    """The runs at one point, averaged over seeds."""

    record: Record
    """One of them, for everything but loss and seed."""
    log_loss: float
    """Mean of the logarithms."""
    seeds: int
    diverged: int
    """Further runs at this point, which diverged."""


@dataclass(frozen=True)
class RunTable:
    """The runs that a fit reads, averaged over seeds."""

    cells: tuple[Cell, ...]
    diverged: tuple[Record, ...]
    notes: tuple[str, ...]

    def architectures(self) -> list[str]:
        return list(dict.fromkeys(cell.record.architecture for cell in self.cells))


def read_table(sources: Sequence[Path], needed: Iterable[str] = (), curves: bool = False) -> RunTable:
    """The finished runs of study folders, run folders and CSV files, of which each must have the `needed` columns."""
    if not sources:
        raise UserError("name study folders, run folders or CSV files to read runs from")
    records: list[Record] = []
    notes: list[str] = []
    seen: set[Path] = set()
    for source in sources:
        if not source.exists():
            raise UserError(f"{source}: does not exist")
        if source.is_dir():
            folders = {path.resolve(): path for path in _study_folders(source)}
            records += [_run_record(path, curves) for key, path in folders.items() if key not in seen]
            seen |= set(folders)
            empty = not folders
        else:
            found = list(_csv_records(source, notes))
            records += found
            empty = not found
        if empty:
            raise UserError(f"{source}: holds no run")
    for name in needed:
        if missing := [r for r in records if r.status == "finished" and getattr(r, name) is None]:
            raise UserError(
                f"{missing[0].source}: has no {name} ({COLUMNS[name]}), which this fit needs; "
                f"it is missing in {len(missing):,} of {len(records):,} runs"
            )
    return average(records, notes)


def average(records: Sequence[Record], notes: Sequence[str] = ()) -> RunTable:
    """Diverged and unfinished runs set aside, the others averaged over seeds."""
    notes = list(notes)
    diverged = tuple(r for r in records if r.status == "diverged")
    unfinished = sum(r.status == "unfinished" for r in records)
    if diverged:
        notes.append(
            f"{len(diverged):,} of {len(records):,} runs diverged and are left out (first: {diverged[0].source})"
        )
    if unfinished:
        notes.append(f"{unfinished:,} of {len(records):,} runs have not finished and are left out")
    groups: dict[tuple[object, ...], list[Record]] = {}
    copies = 0
    for record in records:
        if record.status != "finished":
            continue
        group = groups.setdefault(record.point, [])
        if any((r.seed, r.loss) == (record.seed, record.loss) for r in group):
            copies += 1
        else:
            group.append(record)
    if not groups:
        raise UserError(f"none of the {len(records):,} runs has finished with a finite loss; there is nothing to fit")
    if copies:
        notes.append(f"{copies:,} runs are copies of another (same settings, seed and loss) and are left out")
    repeated = [group for group in groups.values() if len(group) > 1]
    if repeated:
        notes.append(
            f"{sum(map(len, repeated)):,} runs share their settings with others and are averaged (mean of log loss) to "
            f"{len(repeated):,} points"
        )
    again = sum(len(group) > len({r.seed for r in group}) for group in repeated)
    if again:
        notes.append(f"{again:,} points have several losses for one seed, which count like further seeds")
    lost = Counter(r.point for r in diverged)
    if partly := sum(point in lost for point in groups):
        notes.append(f"{partly:,} points are averages over some seeds, while others diverged")
    cells = [
        Cell(replace(group[0], curve=_mean_curve(group)), mean_log([r.loss for r in group]), len(group), lost[point])
        for point, group in groups.items()
    ]
    known = list(LABELS)  # the columns of Table 1 first, in its order
    cells.sort(key=lambda c: (*_rank(known, c.record.architecture), c.record.parameters, c.record.tokens))
    return RunTable(tuple(cells), diverged, tuple(notes))


def _rank(known: Sequence[str], architecture: str) -> tuple[int, str]:
    return known.index(architecture) if architecture in known else len(known), architecture


def _mean_curve(group: Sequence[Record]) -> tuple[tuple[float, float], ...]:
    """The geometric mean of the curves, wherever all were evaluated."""
    if len(group) == 1:
        return group[0].curve
    curves = [dict(r.curve) for r in group]
    common = sorted(set.intersection(*(set(c) for c in curves)))
    return tuple((t, math.exp(mean_log([c[t] for c in curves]))) for t in common)


def _study_folders(folder: Path) -> list[Path]:
    """The run folders of a study by its result, without those of its trials; of any other folder, all below it."""
    if (folder / RESULT).exists():
        runs = [folder / "runs" / run.name for run in Result.read(folder).runs]
        return [path for path in runs if path.exists()]
    return list(_run_folders(folder / "runs" if (folder / "study.toml").exists() else folder))


def _run_folders(folder: Path) -> Iterator[Path]:
    if (folder / "config.toml").exists():
        yield folder
    elif folder.is_dir():
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):  # a hidden one is a run about to begin
                yield from _run_folders(child)


def _run_record(path: Path, curves: bool) -> Record:
    from angpt.models.decoder import attention_flops
    from angpt.training.record import RunRecord

    record = RunRecord.open(path)
    config, summary = record.config, record.summary
    model, optimizer = config.model, config.optimizer
    status: Status = "unfinished"
    if summary is not None and summary.status != "interrupted":
        status = "finished" if summary.status == "finished" and summary.val_loss is not None else "diverged"
    # What sets runs apart beside architecture, size, budget, batch and rate; how they are watched and saved does not.
    other: dict[str, Any] = {name: asdict(getattr(config, name)) for name in ("model", "data", "optimizer")}
    del other["model"]["architecture"], other["optimizer"]["lr"]
    evaluations = record.evaluations if curves and status == "finished" else ()
    table = float(model.vocab_size * model.d_model)
    # Of a run that diverged, the budget that it was meant for: it sets it beside its siblings.
    tokens = (
        math.nan if summary is None else summary.steps * float(config.batch_tokens or summary.tokens / summary.step)
    )
    return Record(
        source=str(path),
        architecture=model.architecture,
        parameters=float(summary.parameters) if summary else math.nan,
        tokens=tokens,
        loss=math.nan if summary is None or summary.val_loss is None else summary.val_loss,
        status=status,
        batch_tokens=None if config.batch_tokens is None else float(config.batch_tokens),
        lr=optimizer.lr,
        seed=str(config.seed),
        settings=json.dumps(other),
        embedding_parameters=table,
        head_parameters=table,
        attention_flops=float(attention_flops(model, model.context)),
        flops=float(summary.flops_per_token) * tokens if summary else None,
        curve=tuple((float(e.tokens), e.loss) for e in evaluations),
    )


def _csv_records(path: Path, notes: list[str]) -> Iterator[Record]:
    rows = list(_csv_rows(path, notes))
    runs: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for line, row in rows:
        if name := row.get("run", ""):
            runs.setdefault(name, []).append((line, row))
        else:
            yield _csv_record(path, line, row)
    for points in runs.values():
        ends = [_csv_record(path, line, row) for line, row in points]
        last = max(ends, key=lambda r: r.tokens)
        fields = ("architecture", "parameters", "batch_tokens", "lr", "seed", "settings")
        for name in fields:
            if any(getattr(r, name) != getattr(last, name) for r in ends):
                raise UserError(f"{last.source}: rows of the run {points[0][1]['run']!r} differ in {name}")
        if twice := [t for t, n in Counter(r.tokens for r in ends).items() if n > 1]:
            raise UserError(f"{last.source}: the run {points[0][1]['run']!r} has two rows at {twice[0]:g} tokens")
        curve = sorted((r.tokens, r.loss) for r in ends if r.status == "finished")
        yield replace(last, curve=tuple(curve))


def _csv_rows(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, reader.fieldnames, notes)
            for row in reader:
                values = {k: (v or "").strip() for k, v in row.items() if k is not None}
                if None in row or None in row.values():
                    raise UserError(f"{path}:{reader.line_num}: has another number of cells than the first line")
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
    unknown = [name for name in names if name not in COLUMNS]
    for name in unknown:
        if (hint := nearest(name, set(COLUMNS) - set(names))).startswith("did you mean"):
            raise UserError(f"{path}: unknown column {name!r}: {hint} (rename it to something else to have it ignored)")
    if unknown:
        notes.append(f"{path.name}: columns that are not used: {', '.join(unknown)}")


def _csv_record(path: Path, line: int, row: dict[str, str]) -> Record:
    def number(name: str) -> float | None:
        text = row.get(name, "")
        if not text:
            if name in REQUIRED:
                raise UserError(f"{path}:{line}: {name} is empty")
            return None
        try:
            value = float(text)
        except ValueError:
            raise UserError(f"{path}:{line}: {name} = {text!r} is no number") from None
        if not math.isfinite(value) or value < 0 or (value == 0 and name in POSITIVE):
            raise UserError(f"{path}:{line}: {name} = {text} must be positive and finite")
        return value

    text = row["loss"].lower()
    try:
        loss = math.nan if text in ("", "diverged", "none", "null") else float(text)
    except ValueError:
        raise UserError(f"{path}:{line}: loss = {row['loss']!r} is no number") from None
    if loss <= 0:
        raise UserError(f"{path}:{line}: loss = {row['loss']} must be positive")
    parameters, tokens = number("parameters"), number("tokens")
    assert parameters is not None
    assert tokens is not None
    return Record(
        source=f"{path}:{line}",
        architecture=row.get("architecture", "") or "model",
        parameters=parameters,
        tokens=tokens,
        loss=loss if math.isfinite(loss) else math.nan,
        status="finished" if math.isfinite(loss) else "diverged",
        batch_tokens=number("batch_tokens"),
        lr=number("lr"),
        seed=row.get("seed", "") or "0",
        settings=row.get("settings", ""),
        embedding_parameters=number("embedding_parameters"),
        head_parameters=number("head_parameters"),
        attention_flops=number("attention_flops"),
        flops=number("flops"),
    )
