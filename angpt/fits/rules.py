"""Fitted laws as the defaults of `angpt train`: the file of rules with some of its numbers replaced."""

import dataclasses
import itertools
import tomllib
from collections.abc import Sequence
from pathlib import Path

from angpt.config import from_dict, to_toml
from angpt.errors import UserError
from angpt.fits.hparams import Trend
from angpt.present.words import quantity
from angpt.system import write_atomically
from angpt.training import plan
from angpt.training.plan import ANCHOR, Rule

RULES = Path(plan.__file__).with_name("rules.toml")


def write_rules(path: Path, trends: Sequence[Trend], source: str) -> list[str]:
    """Write the laws into the file of rules at `path`, which starts as a copy of the package's; a line for each law.

    A law replaces rate, batch and the exponents on the side of the anchor that has models of the fit; beyond them, an
    exponent that was there stays.
    """
    base = path if path.exists() else RULES
    try:
        text = base.read_text(encoding="utf-8")
        rules = {name: from_dict(Rule, values, name) for name, values in tomllib.loads(text).items()}
    except (OSError, ValueError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{base}: is no file of rules ({error}); choose another path for --write-rules") from error
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    comments, done = _comments(text), []
    for trend in trends:
        if trend.architecture not in rules:
            known = ", ".join(rules)
            raise UserError(f"--write-rules: there is no rule for {trend.architecture}; rules are for {known}")
        if trend.lr.freedom < 1:
            raise UserError(f"--write-rules: {trend.architecture} has two sizes with an optimum; a rule needs three")
        rules[trend.architecture] = rule = _rule(trend, rules[trend.architecture])
        sizes = listed_sizes(trend)
        comments[trend.architecture] = f"# Fitted to {sizes} by: {source}\n"
        done.append(
            f"{trend.architecture}: lr = {rule.lr:g}, exponents {list(rule.lr_exponents)}, batch_tokens = "
            f"{rule.batch_tokens:,}, exponent {rule.batch_exponent:g} at {quantity(ANCHOR)} parameters, from {sizes}"
        )
    parts = [f"\n{comments.get(name, '')}{to_toml({name: rule}).lstrip()}" for name, rule in rules.items()]
    try:
        write_atomically(path, head + "".join(parts))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
    return done


def listed_sizes(trend: Trend) -> str:
    return f"{len(trend.sizes)} sizes from {quantity(trend.sizes[0])} to {quantity(trend.sizes[-1])}"


def _comments(text: str) -> dict[str, str]:
    """The comment right above each table, by its name: where its numbers come from."""
    found, last = {}, ""
    for line in text.splitlines(keepends=True):
        if line.startswith("[") and last.startswith("# Fitted"):
            found[line.strip().strip('[]"')] = last
        last = line
    return found


def _rule(trend: Trend, old: Rule) -> Rule:
    exponent = float(f"{trend.lr.exponent:.3g}")
    below, above = old.lr_exponents
    return dataclasses.replace(
        old,
        lr=float(f"{trend.lr.at(ANCHOR).mean:.3g}"),
        lr_exponents=(
            exponent if trend.sizes[0] < ANCHOR else below,
            exponent if trend.sizes[-1] > ANCHOR else above,
        ),
        batch_tokens=round(trend.batch_tokens.at(ANCHOR).mean),
        batch_exponent=float(f"{trend.batch_tokens.exponent:.3g}"),
    )
