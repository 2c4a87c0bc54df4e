"""The constraints of a model in Lightning's Trainer."""

from typing import Any

from lightning.pytorch import Callback
from torch import nn

from angpt.constraints import Constraints, constrain


class ConstrainCallback(Callback):  # type: ignore[misc]
    """Applies the constraints of the module when training starts and after every step of each optimizer.

        Trainer(callbacks=[ConstrainCallback()]).fit(module, data)

    Args:
        constraints: By names of parameters; those of `angpt.constraints_of` unless given.
    """

    def __init__(self, constraints: Constraints | None = None) -> None:
        self.constraints = constraints

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.handle = constrain(trainer.optimizers, pl_module, self.constraints)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self.handle.remove()
