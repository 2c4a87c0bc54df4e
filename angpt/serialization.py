"""Dataclasses from JSON and TOML files, and back to TOML. Errors name the file, the key and what is wrong."""

import dataclasses
import hashlib
import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from angpt.errors import UserError, nearest

T = TypeVar("T")
INTEGERS = 2**63
"""Integers of a file lie below this and above its negative: larger ones fit neither NumPy nor PyTorch."""


def read_toml(cls: type[T], path: Path) -> T:
    """A dataclass from a TOML file."""
    values = toml_values(path)
    try:
        return from_dict(cls, values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def toml_values(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))  # paths may have any bytes
    except FileNotFoundError as error:
        raise UserError(f"{path}: does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as TOML ({_reason(error)})") from error


def read_json(cls: type[T], path: Path, advice: str, version: int | None = None) -> T:
    """A dataclass from a JSON file; its `format` must be `version` if one is given. Errors end with `advice`."""
    try:
        values = json_values(path)
        if version is not None and (found := values.get("format")) != version:
            raise UserError(f"it has format {shown(found)}, this version reads format {version}")
        return from_dict(cls, unseal(values), finite=True)
    except UserError as error:
        raise UserError(f"{path}: cannot be read ({error}); {advice}") from error


def json_values(path: Path) -> dict[str, Any]:
    """The values of a JSON file that holds an object."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(_reason(error)) from error
    if not isinstance(values, dict):
        raise UserError(f"it must be a table, not {shown(values)}")
    return values


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON: {_reason(error)}") from error


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a JSON file with their checksum, which `unseal` compares."""
    return values | {"checksum": _checksum(values)}


def sealed_json(value: Any, finite: bool = True) -> str:
    """A dataclass as the text of a JSON file, with its checksum; an error if numbers must be finite and one is not."""
    return json.dumps(seal(dataclasses.asdict(value)), indent=1, allow_nan=not finite) + "\n"


def unseal(values: dict[str, Any]) -> dict[str, Any]:
    """The values without their checksum; an error if it is wrong. A file without one, as others may write it, is not
    checked."""
    rest = dict(values)
    expected = rest.pop("checksum", None)
    if expected is not None and expected != _checksum(rest):
        raise UserError("the checksum is wrong: the file has been changed or is damaged")
    return rest


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    """What is wrong with a file, in a few words."""
    if isinstance(error, RecursionError):
        return "values are nested too deeply"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def from_dict(cls: type[T], values: Any, where: str = "", finite: bool = False) -> T:
    """A dataclass from plain values, such as those of a TOML file; nested tables become nested dataclasses.

    An unknown key, a missing key or a value of the wrong type is an error that names the key, with `where` before it.
    If `finite`, numbers must be finite.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where or 'it'} must be a table, not {shown(values)}")
    fields, types = _fields(cls)  # type: ignore[arg-type]
    arguments = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in fields:
            raise UserError(f"unknown key {shown(path)}: {nearest(key, fields)}")
        arguments[key] = typed(types[key], value, path, finite)
    for name, required in fields.items():
        if required and name not in arguments:
            raise UserError(f"the key {f'{where}.{name}' if where else name!r} is missing")
    return cls(**arguments)


@cache
def _fields(cls: Any) -> tuple[dict[str, bool], dict[str, Any]]:
    """The fields of a dataclass, each with True if it has no default, and their types."""
    fields = [f for f in dataclasses.fields(cls) if f.init]
    missing = dataclasses.MISSING
    return {f.name: f.default is missing and f.default_factory is missing for f in fields}, get_type_hints(cls)


def typed(kind: Any, value: Any, path: str, finite: bool = False) -> Any:
    """A plain value as a type such as `dict[str, int] | None`, or an error that names `path`.

    Numbers of NumPy become those of Python, and an int a float where one is expected; see `from_dict` for `finite`.
    """
    if kind is Any:
        return value
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        origin, inner = get_origin(option), get_args(option)
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return from_dict(option, value, path, finite)  # type: ignore[arg-type]
        if origin is Literal and value in inner:
            return value
        if origin is tuple and isinstance(value, list | tuple):
            kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
            if len(kinds) != len(value):
                raise UserError(f"{path} must have {len(kinds)} values, not {len(value)}")
            pairs = zip(kinds, value, strict=True)
            return tuple(typed(k, v, f"{path}[{i}]", finite) for i, (k, v) in enumerate(pairs))
        if origin is dict and isinstance(value, dict):
            return {key: typed(inner[1], v, f"{path}.{key}", finite) for key, v in value.items()}
        if option in (int, float) and isinstance(value, Integral) and not isinstance(value, bool):
            if not -INTEGERS < int(value) < INTEGERS:
                raise UserError(f"{path} must be a number of at most 18 digits, not {shown(value)}")
            return option(value)
        if option is float and isinstance(value, Real) and not isinstance(value, bool):
            value = float(value)
        if origin is None and isinstance(value, option) and isinstance(value, bool) == (option is bool):
            if option is float and finite and not math.isfinite(value):
                raise UserError(f"{path} must be a finite number, not {value}")
            return value
    if dataclasses.is_dataclass(get_args(kind)[0] if get_origin(kind) is tuple else None):
        raise UserError(f"{path} must be a list of tables, each under [[{path}]]")
    raise UserError(f"{path} must be {' or '.join(_words(options))}, not {shown(value)}")


def _words(options: tuple[Any, ...]) -> list[str]:
    """The allowed types in words, for an error message."""
    plain = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", tuple: "a list"}
    words: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            words += map(repr, get_args(option))
        elif option is not NoneType:
            words.append(plain.get(get_origin(option) or option, "a table"))
    return words


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: Any) -> str:
    """A value in an error message, cut short if it is long."""
    try:
        return _repr.repr(value)
    except ValueError:  # Python does not write integers of more than 4,300 digits
        return "an integer of thousands of digits"


def check_settings(config: Any, rule: str, holds: Callable[[Any], bool], *names: str, prefix: str = "") -> None:
    """Raise an error unless each of these settings is None or satisfies the rule."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise UserError(f"{prefix}{name} must be {rule}, not {shown(value)}")


def check_types(config: Any, prefix: str = "") -> None:
    """Raise an error unless every field of a dataclass has a value of its type. An int becomes a float where one is
    expected, and a list a tuple."""
    for name, kind in _fields(type(config))[1].items():  # type: ignore[arg-type]
        object.__setattr__(config, name, typed(kind, getattr(config, name), prefix + name))


def to_toml(config: Any, prefix: str = "") -> str:
    """A dataclass as TOML: values first, then a table for each nested dataclass or dictionary, and an array of tables
    for a tuple of dataclasses. None is left out."""
    values: list[str] = []
    tables: list[str] = []
    for name, value in (config if isinstance(config, dict) else vars(config)).items():
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml_value(name)
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            tables.append(f"\n[{prefix}{key}]\n{to_toml(value, f'{prefix}{key}.')}")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            tables += [f"\n[[{prefix}{key}]]\n{to_toml(item, f'{prefix}{key}.')}" for item in value]
        elif value is not None:
            values.append(f"{key} = {_toml_value(value)}\n")
    return "".join(values + tables)


def _toml_value(value: Any) -> str:
    """A value as TOML, which writes strings, numbers, booleans and lists as JSON does, except infinity and DEL."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return "inf" if text == "Infinity" else text
