"""Numbers as text, and text of others made safe to show. Equal numbers look equal: all are formatted here."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from angpt.errors import one_line

if TYPE_CHECKING:
    from angpt.stats import Interval

NONE = "–"
"""Text for a missing number."""
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
LABELS = {"gpt+": "GPT+", "ngpt": "nGPT", "angpt": "anGPT"}


def label(recipe: str) -> str:
    """Name of a recipe in text: `angpt/no-lerp` is anGPT no-lerp, `angpt:muon` is anGPT with Muon."""
    architecture, _, optimizer = recipe.partition(":")
    family, _, variant = architecture.partition("/")
    name = f"{LABELS.get(family, family)} {variant}".strip()
    return f"{name} with {optimizer.capitalize()}" if optimizer else name


def quantity(number: float) -> str:
    """A count with three digits and a unit: 400k, 1.5M, 2B, 1T."""
    number = float(f"{number:.3g}")  # rounded first: 999,999 is 1M
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def scientific(number: float, digits: int = 2) -> str:
    """A positive number as a power of ten with this many digits before it: 10¹⁹, 3.2·10¹⁸."""
    mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
    power = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    return power if float(mantissa) == 1 else f"{mantissa}·{power}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits: 0.0502, 1.23, 45.6; thousands in full; 0 below 1e-6."""
    if value is None:
        return NONE
    if abs(value) < 1e-6:
        return "0"
    text = f"{value:#.{digits}g}".removesuffix(".")
    return f"{value:,.0f}" if "e+" in text else text


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction in per cent: 0.125 is 12.5 %."""
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def span(values: Sequence[float | None], form: Callable[[float], str] = number, unit: str = "") -> str:
    """The range of the known values, 0.5 to 1.25, or the one value if they look equal."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    low, high = form(min(known)), form(max(known))
    return (low if low == high else f"{low} to {high}") + unit


def duration(seconds: float) -> str:
    """Seconds as hours, minutes or seconds: 2.5 h, 3.0 min, 90.0 s."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def interval(value: "Interval", digits: int) -> str:
    """Mean and half width of its interval, 3.543 ± 0.025, or the mean alone if there is no interval."""
    mean = f"{value.mean:.{digits}f}"
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ± {(value.high - value.low) / 2:.{digits}f}"


def bracketed(value: "Interval", form: str, unit: str = "") -> str:
    """Estimate and interval, 0.466 [0.451, 0.480], or the estimate alone if there is no interval."""
    text = f"{value.mean:{form}}{unit}"
    if value.low is not None and value.high is not None:
        text += f" [{value.low:{form}}, {value.high:{form}}]"
    return text.replace("-", "−")


def speedup(value: float, low: float | None = None, high: float | None = None, relation: str = "=") -> str:
    """A speedup and its interval, 1.42× [1.31, 1.55], or a bound, > 1.80×."""
    from angpt.stats import Interval

    return ("" if relation == "=" else f"{relation} ") + bracketed(Interval(value, low, high), ".2f", "×")


def overhead(value: "Interval", digits: int = 1) -> str:
    """Change relative to the baseline in per cent: +3.1 % ± 0.4 %."""
    text = f"{100 * value.mean:+.{digits}f} %".replace("-", "−")
    if value.low is None or value.high is None:
        return text
    return f"{text} ± {50 * (value.high - value.low):.{digits}f} %"


def listed(words: Sequence[str]) -> str:
    """The words joined as in a sentence: a, b and c."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def tied(text: str) -> str:
    """The text with non-breaking spaces before per cent signs, after ±, > and <, and inside brackets of intervals."""
    text = re.sub(r"\[[\d., −-]*\]", lambda found: found[0].replace(" ", "\u00a0"), text)
    return re.sub(r" (?=%)|(?<=[±><]) ", "\u00a0", text)


def printable(text: str) -> str:
    """The text with control characters other than line breaks and tabs as escapes."""
    return re.sub(r"[^\n\t]+", lambda found: one_line(found[0]), text)


def without_html(markdown: str) -> str:
    """Markdown in which every `<` that would begin an HTML tag is text."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", markdown)


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 run, 2 runs."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
