"""Numbers as people read them. Every number of the page is written here, so that equal values look equal."""

from collections.abc import Callable, Sequence

from angpt.stats import Interval

NONE = "–"
"""In place of a number that does not exist."""
LABELS = {"gpt+": "GPT+", "ngpt": "nGPT", "angpt": "anGPT"}


def label(architecture: str) -> str:
    """The name of an architecture in text: `angpt/no-lerp` is anGPT no-lerp."""
    family, _, variant = architecture.partition("/")
    return f"{LABELS.get(family, family)} {variant}".strip()


def quantity(number: float) -> str:
    """A count with three digits and a unit: 400k, 1.5M, 2B, 1T."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits: 0.0502, 1.23, 45.6; thousands in full; 0 below 1e-6."""
    if value is None:
        return NONE
    if abs(value) < 1e-6:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:#.{digits}g}".removesuffix(".")


def percent(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def span(values: Sequence[float | None], form: Callable[[float], str] = number, unit: str = "") -> str:
    """The range of the known values, 0.5 to 1.25, or the one value if they look equal."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    low, high = form(min(known)), form(max(known))
    return (low if low == high else f"{low} to {high}") + unit


def duration(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def interval(value: Interval, digits: int) -> str:
    """The mean and half the width of its interval: 3.543 ± 0.025; the mean alone without an interval."""
    mean = f"{value.mean:.{digits}f}"
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ± {(value.high - value.low) / 2:.{digits}f}"


def bracketed(value: Interval, form: str, unit: str = "") -> str:
    """An estimate with its interval: 0.466 [0.451, 0.480]; the estimate alone without an interval."""
    text = f"{value.mean:{form}}{unit}"
    if value.low is not None and value.high is not None:
        text += f" [{value.low:{form}}, {value.high:{form}}]"
    return text.replace("-", "−")


def speedup(value: float, low: float | None = None, high: float | None = None, relation: str = "=") -> str:
    """1.42× [1.31, 1.55]; where only a bound is known, > 1.80×."""
    return ("" if relation == "=" else f"{relation} ") + bracketed(Interval(value, low, high), ".2f", "×")


def overhead(value: Interval, digits: int = 1) -> str:
    """A part of the baseline's value (step time, loss) in per cent: +3.1 % ± 0.4 %."""
    text = f"{100 * value.mean:+.{digits}f} %".replace("-", "−")
    if value.low is None or value.high is None:
        return text
    return f"{text} ± {50 * (value.high - value.low):.{digits}f} %"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def tied(text: str) -> str:
    """No line ends between a number and its per cent sign."""
    return text.replace(" %", "\u00a0%")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
