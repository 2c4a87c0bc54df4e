"""A run as a folder: config.toml, metrics.jsonl, summary.json, checkpoints/. One process writes to it at a time."""

import fcntl
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

import torch

from angpt.config import TrainConfig
from angpt.errors import UserError
from angpt.serialization import check_settings, parse_json, read_json, read_toml, sealed_json, to_toml
from angpt.system import LOCK, locked, new_folder, try_lock, write_atomically
from angpt.version import __version__

Status = Literal["finished", "interrupted", "diverged"]


@dataclass(frozen=True)
class Summary:
    """How a run ended, its speed, and where it ran."""

    status: Status
    step: int
    """Steps done; for a diverged run, the step with a loss, gradient or validation loss that was not finite."""
    steps: int
    tokens: int
    val_loss: float | None
    """Loss of the last evaluation; None before the first, and if it was not finite."""
    seconds: float
    """Time spent in training steps, without compiling, evaluation and saving."""
    compile_seconds: float
    """Time spent compiling, in the last process of the run."""
    tokens_per_s: float | None
    peak_memory_gib: float | None
    """Largest memory allocated on the GPU; on the CPU, that of the process."""
    parameters: int
    flops_per_token: int
    checkpoint: str | None
    """Name of the last good checkpoint."""
    environment: dict[str, str]
    """Versions, commit and hardware."""

    @property
    def ended(self) -> bool:
        """True if the run finished or diverged; an interrupted run can be continued."""
        return self.status != "interrupted"

    def __post_init__(self) -> None:
        check_settings(self, "positive", lambda value: value > 0, "steps", "parameters", "flops_per_token")
        check_settings(
            self, "0 or more", lambda value: value >= 0, "step", "tokens", "val_loss", "seconds", "tokens_per_s"
        )


@dataclass(frozen=True)
class Run:
    """A run folder."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder with the output of ranks other than 0."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> Self:
        """Make a new run folder with its configuration; an error if it exists."""
        if path.exists():
            raise UserError(f"{path}: exists; continue with `--resume {path}` or choose another --out")
        with new_folder(path) as part:
            write_atomically(part / "config.toml", to_toml(config))
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        if not (path / "config.toml").exists():
            why = "it has no config.toml" if path.exists() else "it does not exist"
            raise UserError(f"{path}: no run folder ({why})")
        return cls(path)

    def config(self) -> TrainConfig:
        stat = (self.path / "config.toml").stat()
        return _config(self.path, stat.st_ino, stat.st_mtime_ns, stat.st_size)

    def has_text_of(self, config: TrainConfig) -> bool:
        """True if config.toml is to the byte what `create` writes for this configuration."""
        return (self.path / "config.toml").read_bytes() == to_toml(config).encode(errors="surrogateescape")

    def write_config(self, config: TrainConfig) -> None:
        """Replace the configuration if it differs."""
        if config != self.config():
            write_atomically(self.path / "config.toml", to_toml(config))

    def summary(self) -> Summary | None:
        """How the run ended; None while it is running, or if it was killed."""
        try:
            stat = (self.path / "summary.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _summary(self.path, stat.st_ino, stat.st_mtime_ns, stat.st_size)

    def write_summary(self, summary: Summary) -> None:
        write_atomically(self.path / "summary.json", sealed_json(summary))

    def remove_summary(self) -> None:
        """Forget how the run ended, because it goes on."""
        (self.path / "summary.json").unlink(missing_ok=True)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The numbered lines of metrics.jsonl, without a last one that a killed process left incomplete."""
        with suppress(FileNotFoundError), self.metrics.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.endswith(b"\n"))

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return (parse_json(line) for _, line in self.lines())

    def lock(self) -> AbstractContextManager[None]:
        """The lock of the folder, held in a `with` block."""
        return locked(self.path / LOCK, "another process is training here")

    def busy(self) -> bool:
        """True if a process trains in this folder."""
        with suppress(FileNotFoundError), (self.path / LOCK).open("r") as file:
            return not try_lock(file.fileno(), fcntl.LOCK_SH)
        return False


@lru_cache(maxsize=8192)
def _config(folder: Path, *_version: int) -> TrainConfig:
    return read_toml(TrainConfig, folder / "config.toml")


@lru_cache(maxsize=65_536)
def _summary(folder: Path, *_version: int) -> Summary:
    return read_json(Summary, folder / "summary.json", "remove it and continue with --resume")


def environment(device: torch.device) -> dict[str, str]:
    """Versions, commit and hardware."""
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
    named = re.search(r"^model name\s*:(.*)", info.read_text(errors="replace") if info.exists() else "", re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The git commit of this source, with a + if it was changed since; None outside a repository."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
