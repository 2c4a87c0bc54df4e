"""Copies of the metrics for tools that people already watch. metrics.jsonl stays the record."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol

from angpt.config import TrainConfig
from angpt.errors import UserError


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a killed process wrote behind the step that it goes on from is not shown.
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        import wandb

        # The same run when resumed, another one for a folder of the same name elsewhere.
        identity = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
        self.run = wandb.init(project="angpt", name=run.name, id=identity, resume="allow", dir=run, config=config)

    def write(self, record: dict[str, Any]) -> None:
        self.run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self.run.finish()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record under names such as train/loss and layers/alpha_a/3."""
    kind = record["kind"]
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, list):
            found |= {f"{kind}/{key}/{i}": v for i, v in enumerate(value) if v is not None}
        elif isinstance(value, int | float) and key not in ("step", "tokens"):
            found[f"{kind}/{key}"] = value
    return found


def check_sinks(config: TrainConfig) -> None:
    """Whether the packages are there that the configuration asks for."""
    for wanted, package in ((config.tensorboard, "tensorboard"), (config.wandb, "wandb")):
        if wanted and importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed: pip install 'angpt[{package}]'")


def sinks_for(config: TrainConfig, run: Path, values: dict[str, Any], step: int) -> list[Sink]:
    found: list[Sink] = []
    if config.tensorboard:
        found.append(TensorBoard(run / "tensorboard", step))
    if config.wandb:
        found.append(WandB(run, values))
    return found
