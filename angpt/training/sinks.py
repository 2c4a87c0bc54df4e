"""Copies of the metrics for tools that people already watch. metrics.jsonl stays the record."""

from pathlib import Path
from typing import Any, Protocol

from angpt.config import TrainConfig
from angpt.errors import UserError


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("tensorboard is not installed: pip install 'angpt[tensorboard]'") from error
        # What a killed process wrote behind the step that it goes on from is not shown.
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    def __init__(self, run: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("wandb is not installed: pip install 'angpt[wandb]'") from error
        self.run = wandb.init(project="angpt", name=run.name, id=run.name, resume="allow", dir=run, config=config)

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


def sinks_for(config: TrainConfig, run: Path, values: dict[str, Any], step: int) -> list[Sink]:
    found: list[Sink] = []
    if config.tensorboard:
        found.append(TensorBoard(run / "tensorboard", step))
    if config.wandb:
        found.append(WandB(run, values))
    return found
