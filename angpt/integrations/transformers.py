"""The constraints of a model in transformers' Trainer."""

from typing import Any

from torch import nn
from transformers import TrainerCallback

from angpt.constraints import Constraints, constrain


class ConstrainCallback(TrainerCallback):  # type: ignore[misc]
    """Applies the constraints of the model when training begins and after every step of the optimizer.

        Trainer(model=model, args=args, train_dataset=data, callbacks=[ConstrainCallback()])

    Args:
        constraints: By names of parameters; those of `angpt.constraints_of` unless given.
    """

    def __init__(self, constraints: Constraints | None = None) -> None:
        self.constraints = constraints

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, optimizer: Any = None, **_: Any
    ) -> None:
        self.handle = constrain(optimizer, model, self.constraints)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.handle.remove()
