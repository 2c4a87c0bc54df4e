"""Rules for the parser: help texts in paragraphs, without defaults that the text states; whole numbers below 2⁶³."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, cast, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from angpt.serialization import INTEGERS, shown

REGISTRY = ConstructorRegistry()


def default_hint(value: str) -> str:
    """What follows the help text of an option. Where the default is None or empty, the text says what happens."""
    return "" if value in ("None", "") else f"(default: {value})"


HINT = tyro.conf.arg(help_behavior_hint=default_hint)


@REGISTRY.struct_rule
def dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The fields of a configuration class of this package as options."""
    if not dataclasses.is_dataclass(info.type) or not info.type.__module__.startswith("angpt."):
        return None
    types, fields = get_type_hints(info.type, include_extras=True), []
    for field in dataclasses.fields(info.type):
        if isinstance(info.default, info.type):
            default = getattr(info.default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        annotation: Any = Annotated[types[field.name], HINT]
        fields.append(StructFieldSpec(field.name, annotation, default, partial(field_help, info.type, field.name)))
    return StructConstructorSpec(info.type, tuple(fields))


@REGISTRY.primitive_rule
def int_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Whole numbers that fit NumPy and PyTorch, as in files."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: whole_number(words[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(text: str) -> int:
    value = int(text)
    if not -INTEGERS < value < INTEGERS:
        raise ValueError(f"{shown(text)} must be a number of at most 18 digits")
    return value


def field_help(cls: type, name: str) -> str | None:
    return _field_docs(cls).get(name)


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """The texts below the fields of a dataclass."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(cast(ast.ClassDef, tree).body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def bound(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """A function with the options of a command that returns the command with these options, to be called later."""

    def bind(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return partial(command, *args, **kwargs)

    hints = {name: Annotated[hint, HINT] for name, hint in get_type_hints(command, include_extras=True).items()}
    parameters = inspect.signature(command).parameters.values()
    signature = inspect.Signature([p.replace(annotation=hints[p.name]) for p in parameters])
    described: Any = bind
    described.__signature__, described.__annotations__ = signature, hints
    described.__name__, described.__module__ = command.__name__, command.__module__
    described.__doc__ = re.sub(r"\n {8,}(?=\S)", " ", inspect.cleandoc(command.__doc__ or ""))
    return bind
