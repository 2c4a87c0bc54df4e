"""The registry of operations: each has a plain form in PyTorch and may have a fast form, which `angpt.fast` registers.

Calling an operation runs its fast form if that applies to the arguments, otherwise its plain form. One switch turns all
fast forms off: `--kernels off`, `use_kernels("off")`, or the environment variable ANGPT_KERNELS=off.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Literal, ParamSpec, TypeVar

from angpt.errors import UserError

Kernels = Literal["auto", "off"]
P = ParamSpec("P")
R = TypeVar("R")

OPERATIONS: dict[str, "Operation[Any, Any]"] = {}
"""All operations by name."""
VARIABLE = "ANGPT_KERNELS"


def _allowed() -> bool:
    """True unless the environment variable turns fast forms off."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in ("auto", "off"):
        raise UserError(f"the environment variable {VARIABLE} must be auto or off, not {wanted!r}")
    return wanted == "auto"


_enabled = _allowed()


def _never(*args: object, **kwargs: object) -> bool:
    return False


class Operation(Generic[P, R]):
    """A function with a plain form, and a fast form for arguments for which `applies` returns True."""

    def __init__(self, plain: Callable[P, R]) -> None:
        functools.update_wrapper(self, plain)
        self.name: str = plain.__name__
        self.plain = plain
        self.fast: Callable[P, R] | None = None
        self.applies: Callable[..., bool] = _never

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _enabled and self.fast is not None and self.applies(*args, **kwargs):
            return self.fast(*args, **kwargs)
        return self.plain(*args, **kwargs)

    def accelerate(self, fast: Callable[P, R], applies: Callable[..., bool]) -> None:
        """Register the fast form, and a predicate of the arguments that it can take."""
        self.fast, self.applies = fast, applies


def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """Decorator that makes a function the plain form of a new operation in the registry."""
    if plain.__name__ in OPERATIONS:
        raise ValueError(f"there are two operations named {plain.__name__}")
    OPERATIONS[plain.__name__] = made = Operation(plain)
    return made


def kernels_enabled() -> bool:
    """True unless the switch is off."""
    return _enabled


def use_kernels(kernels: Kernels) -> None:
    """Set the switch for this process. ANGPT_KERNELS=off overrides "auto"."""
    global _enabled
    _enabled = _allowed() and kernels == "auto"


@contextmanager
def kernels(mode: Kernels) -> Iterator[None]:
    """Set the switch inside a `with` block, for all threads of the process; the innermost block counts."""
    before = _enabled
    use_kernels(mode)
    try:
        yield
    finally:
        globals()["_enabled"] = before
