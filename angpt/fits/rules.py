"""Write fitted laws as defaults of `angpt train` into a file of rules."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from angpt.errors import UserError
from angpt.fits.hparams import Trend
from angpt.present.words import quantity
from angpt.serialization import from_dict, to_toml, toml_values
from angpt.system import write_atomically
from angpt.training import plan
from angpt.training.plan import ANCHOR, Rule

RULES = Path(plan.__file__).with_name("rules.toml")


def write_rules(path: Path, trends: Sequence[Trend], source: str) -> list[str]:
    """Write the laws to the file of rules at `path` (new: a copy of the package's rules); return a line for each law.

    A law replaces learning rate and batch size, and the exponents below and above the anchor if the fit has models
    there.
    """
    base = path if path.exists() else RULES
    try:
        rules = {name: from_dict(Rule, values, name) for name, values in toml_values(base).items()}
    except UserError as error:
        raise UserError(f"{base}: is not a file of rules ({error}); choose another path for --write-rules") from error
    text = base.read_text(encoding="utf-8")
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    comments, done = _comments(text), []
    for trend in trends:
        if trend.architecture not in rules:
            raise UserError(f"--write-rules: no rule for {trend.architecture}; rules exist for {', '.join(rules)}")
        if trend.lr.freedom < 1:
            raise UserError(f"--write-rules: {trend.architecture} has an optimum for two sizes; a rule needs three")
        rules[trend.architecture] = rule = _rule(trend, rules[trend.architecture])
        sizes = f"{len(trend.sizes)} sizes from {quantity(trend.sizes[0])} to {quantity(trend.sizes[-1])}"
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


def _comments(text: str) -> dict[str, str]:
    """The comment on the source of its numbers above each table, by the table's name."""
    lines = text.splitlines(keepends=True)
    pairs = itertools.pairwise(lines)
    return {line.strip().strip('[]"'): last for last, line in pairs if line[0] == "[" and last.startswith("# Fitted")}


def _rule(trend: Trend, old: Rule) -> Rule:
    exponent = float(f"{trend.lr.exponent:.3g}")
    below, above = old.lr_exponents
    exponents = exponent if trend.sizes[0] < ANCHOR else below, exponent if trend.sizes[-1] > ANCHOR else above
    return dataclasses.replace(
        old,
        lr=float(f"{trend.lr.at(ANCHOR).mean:.3g}"),
        lr_exponents=exponents,
        batch_tokens=round(trend.batch_tokens.at(ANCHOR).mean),
        batch_exponent=float(f"{trend.batch_tokens.exponent:.3g}"),
    )
