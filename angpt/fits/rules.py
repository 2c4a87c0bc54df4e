"""Write fitted laws as defaults of `angpt train` into a file of rules."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from angpt.errors import UserError
from angpt.fits.hparams import Trend, predict
from angpt.fits.plane import PlaneLaw
from angpt.fits.powerlaw import PowerLaw
from angpt.present.words import bracketed, quantity
from angpt.serialization import from_dict, to_toml, toml_values
from angpt.system import write_atomically
from angpt.training import plan
from angpt.training.plan import ANCHOR, ANCHOR_TOKENS, Rule

RULES = Path(plan.__file__).with_name("rules.toml")


def write_rules(path: Path, trends: Sequence[Trend], source: str) -> list[str]:
    """Write the laws to the file of rules at `path` (new: a copy of the package's rules); return a line for each law.

    A law replaces learning rate and batch size, the exponents below and above the anchor if the fit has models there,
    and the exponents over tokens. Comments above the rule have the intervals.
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
        name = trend.architecture
        if name not in rules:
            raise UserError(f"--write-rules: no rule for {name}; rules exist for {', '.join(rules)}")
        if trend.lr.freedom < 1:
            raise UserError(
                f"--write-rules: {name} has {len(trend.optima)} optima, and a rule with intervals needs one more"
            )
        rules[name] = _rule(trend, rules[name])
        sizes = f"{len(trend.sizes)} sizes from {quantity(trend.sizes[0])} to {quantity(trend.sizes[-1])}"
        lines = [f"Fitted to {len(trend.optima)} optima, {sizes}, by: {source}", *_intervals(trend)]
        comments[name] = "".join(f"# {line}\n" for line in lines)
        done += [f"{name}: {line}" for line in lines]
    parts = [f"\n{comments.get(name, '')}{to_toml({name: _given(rule)}).lstrip()}" for name, rule in rules.items()]
    try:
        write_atomically(path, head + "".join(parts))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
    return done


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


def _intervals(trend: Trend) -> list[str]:
    """The laws at the anchor, with 95 % intervals."""
    lines = []
    anchor = f"{quantity(ANCHOR)} parameters"
    if trend.with_tokens:
        anchor += f" and {quantity(ANCHOR_TOKENS)} tokens"
    for what, law in (("lr", trend.lr), ("batch_tokens", trend.batch_tokens)):
        value = bracketed(predict(law, ANCHOR, ANCHOR_TOKENS), ".3g" if what == "lr" else ",.0f")
        if isinstance(law, PlaneLaw):
            of_size, of_tokens = (bracketed(e, ".3f") for e in law.exponents)
            lines.append(f"{what} = {value} at {anchor}, exponent {of_size} over parameters, {of_tokens} over tokens")
        else:
            lines.append(f"{what} = {value} at {anchor}, exponent {bracketed(law.slope, '.3f')} over parameters")
    return lines


def _rule(trend: Trend, old: Rule) -> Rule:
    lr, batch = trend.lr, trend.batch_tokens
    exponents, tokens = zip(*(_exponents(law) for law in (lr, batch)), strict=True)
    below, above = old.lr_exponents
    return dataclasses.replace(
        old,
        lr=_short(predict(lr, ANCHOR, ANCHOR_TOKENS).mean),
        lr_exponents=(
            exponents[0] if trend.sizes[0] < ANCHOR else below,
            exponents[0] if trend.sizes[-1] > ANCHOR else above,
        ),
        lr_tokens_exponent=tokens[0],
        batch_tokens=round(predict(batch, ANCHOR, ANCHOR_TOKENS).mean),
        batch_exponent=exponents[1],
        batch_tokens_exponent=tokens[1],
    )


def _exponents(law: PowerLaw | PlaneLaw) -> tuple[float, float]:
    """The exponents over parameters and tokens; a law over parameters alone includes tokens that grow with them."""
    if isinstance(law, PlaneLaw):
        of_size, of_tokens = law.exponents
        return _short(of_size.mean), _short(of_tokens.mean)
    return _short(law.exponent), 0.0


def _short(value: float) -> float:
    return float(f"{value:.3g}")
