"""Configuration as typed, frozen dataclasses. Every field carries its own documentation, which `--help` shows."""

import dataclasses
import math
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from angpt.errors import UserError, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: which architecture, how large, and the constants that the paper leaves open."""

    architecture: str = "angpt"
    """gpt+, ngpt, angpt, or a variant such as angpt/no-lerp."""
    d_model: int = 256
    """Width of the residual stream, d_m."""
    n_layers: int = 6
    """Number of blocks (attention and MLP), L."""
    n_heads: int = 4
    """Attention heads; d_h = d_m / heads."""
    d_ff: int | None = None
    """Width of the MLP, d_f; 4 · d_m unless given."""
    vocab_size: int = 50_304
    """Rows of the embedding and of the head."""
    context: int = 2048
    """Longest sequence in tokens."""
    rotary_fraction: float = 0.5
    """Part of each head's dimensions that is rotated."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    g_init: float | None = None
    """Start of the learned attention scale g; sqrt(d_h) unless given."""
    alpha_init: float = 0.05
    """Start of the interpolation weights α (nGPT, anGPT)."""
    stored_scale: float | None = None
    """Stored scale of α, s_qk and s_z; 0.01 for anGPT and 1/sqrt(d_m) for nGPT unless given."""
    nu_p: float | None = None
    """Factor of the attention output map (anGPT); sqrt(d_h/d_m) unless given. A no-op in exact arithmetic."""
    nu_acf: float = 3.74
    """Factor of the activation (anGPT), as the paper quotes it. A no-op in exact arithmetic."""

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "vocab_size", "context"):
            _require(getattr(self, name) > 0, f"model.{name} must be positive, not {getattr(self, name)}")
        _require(self.d_ff is None or self.d_ff > 0, f"model.d_ff must be positive, not {self.d_ff}")
        _require(
            self.d_model % self.n_heads == 0,
            f"model.n_heads = {self.n_heads} does not divide model.d_model = {self.d_model}",
        )
        _require(0 <= self.rotary_fraction <= 1, f"model.rotary_fraction must be in [0, 1], not {self.rotary_fraction}")
        rotary = self.rotary_fraction * self.d_head
        _require(
            rotary == int(rotary) and int(rotary) % 2 == 0,
            f"model.rotary_fraction = {self.rotary_fraction} of a head of {self.d_head} gives {rotary:g} rotary "
            "dimensions; they are rotated in pairs, so it must be an even whole number",
        )
        for name in ("rotary_base", "g_init", "alpha_init", "stored_scale", "nu_p", "nu_acf"):
            value = getattr(self, name)
            _require(
                value is None or (value > 0 and math.isfinite(value)),
                f"model.{name} must be positive and finite, not {value}",
            )

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def d_mlp(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def rotary_dim(self) -> int:
        return int(self.rotary_fraction * self.d_head)

    @property
    def g_start(self) -> float:
        """q and k have length 1, so q·k varies by 1/sqrt(d_h); the default brings it back to 1."""
        return math.sqrt(self.d_head) if self.g_init is None else self.g_init

    @classmethod
    def size(cls, name: str, **overrides: Any) -> Self:
        """A model of the paper by its name, such as 32M or 0.5B."""
        if name not in SIZES:
            raise UserError(f"unknown model size {name!r}: {nearest(name, SIZES)}")
        d_model, n_layers, n_heads = SIZES[name]
        return from_dict(cls, {"d_model": d_model, "n_layers": n_layers, "n_heads": n_heads} | overrides)


SIZES: dict[str, tuple[int, int, int]] = {
    "32M": (256, 6, 4),
    "62M": (384, 10, 6),
    "125M": (512, 18, 8),
    "250M": (768, 18, 12),
    "0.5B": (1024, 24, 16),
    "1B": (1280, 36, 20),
}
"""d_model, n_layers, n_heads of the models of the paper."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """A dataclass from plain values (of a TOML file, say); nested tables become nested dataclasses.

    An unknown key or a value of the wrong type is an error that names the key as written, `where` included.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        path = f"{where}.{key}" if where else key
        if key not in fields:
            raise UserError(f"unknown key {path!r}: {nearest(key, fields)}")
        arguments[key] = _convert(types[key], value, path)
    return cls(**arguments)


def _convert(kind: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type, or an error that names `path`. An int is welcome where a float is expected."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise UserError(f"{path} must be a table, not {value!r}")
        return from_dict(kind, value, path)  # type: ignore[arg-type]
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        origin = get_origin(option)
        if origin is Literal:
            if value in get_args(option):
                return value
        elif origin is tuple:
            if isinstance(value, list | tuple):
                return tuple(_convert(get_args(option)[0], v, f"{path}[{i}]") for i, v in enumerate(value))
        elif option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, option) and isinstance(value, bool) == (option is bool):
            return value
    raise UserError(f"{path} must be {_describe(options)}, not {value!r}")


def _describe(options: tuple[Any, ...]) -> str:
    words = []
    for option in options:
        if get_origin(option) is Literal:
            words += [repr(v) for v in get_args(option)]
        elif get_origin(option) is tuple:
            words.append("a list")
        elif option is not NoneType:
            words.append({int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[option])
    return " or ".join(words)
