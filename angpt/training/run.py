"""A run as a folder: config.toml, metrics.jsonl, summary.json, checkpoints/. One process writes to it at a time."""

import fcntl
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self

import torch

from angpt.config import TrainConfig, from_dict, read_toml, to_toml
from angpt.errors import UserError
from angpt.system import write_atomically
from angpt.version import __version__

Status = Literal["finished", "interrupted", "diverged"]


@dataclass(frozen=True)
class Summary:
    """How a run ended, and on what it ran."""

    status: Status
    step: int
    """Steps done; for a diverged run, the step whose loss or gradient was not finite."""
    steps: int
    tokens: int
    val_loss: float | None
    """Of the last evaluation."""
    seconds: float
    """Time spent in training steps, without compiling, evaluation and saving."""
    compile_seconds: float
    """Before the first step of the last process."""
    tokens_per_s: float | None
    peak_memory_gib: float | None
    """On the device; on the CPU, of the process."""
    parameters: int
    flops_per_token: int
    checkpoint: str | None
    """Name of the last good checkpoint."""
    environment: dict[str, str]
    """Versions, commit and hardware."""


@dataclass(frozen=True)
class Run:
    """A run folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What ranks other than 0 have said."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> Self:
        """A new folder with its configuration; one that exists is left as it is."""
        if path.exists():
            raise UserError(f"{path}: exists; go on with `--resume {path}` or choose another --out")
        part = path.with_name(f".{path.name}.part")  # a folder with the name of a run always has its configuration
        part.mkdir(parents=True, exist_ok=True)
        write_atomically(part / "config.toml", to_toml(config))
        part.rename(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        if not (path / "config.toml").exists():
            raise UserError(f"{path}: no run folder (it has no config.toml)")
        return cls(path)

    def config(self) -> TrainConfig:
        return read_toml(TrainConfig, self.path / "config.toml")

    def write_config(self, config: TrainConfig) -> None:
        """Replace the configuration, where it differs."""
        if config != self.config():
            write_atomically(self.path / "config.toml", to_toml(config))

    def summary(self) -> Summary | None:
        """How the run ended; None while it is under way, or if it was killed."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            return from_dict(Summary, json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, UserError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove it and go on with --resume") from error

    def write_summary(self, summary: Summary) -> None:
        write_atomically(self.path / "summary.json", json.dumps(asdict(summary), indent=1, allow_nan=False) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """What metrics.jsonl holds; a last line that a killed process left half-written is passed over."""
        if not self.metrics.exists():
            return
        with self.metrics.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a process trains; gone with the process, however it ends."""
        with (self.path / ".lock").open("w") as file:
            if not _take(file, fcntl.LOCK_EX):
                time.sleep(0.1)  # it may have been a glance of `busy`
                if not _take(file, fcntl.LOCK_EX):
                    raise UserError(f"{self.path}: another process is training here")
            yield

    def busy(self) -> bool:
        """Whether a process trains here."""
        try:
            with (self.path / ".lock").open("r") as file:
                return not _take(file, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False


def _take(file: IO[str], kind: int) -> bool:
    """Whether the lock was to be had, until the file is closed."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class MetricsWriter:
    """Appends records to metrics.jsonl, from a given length on: what is behind it is cut off."""

    def __init__(self, path: Path, length: int) -> None:
        if (path.stat().st_size if path.exists() else 0) < length:
            raise UserError(f"{path}: is shorter than the last checkpoint says; bring it back, or start a new run")
        self.file = path.open("ab")
        self.file.truncate(length)
        self.file.seek(0, os.SEEK_END)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(_finite(record), allow_nan=False).encode() + b"\n")

    def sync(self) -> int:
        """Bring everything to the disk; the length of the file."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.file.tell()

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class NoMetrics:
    """For the ranks that write none."""

    def write(self, record: dict[str, Any]) -> None:
        pass

    def sync(self) -> int:
        return 0

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def environment(device: torch.device) -> dict[str, str]:
    """Versions, commit and hardware, as far as they can be told."""
    found = {
        "angpt": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    if commit := _commit():
        found["commit"] = commit
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source that runs, with a + where it was changed since."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
