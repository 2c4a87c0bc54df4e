"""Where the records of a run go: metrics.jsonl, and copies for TensorBoard and Weights & Biases."""

import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.system import open_to_append


class Sink:
    """Receives the records of a run. This one ignores them, for ranks other than 0."""

    def write(self, record: dict[str, Any]) -> None:
        """Add a record."""

    def flush(self) -> None:
        """Make the records visible to other processes."""

    def sync(self) -> int:
        """Bring the records to the disk; return their length in bytes."""
        return 0

    def close(self) -> None:
        """End after the last record."""


class MetricsFile(Sink):
    """Appends records to metrics.jsonl at a given length; what came after it is cut off."""

    def __init__(self, path: Path, length: int) -> None:
        if (path.stat().st_size if path.exists() else 0) < length:
            raise UserError(f"{path}: is shorter than the last checkpoint says; restore it, or start a new run")
        self.file = os.fdopen(open_to_append(path), "ab")
        self.file.truncate(length)
        self.file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")

    def sync(self) -> int:
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Copies(Sink):
    """Sends the numbers of each record to another tool by `log(name, value, step)`."""

    def __init__(self, log: Callable[[str, float, int], object], end: Callable[[], object]) -> None:
        self.log, self.end = log, end

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.log(name, value, record["step"])

    def close(self) -> None:
        self.end()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record under names such as train/loss and layers/alpha_a/3."""
    found: dict[str, float] = {}
    for key, value in record.items():
        values = {f"/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {"": value}
        if key not in ("step", "tokens"):
            found |= {f"{record['kind']}/{key}{i}": v for i, v in values.items() if isinstance(v, int | float)}
    return found


def check_sinks(config: TrainConfig) -> None:
    """Raise an error if a package that the configuration asks for is not installed."""
    for wanted, package in ((config.tensorboard, "tensorboard"), (config.wandb, "wandb")):
        if wanted and importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed: pip install 'angpt[{package}]'")


def sinks_for(config: TrainConfig, run: Path, step: int) -> list[Sink]:
    """The sinks that the configuration asks for beside metrics.jsonl; `step`: steps already done."""
    found: list[Sink] = []
    if config.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)  # hides steps that are repeated
        found.append(Copies(writer.add_scalar, writer.close))
    if config.wandb:
        import wandb

        identity = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]  # the same when resumed
        options: dict[str, Any] = {"name": run.name, "id": identity, "dir": run, "config": asdict(config)}
        session = wandb.init(project="angpt", resume="allow", **options)
        found.append(Copies(lambda name, value, step: session.log({name: value}, step=step), session.finish))
    return found


def _finite(value: Any) -> Any:
    """The value with null in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value
