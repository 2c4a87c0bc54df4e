"""Reads the records of runs from study folders, run folders and CSV files."""

import csv
import difflib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from angpt.errors import UserError
from angpt.fits.checks import check_comparable, check_units, mark_diverged
from angpt.fits.records import COLUMNS, Record, RunTable, Status, average

ALIASES = {
    "parameters": "n params n_params num_params num_parameters parameter_count model_size",
    "tokens": "d n_tokens num_tokens train_tokens training_tokens total_tokens",
    "loss": "val_loss validation_loss final_loss test_loss eval_loss",
    "batch_tokens": "bs batch_size global_batch_size tokens_per_step",
    "lr": "learning_rate max_lr peak_lr lr_max peak_learning_rate max_learning_rate",
    "flops": "training_flops train_flops total_flops",
    "architecture": "arch",
    "run": "run_id run_name",
}
"""Other usual names of the columns."""
REQUIRED = ("parameters", "tokens", "loss")
POSITIVE = ("parameters", "tokens", "batch_tokens", "lr", "embedding_parameters", "head_parameters", "flops")
NUMBERS = (*POSITIVE, "attention_flops")


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
    check_comparable(records)
    for name in needed:
        if missing := [r for r in records if r.status == "finished" and getattr(r, name) is None]:
            raise UserError(
                f"{missing[0].source}: has no {name} ({COLUMNS[name]}), which this fit needs; "
                f"it is missing in {len(missing):,} of {len(records):,} runs"
            )
    records, diverged = mark_diverged(records)
    return average(records, [*diverged, *notes])


def _run_folders(folder: Path) -> Iterator[Path]:
    if (folder / "config.toml").exists():
        yield folder
    elif folder.is_dir():
        for child in sorted(folder.iterdir()):
            if child.is_dir() and not child.name.startswith("."):  # a hidden folder is a run that is being created
                yield from _run_folders(child)


def _run_record(path: Path, curves: bool) -> Record:
    from angpt.config import settings_of  # not above: files of points need no command line
    from angpt.models.decoder import attention_flops
    from angpt.training.record import LOSS_SETTINGS, RunRecord

    record = RunRecord.open(path)
    config, summary, model = record.config, record.summary, record.config.model
    status: Status = "unfinished"
    loss = parameters = tokens = math.nan
    flops = None
    if summary is not None:
        loss = math.nan if summary.val_loss is None else summary.val_loss
        if summary.ended:
            status = "finished" if summary.status == "finished" and summary.val_loss is not None else "diverged"
        # The planned budget, also for a run that diverged: it groups the run with others of this budget.
        tokens = summary.steps * float(config.batch_tokens or summary.tokens / summary.step)
        parameters, flops = float(summary.parameters), float(summary.flops_per_token) * tokens
    known = settings_of(config) | {"data.path": str(Path(config.data.path))}
    # Settings that distinguish runs, besides those with a column; logging and checkpoints do not.
    other: dict[str, Any] = {name: asdict(getattr(config, name)) for name in ("model", "optimizer")}
    del other["model"]["architecture"], other["optimizer"]["lr"]
    evaluations = record.evaluations if curves and status == "finished" else ()
    table = float(model.vocab_size * model.d_model)
    return Record(
        source=str(path),
        architecture=config.recipe,
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
        loss_settings={name: known[name] for name in LOSS_SETTINGS},
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
    notes += check_units(records)
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
    unknown = [name for name in names if name not in COLUMNS]
    hints = {name: hint for name in unknown if (hint := _meant(name, set(COLUMNS) - set(names))) is not None}
    if missing := [name for name in REQUIRED if name not in names]:
        what = " and no column ".join(missing)
        renamed = [f"rename {name} to {hint}" for name, hint in hints.items() if hint in missing]
        raise UserError(
            f"{path}: has no column {what} (found: {', '.join(names) or 'nothing'}); "
            f"{', '.join(renamed) or 'docs/fits.md lists the columns'}"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{path}: has the column {Counter(names).most_common(1)[0][0]} twice")
    for name, hint in hints.items():
        raise UserError(
            f"{path}: unknown column {name!r}: did you mean {hint} ({COLUMNS[hint]})? To ignore it, rename it"
        )
    if unknown:
        notes.append(f"{path.name}: unused columns: {', '.join(unknown)}")


def _meant(name: str, known: set[str]) -> str | None:
    """The column that an unknown name probably stands for: by a usual other name, or a misspelling."""
    word = name.strip().lower().replace(" ", "_").replace("-", "_")
    for column in sorted(known):
        if word == column or word in ALIASES.get(column, "").split():
            return column
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.75)
    return near[0] if near else None


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
