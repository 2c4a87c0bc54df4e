"""Rules for the parser: help texts in groups and wrapped paragraphs, without defaults that the text states; whole
numbers below 2⁶³."""

import ast
import dataclasses
import inspect
import io
import re
import shutil
import textwrap
from collections.abc import Callable, Collection
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, TextIO, cast, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from angpt.config import TrainConfig
from angpt.serialization import INTEGERS, shown


def registry(hidden: Collection[str] = ()) -> ConstructorRegistry:
    """The rules of the parser. Fields that are `hidden`, such as TrainConfig.seed, are no options."""
    rules = ConstructorRegistry()
    rules.struct_rule(partial(dataclass_rule, hidden=hidden))
    rules.struct_rule(box_rule)
    rules.primitive_rule(int_rule)
    return rules


def default_hint(value: str) -> str:
    """What follows the help text of an option. Where the default is None or empty, the text says what happens."""
    text = "" if value in ("None", "") else f"(default: {value})"
    return text.replace(" ", "\u00a0") if len(text) < 24 else text  # in one line


HINT = tyro.conf.arg(help_behavior_hint=default_hint)


FLAT = tyro.conf.arg(prefix_name=False)
MEASURED = ("eval_every", "eval_tokens", "log_every", "layers_every", "record_moments", "record_fp8")
KEPT = ("checkpoint_every", "keep_checkpoints", "tensorboard", "wandb")
GROUPS = {
    "machine": ("device", "precision", "compile", "kernels", "micro_batch", "recompute"),
    "multi-device": ("parallel", "shard_ranks", "reduce", "timeout"),
    "record": (*MEASURED, *KEPT),
}
"""Settings of a training run that have a box of their own in the help, by its title. Their names stay as they are."""


def dataclass_rule(info: StructTypeInfo, hidden: Collection[str]) -> StructConstructorSpec | None:
    """The fields of a configuration class of this package as options."""
    cls = info.type
    if not dataclasses.is_dataclass(cls) or not cls.__module__.startswith("angpt."):
        return None
    types, options = get_type_hints(cls, include_extras=True), {}
    for field in dataclasses.fields(cls):
        if isinstance(info.default, cls):
            default = getattr(info.default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            default = tyro.MISSING if field.default is dataclasses.MISSING else field.default
        annotation: Any = Annotated[types[field.name], HINT]
        if f"{cls.__name__}.{field.name}" in hidden:
            annotation = Annotated[annotation, tyro.conf.Suppress]
        options[field.name] = StructFieldSpec(field.name, annotation, default, partial(field_help, cls, field.name))
    if cls is TrainConfig:
        return _in_boxes(options)
    return StructConstructorSpec(cls, tuple(options.values()))


class Box(dict[str, Any]):
    """The values of a group of options; a subclass for each group."""

    options: tuple[StructFieldSpec, ...] = ()


def box_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    cls: Any = info.type
    is_box = isinstance(cls, type) and issubclass(cls, Box)
    return StructConstructorSpec(cls, cls.options) if is_box else None


def _in_boxes(options: dict[str, StructFieldSpec]) -> StructConstructorSpec:
    """The options of a training run, those of `GROUPS` as structures of their own, for which the help has boxes."""
    boxes = {}
    for title, names in GROUPS.items():
        flat: list[Any] = [Annotated[options[name].type, FLAT] for name in names]
        inner = (dataclasses.replace(options.pop(name), type=hint) for name, hint in zip(names, flat, strict=True))
        boxes[title] = type("Options", (Box,), {"__doc__": "", "options": tuple(inner)})

    def make(**values: Any) -> TrainConfig:
        return TrainConfig(**{k: v for name in GROUPS for k, v in values.pop(name).items()}, **values)

    fields = [StructFieldSpec(title, box, tyro.MISSING) for title, box in boxes.items()]
    return StructConstructorSpec(make, (*options.values(), *fields))


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


def first_paragraph(command: Callable[..., None]) -> str:
    """What a list of commands says of this one."""
    return " ".join(inspect.cleandoc(command.__doc__ or "").split("\n\n")[0].split())


class Page(io.StringIO):
    """Help on its way to a stream: text outside boxes, which the parser does not wrap, is wrapped."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    def isatty(self) -> bool:
        return self.stream.isatty()  # decides whether there are colours

    @property
    def encoding(self) -> str:  # type: ignore[override]  # decides whether boxes have lines
        return (self.stream.encoding or "ascii").lower()

    def wrapped(self) -> str:
        width = shutil.get_terminal_size().columns
        lines = (_wrap(line, width) for line in self.getvalue().splitlines())
        return "".join(f"{line}\n" for line in lines if line is not None)


def _wrap(line: str, width: int) -> str | None:
    """A line of help that fits; None for an empty line of a box, which stands where a default would."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", line)  # without colours
    if re.fullmatch(r"│ +│", text):
        return None
    if len(text) <= width or text.startswith((" ", "╭", "│", "╰")):
        return line
    words = text.replace(",", ", ") if text.startswith("usage:") else text  # a list of commands without spaces
    return textwrap.fill(words, width, break_long_words=False, break_on_hyphens=False)


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
    described.__doc__ = re.sub(r"(?<=\S)\n(?!\n|    \S) *", " ", inspect.cleandoc(command.__doc__ or ""))
    return bind
