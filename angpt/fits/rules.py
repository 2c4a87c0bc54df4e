"""Write fitted laws as defaults of `angpt train` into a file of rules."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from angpt.errors import UserError
from angpt.fits.hparams import Trend
from angpt.fits.plane import PlaneLaw
from angpt.present.words import bracketed, quantity
from angpt.serialization import from_dict, to_toml, toml_values
from angpt.system import write_atomically, written_at_end
from angpt.training import plan
from angpt.training.plan import ANCHOR, ANCHOR_TOKENS, Rule

RULES = Path(plan.__file__).with_name("rules.toml")
WORDS = {"parameters": "parameters", "tokens": "tokens", "batch_tokens": "tokens per step"}
"""What the laws depend on, in words."""


def write_rules(path: Path, trends: Sequence[Trend], source: str) -> list[str]:
    """Write the laws to a file of rules; return a line for each law."""
    text, lines = new_rules(path, trends, source)
    with _explained(path):
        write_atomically(path, text)
    return lines


@contextmanager
def written_last(path: Path, text: str, new: Path) -> Iterator[None]:
    """Write a file of rules when a `with` block ends that makes the folder `new`, in which the file may be.

    Other paths that cannot be written are found before the block begins.
    """
    with ExitStack() as stack:
        with _explained(path):
            later = not path.parent.exists() and path.parent.resolve() == new.resolve()
            if not later:
                stack.enter_context(written_at_end(path, text))
        yield
        with _explained(path):
            if later:
                write_atomically(path, text)
            stack.close()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError inside a `with` block into an error that names the file of rules."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error


def new_rules(path: Path, trends: Sequence[Trend], source: str) -> tuple[str, list[str]]:
    """The text of a file of rules with the laws, and a line for each law. Without a file at `path`, the other rules are
    those of the package.

    The law of the learning rate replaces the rate at the anchor and its exponents, those over parameters below and
    above the anchor if the fit has models there. A law of the batch size with an interval replaces batch size and
    exponents likewise; otherwise the batch size stays. Comments above the rule have the intervals.
    """
    base = path if path.exists() else RULES
    try:
        rules = {name: from_dict(Rule, values, name) for name, values in toml_values(base).items()}
    except UserError as error:
        raise UserError(f"{base}: is not a file of rules ({error}); choose another path for --write-rules") from error
    if not trends:
        raise UserError("--write-rules: there is no law to write; the notes above say why")
    text = base.read_text(encoding="utf-8")
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    comments, done = _comments(text), []
    for trend in trends:
        name = trend.architecture
        if name not in rules:
            raise UserError(f"--write-rules: no rule for {name}; rules exist for {', '.join(rules)}")
        law, sizes = trend.lr.law, trend.lr.sizes
        if law.freedom < 1 or len(sizes) < 2:
            raise UserError(
                f"--write-rules: {name} has {len(trend.lr.points)} best rates for {len(sizes)} sizes; a rule needs two "
                "sizes and an interval"
            )
        rules[name] = _rule(trend, rules[name])
        span = f"{len(sizes)} sizes from {quantity(sizes[0])} to {quantity(sizes[-1])}"
        lines = [
            f"Fitted to {len(trend.lr.points)} best rates, {span}, by: {source}",
            *_intervals(trend, rules[name].batch_tokens),
        ]
        comments[name] = "".join(f"# {line}\n" for line in lines)
        done += [f"{name}: {line}" for line in lines]
    parts = [f"\n{comments.get(name, '')}{to_toml({name: _given(rule)}).lstrip()}" for name, rule in rules.items()]
    return head + "".join(parts), done


def _given(rule: Rule) -> dict[str, Any]:
    """The fields of a rule, without optional ones at their default."""
    return {f.name: v for f in dataclasses.fields(Rule) if (v := getattr(rule, f.name)) != f.default}


def _comments(text: str) -> dict[str, str]:
    """The comment on the source of its numbers above each table, by the table's name."""
    found: dict[str, str] = {}
    block: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("#"):
            block.append(line)
            continue
        if line.startswith("[") and block and block[0].startswith("# Fitted"):
            found[line.strip().strip('[]"')] = "".join(block)
        block = []
    return found


def _intervals(trend: Trend, batch: float) -> list[str]:
    """The laws at the anchor, with 95 % intervals."""
    lines = []
    anchor = {"parameters": ANCHOR, "tokens": ANCHOR_TOKENS, "batch_tokens": batch}
    for what, form, law in (("lr", ".3g", trend.lr.law), ("batch_tokens", ",.0f", _batch_law(trend))):
        if law is not None:
            place = ", ".join(f"{quantity(anchor[name])} {WORDS[name]}" for name in law.exponents)
            exponents = ", ".join(f"{bracketed(e, '.3f')} over {WORDS[name]}" for name, e in law.exponents.items())
            lines.append(f"{what} = {bracketed(law.at(anchor), form)} at {place}; exponents {exponents}")
    return lines


def _batch_law(trend: Trend) -> PlaneLaw | None:
    """The law of the batch size if it has an interval and a term for parameters."""
    law = trend.batch_tokens.law if trend.batch_tokens is not None else None
    return law if law is not None and law.freedom > 0 and "parameters" in law.center else None


def _rule(trend: Trend, old: Rule) -> Rule:
    anchor = {"parameters": ANCHOR, "tokens": ANCHOR_TOKENS}
    rule, sizes = old, trend.lr.sizes
    if (law := _batch_law(trend)) is not None:
        rule = dataclasses.replace(
            rule,
            batch_tokens=round(law.at(anchor).mean),
            batch_exponent=_exponent(law, "parameters"),
            batch_tokens_exponent=_exponent(law, "tokens"),
        )
    law = trend.lr.law
    of_size, (below, above) = _exponent(law, "parameters"), old.lr_exponents
    return dataclasses.replace(
        rule,
        lr=_short(law.at({**anchor, "batch_tokens": rule.batch_tokens}).mean),
        lr_exponents=(of_size if sizes[0] < ANCHOR else below, of_size if sizes[-1] > ANCHOR else above),
        lr_tokens_exponent=_exponent(law, "tokens"),
        lr_batch_exponent=_exponent(law, "batch_tokens"),
    )


def _exponent(law: PlaneLaw, name: str) -> float:
    """The exponent, 0 if the law does not have it; that over parameters then includes what grows with them."""
    return _short(law.exponents[name].mean) if name in law.center else 0.0


def _short(value: float) -> float:
    return float(f"{value:.3g}")
