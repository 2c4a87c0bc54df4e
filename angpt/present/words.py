"""Numbers as people read them. Every number of the page is written here, so that equal values look equal."""

from collections.abc import Sequence

from angpt.stats import Interval

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


def speedup(value: float, low: float | None = None, high: float | None = None, relation: str = "=") -> str:
    """1.42× [1.31, 1.55]; where only a bound is known, > 1.80×."""
    text = f"{'' if relation == '=' else relation + ' '}{value:.2f}×"
    return text if low is None or high is None else f"{text} [{low:.2f}, {high:.2f}]"


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
