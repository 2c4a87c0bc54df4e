"""The page where each table and figure of the paper stands with what we found and a verdict."""

import math
import re

from angpt.config import Recipe
from angpt.evaluation.tasks import TASKS
from angpt.present.tables import Table
from angpt.present.words import bracketed, label, listed, overhead, quantity, speedup
from angpt.stats import Interval
from experiments.evidence import paper, sweeps
from experiments.evidence.items import EVIDENCE
from experiments.evidence.protocol import BUDGETS, LARGEST
from experiments.evidence.results import WARM_UP, Results, curve
from experiments.evidence.tables import ablation, difference, improvements
from experiments.evidence.trials import arm_name

EARLIER = "earlier models, 39M tokens"
Finding = tuple[str, str]
"""What we found, in words, and the verdict."""
TOO_LARGE: Finding = ("", paper.NOT_HERE)


def exhibits(results: Results) -> Table:
    """Every table and figure of the paper with a verdict."""
    ablations = "[table](#ablations)"
    steps = improvements(results, "gpt+/no-qk-norm", paper.STEPS)
    related = improvements(results, "gpt+", paper.RELATED)
    speed = {name: speed_up(results, name) for name in paper.SPEED_UPS}
    time = {name: step_time(results, name) for name in paper.STEP_TIMES}
    inside = {start: claim(results, start) for start in CLAIMS}
    rates, batches = of_size()
    found: list[tuple[str, str, Finding]] = [
        ("Figure 1", "input norms grow with depth in GPT+, little in anGPT, not in nGPT", inside["The residual norm"]),
        ("Table 1", "the architectures", ("[the same, from the code](../table1.md)", paper.HOLDS)),
        ("Figures 2, G.1", "the best learning rate of anGPT falls with size", rates),
        ("Figures 2, G.1", "its best batch grows with size", batches),
        ("Figure 3", "anGPT needs 1.4 times fewer tokens than GPT+", speed["angpt"]),
        ("Figure 3", "nGPT needs 1.29 times fewer tokens than GPT+", speed["ngpt"]),
        ("Table 2", "a step of anGPT takes at most 2.75 % more time than one of GPT+", time["angpt"]),
        ("Table 2", "a step of nGPT takes at most 9.60 % more time than one of GPT+", time["ngpt"]),
        ("Figures 4, J.1, Table J.1", "scaling laws from 32M to 1B have nearly equal exponents", TOO_LARGE),
        ("Figure 5", "steps from GPT to anGPT", (ablations, worst(steps))),
        ("Figure A.1", "DyT is worse than GPT+, LN scaling equal", (ablations, worst(related))),
        ("Figure B.1", "Adam's first moment spikes early in GPT+, not in anGPT", inside["Adam's first moment"]),
        ("Figure B.2", "without warm-up the peaks are higher", inside["Without warm-up"]),
        ("Figure C.1", "γ of GPT+ grows with the input norm", inside["γ of GPT+"]),
        ("Table F.1", "sizes and parameter counts", ("the same to the printed digits (a test)", paper.HOLDS)),
        ("Table F.2", "anGPT needs neither warm-up nor decay, GPT+ both", fewer_settings(results)),
        ("Figure H.1", "losses of nGPT's public code at 0.5B", TOO_LARGE),
        ("Figure H.2", "anGPT needs 2.0 times fewer tokens than GPT+ without QK norm", TOO_LARGE),
        ("Figure I.1", "the speed-up is the same at 250M and 1B", TOO_LARGE),
        ("Table K.1", "anGPT is better than GPT+ on tasks", tasks_verdict(results)),
        ("Table L.1", "the factors matter, above all that of the residual", (ablations, worst(ablation(results)))),
        ("Figure M.1", "α rises from 0.05 to 0.12–0.25", inside["α rises"]),
        ("Table N.1", "output over input norm of blocks is near 1 in anGPT", inside["Output over input norm"]),
        ("Table N.2", "a constant is within 2 % of the norm that it replaces", inside["The error of a constant"]),
        ("Table O.1", "a repeated token changes norms more in GPT+ than in anGPT", inside["On a repeated token"]),
        ("Figure P.1", "rows of anGPT's weights stay close to length 1", inside["Although only bounded"]),
    ]
    rows = [(place, theirs, *ours) for place, theirs, ours in found]
    return Table(("", "the paper", "ours", "verdict"), rows, prose=True)


CLAIMS = {
    "The residual norm": 3, "Adam's first moment": 1, "Without warm-up": 1, "γ of GPT+": 1, "α rises": 1,
    "Output over input norm": 1, "The error of a constant": 1, "On a repeated token": 1, "Although only bounded": 1,
}  # fmt: skip
"""How the claims of `angpt.analysis.claims` begin, and how many of each there are."""


def claim(results: Results, start: str) -> Finding:
    """Claims about the inside of models, which all must hold."""
    found = [claimed for claimed in results.claims if claimed.paper.startswith(start)]
    if not found:
        ends = [results.protocol.loss("sensitivity", name) for name in WARM_UP if start == "Without warm-up"]
        return "", paper.DIVERGED if math.inf in ends else paper.NOT_RUN
    complete = len(found) == CLAIMS[start]
    verdict = paper.FAILS if not all(c.holds for c in found) else paper.HOLDS if complete else paper.DIVERGED
    text, source = re.sub(r"(?<!\w)-(?=\d)", "−", " ".join(claimed.here for claimed in found)), found[0].source
    return (f"{text} ({source})", verdict) if source else (f"{text} ({EARLIER})", f"{verdict}, provisional")


def speed_up(results: Results, recipe: Recipe) -> Finding:
    needed = [(arm, budget) for budget in BUDGETS for arm in ("gpt+", recipe)]
    needed += [(arm, budget) for budget, arms in LARGEST.items() for arm in ("gpt+", recipe) if arm in arms]
    gone = [f"{label(arm)} at {budget}" for arm, budget in needed if results.diverged(arm, budget)]
    if gone:
        return f"diverged: {', '.join(gone)}", paper.DIVERGED
    if not all(results.complete(arm, budget) for arm, budget in needed):
        return "", paper.NOT_RUN
    if (found := results.mean_speed_up(recipe)) is None:
        return "[no mean](#speed-up)", paper.OPEN
    mean, relation = found
    text = f"{speedup(mean.mean, mean.low, mean.high, relation)}, mean over {listed(list(BUDGETS))}"
    verdict = paper.bound_judged(mean, relation, paper.SPEED_UPS[recipe])
    for budget in LARGEST:
        row = results.row(recipe, budget, results.with_adam)
        if row and row.speedup_tokens:
            text += f"; {speedup(**vars(row.speedup_tokens))} at {budget}"
            slower = row.speedup_tokens.relation != ">" and row.speedup_tokens.value < 1
            verdict = paper.FAILS if slower else verdict
    return text, verdict


def step_time(results: Results, recipe: Recipe) -> Finding:
    """The time per step, measured in turns in one process. That of the final runs is beside it; it decides nothing,
    because they run one after the other, on different days and machines."""
    ours, limit = in_turns(recipe), paper.STEP_TIMES[recipe]
    assert ours.high is not None
    found = f"{overhead(ours)} in one call at [0.5B, one H200](../performance.md)"
    if finals := results.overhead(recipe):
        found += f"; {overhead(finals)} in the final runs"
    return found, paper.HOLDS if ours.high <= limit else paper.OPEN if ours.covers(limit) else paper.FAILS


def in_turns(recipe: Recipe) -> Interval:
    """The time of a step over that of GPT+, minus 1, at 0.5B with 8 sequences: a row of a table of performance.md."""
    page, start = EVIDENCE.parent / "performance.md", "| 0.5B, 8 sequences: GPT+"
    head, _, rows = page.read_text(encoding="utf-8").partition(start)
    names = [cell.strip() for cell in head.splitlines()[-2].split("|")] if rows else []
    row = next((line.split("|") for line in rows.splitlines() if line.startswith(f"| {label(recipe)} ")), None)
    if row is None or not {"÷ GPT+", "95 %"} <= {*names}:
        raise ValueError(f"{page}: no row {label(recipe)!r} below {start!r} with columns '÷ GPT+' and '95 %'")
    low, high = map(float, row[names.index("95 %")].split("–"))
    return Interval(float(row[names.index("÷ GPT+")]) - 1, low - 1, high - 1)


def of_size() -> tuple[Finding, Finding]:
    """The exponents of the best learning rate and batch of anGPT with Adam over the size, from all sweeps."""
    trend = next(t for t in sweeps.fitted().trends if t.architecture == "angpt")
    findings = []
    for name, fitted, sign in (("rate", trend.lr, -1), ("batch", trend.batch_tokens, 1)):
        exponent = None if fitted is None else fitted.law.exponents.get("parameters")
        if fitted is None or exponent is None:
            findings.append(("", paper.NOT_RUN))
            continue
        sizes = f"{quantity(fitted.sizes[0])} to {quantity(fitted.sizes[-1])}"
        ends = [sign * end for end in (exponent.low, exponent.high) if end is not None]
        verdict = (
            paper.OPEN if not ends or min(ends) <= 0 <= max(ends) else paper.HOLDS if min(ends) > 0 else paper.FAILS
        )
        findings.append((f"{name}: exponent {bracketed(exponent, '.2f')} from {sizes}", verdict))
    return findings[0], findings[1]


def fewer_settings(results: Results) -> Finding:
    """Warm-up and decay help GPT+ by more than a tie, and anGPT by less: the loss without, minus that with the chosen
    value, or with the one value that was tried where none was chosen."""
    keys, protocol = ("optimizer.warmup", "optimizer.weight_decay"), results.protocol
    gains = {}
    for arm in ("gpt+", "angpt"):
        for key in keys:
            found = {float(value): loss for value, loss in curve(protocol, arm, key).items()}
            if not protocol.tuned or None in found.values():
                return "[curves](#sensitivity)", paper.NOT_RUN
            losses = {value: loss for value, loss in found.items() if loss is not None}
            own = float(f"{protocol.chosen(arm).settings.get(key, 0.0):g}") or max(losses)
            if protocol.loss("sensitivity", f"{arm_name(arm)}-chosen") == math.inf:
                return "the chosen settings diverged; [curves](#sensitivity)", paper.DIVERGED
            gains[arm, key] = -math.inf if losses[own] == math.inf else losses[0.0] - losses[own]
    ends = {math.inf: "diverges without", -math.inf: "diverges with"}
    shown = {place: ends.get(gain) or difference(gain) for place, gain in gains.items()}
    text = "; ".join(f"{label(a)}, {key.rpartition('.')[2]}: {gain}" for (a, key), gain in shown.items())
    needs = {arm: [gains[arm, key] > results.tie for key in keys] for arm in ("gpt+", "angpt")}
    all_hold = not any(needs["angpt"]) and all(needs["gpt+"])
    weak = not any(needs["angpt"]) and any(needs["gpt+"])
    verdict = paper.HOLDS if all_hold else paper.WEAK if weak else paper.FAILS
    return f"gain by it: {text}; [curves](#sensitivity)", verdict


ORDER = (paper.FAILS, paper.DIVERGED, paper.NOT_RUN, paper.OPEN, paper.WEAK, paper.HOLDS)
"""Verdicts from the one that decides for a whole table to the one that all of its rows must have."""


def worst(table: Table) -> str:
    """The verdict on a whole table; the row of its baseline has none."""
    return min((row[-1] for row in table.rows if row[-1]), key=ORDER.index)


MOST_TASKS = 4
"""Tasks, more than half of all, by which anGPT must lead for its claim to hold."""


def tasks_verdict(results: Results) -> Finding:
    budget = results.tasks_budget()
    one, two = (budget and results.evaluated(arm, budget) for arm in ("gpt+", "angpt"))
    if not one or not two:
        return "[table](#tasks)", paper.NOT_RUN
    better = worse = 0
    for task in paper.TASKS:
        a, b = one.task(task), two.task(task)
        if a and b and a.stderr and b.stderr and abs(a.value - b.value) > 2 * math.hypot(a.stderr, b.stderr):
            gain = (b.value - a.value) * (1 if TASKS[task].higher else -1)
            better, worse = better + (gain > 0), worse + (gain < 0)
    lead = better - worse
    verdict = paper.FAILS if lead < 0 else paper.HOLDS if lead >= MOST_TASKS else paper.WEAK if lead else paper.OPEN
    return f"{budget}: better on {better}, worse on {worse} by two standard errors; [table](#tasks)", verdict
