"""Values of each layer that a run recorded during training, as plain data."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class History:
    """Values of each layer at several steps; a value outside the layers counts as one layer."""

    steps: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    values: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    """By name: for each step, a value per layer."""
    once: tuple[str, ...] = ()
    """Names of the values outside the layers."""

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Self:
        found = list(records)
        names = [name for name in (found[0] if found else {}) if name not in ("kind", "step", "tokens")]
        return cls(
            steps=tuple(int(record["step"]) for record in found),
            tokens=tuple(int(record["tokens"]) for record in found),
            values={name: tuple(_listed(record[name]) for record in found) for name in names},
            once=tuple(name for name in names if not isinstance(found[0][name], list)),
        )

    def only(self, *prefixes: str) -> Self:
        """The values whose names have one of these prefixes."""
        chosen = {name: values for name, values in self.values.items() if name.startswith(prefixes)}
        return type(self)(self.steps, self.tokens, chosen, tuple(name for name in self.once if name in chosen))

    def records(self) -> tuple[dict[str, Any], ...]:
        """One dictionary per step, as the run recorded it."""
        times = zip(self.steps, self.tokens, strict=True)
        found: list[dict[str, Any]] = [{"step": step, "tokens": tokens} for step, tokens in times]
        for name, values in self.values.items():
            for record, row in zip(found, values, strict=True):
                record[name] = row[0] if name in self.once else list(row)
        return tuple(found)


def _listed(value: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in (value if isinstance(value, list) else [value]))
