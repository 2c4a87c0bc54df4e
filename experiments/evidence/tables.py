"""Tables of docs/evidence, computed from its run folders. Runs that are missing are said to be missing."""

import math
from collections import Counter
from collections.abc import Sequence

from angpt.config import Recipe
from angpt.evaluation.results import lines, with_error
from angpt.models.folded import EIGHT_BITS
from angpt.present.tables import Table
from angpt.present.words import NONE, bracketed, label, overhead, quantity, speedup
from angpt.studies.jobs import ended
from experiments.evidence import paper
from experiments.evidence.protocol import BUDGETS, INSIDE, LARGEST, QUANTIZED, SENSITIVITY, Protocol
from experiments.evidence.queue import STAGES
from experiments.evidence.results import SIGNIFICANT, Comparison, Results, curve
from experiments.evidence.trials import ARMS, TIE, TRIED, Trial, arm_name, best_trial, edges_of

GUESS = math.log(50_304)
"""Loss of a uniform guess; that of a run that diverged in means over trials."""
SHOWN_TRIALS = (1, 2, 4, 8, 12)


def state(protocol: Protocol) -> Table:
    """How many runs of each part have ended."""
    counts: dict[str, list[bool]] = {}
    for item in protocol.items():
        if item.stage in STAGES and STAGES[item.stage][0].isdigit():
            budget = f", {quantity(float(item.config.tokens[:-1]) * 1e6)}" if item.stage == "final" else ""
            ended = protocol.loss(item.stage, item.name) is not None
            counts.setdefault(STAGES[item.stage][2:] + budget, []).append(ended)
    rows = [(name, str(sum(found)), str(len(found)), str(len(found) - sum(found))) for name, found in counts.items()]
    return Table(("", "ended", "planned", "missing"), rows)


def words(trial: Trial) -> str:
    """The settings of a trial without architecture and optimizer."""
    own = {k: v for k, v in trial.settings.items() if k not in ("model.architecture", "optimizer.name")}
    return ", ".join(f"{key.partition('.')[2]} {value:g}" for key, value in own.items())


def shown(loss: float | None, digits: int = 4) -> str:
    return "not run yet" if loss is None else "diverged" if loss == math.inf else f"{loss:.{digits}f}"


def tried(protocol: Protocol) -> str:
    """How many trials have ended, with which commits of the package, and which are missing, in words."""
    every = [trial for arm in ARMS for trial in protocol.trials(arm, protocol.extended)]
    missing = [trial.name for trial in every if trial.loss is None]
    folders = (root / "tuning" / trial.name for trial in every for root in protocol.roots)
    noted = (summary.environment.get("commit") for summary in map(ended, folders) if summary is not None)
    commits = Counter("not noted" if commit is None else commit[:7] for commit in noted)
    listed = ", ".join(f"{commit} ({count})" for commit, count in commits.most_common())
    text = f"{len(every) - len(missing)} of {len(every)} trials have ended, with the package at commits {listed}."
    rest = f" Missing: {', '.join(missing)}; until they have ended, no settings are chosen." if missing else ""
    return f"{text}{rest}\n"


def trials(protocol: Protocol) -> Table:
    """All trials, the best of each arm first."""
    rows = []
    for arm in ARMS:
        order = sorted(protocol.trials(arm, protocol.extended), key=lambda t: math.inf if t.loss is None else t.loss)
        rows += [(trial.name, words(trial), shown(trial.loss)) for trial in order]
    return Table(("trial", "settings", "tuning loss"), rows, left=(0, 1))


def choice(protocol: Protocol) -> Table:
    """The best trial of each arm, ties, and what the edge rule says."""
    rows = []
    for arm in ARMS:
        found = protocol.trials(arm, protocol.extended)
        best, ran = best_trial(found), [trial for trial in found if trial.loss is not None]
        if best is None or best.loss is None:
            rows.append((arm_name(arm), f"{len(ran)} of {len(found)}", "", "not run yet", "", "", ""))
            continue
        near = [t.name for t in ran if t is not best and t.loss is not None and t.loss <= best.loss + TIE]
        sides = [edge_words(protocol.edges(arm)), edge_words(edges_of(found)) if protocol.tuned else ""]
        cells = best.name, shown(best.loss), ", ".join(near) or NONE, *sides
        rows.append((arm_name(arm), f"{len(ran)} of {len(found)}", *cells))
    note = "Chosen." if protocol.tuned else "So far: settings are chosen when every trial has ended."
    edges = f"edge, of the first {TRIED}", "edge, of all"
    columns = ("arm", "trials", "best", "tuning loss", f"within {TIE:g} of it", *edges)
    return Table(columns, rows, note=note, left=(0, 2, 4, 5, 6))


def edge_words(edges: dict[str, int]) -> str:
    words = [f"{'lowest' if side < 0 else 'highest'} {key.rpartition('.')[2]}" for key, side in edges.items()]
    return ", ".join(words) or NONE


def losses(results: Results) -> Table:
    """Mean and every seed of the final runs."""
    rows = []
    for arm in ARMS:
        cells = []
        for budget, arms in {**BUDGETS, **LARGEST}.items():
            found = results.losses(arm, budget) if arm in arms else {}
            known = [loss for loss in found.values() if loss is not None and loss < math.inf]
            each = ", ".join(shown(loss, 3) for loss in found.values() if loss is not None)
            mean = "" if len(known) < len(found) or len(known) < 2 else f"{sum(known) / len(known):.3f}: "
            missing = sum(loss is None for loss in found.values())
            cells.append(f"{mean}{each}{f' ({missing} not run yet)' if missing and each else ''}" or "not run yet")
            cells[-1] = cells[-1] if found else NONE
        rows.append((label(arm), *cells))
    return Table(("", *BUDGETS, *LARGEST), rows, left=range(5))


def tests(results: Results, found: Sequence[Comparison], adjusted: bool) -> Table:
    """Differences of means, their intervals and p-values."""
    rows = []
    for c in found:
        pair = f"{label(c.two)} − {label(c.one)}"
        if c.difference is None:
            gone = [f"{label(arm)} diverged" for arm in (c.one, c.two) if results.diverged(arm, c.budget)]
            rows.append((pair, c.budget, "", "", *([""] if adjusted else []), ", ".join(gone) or "not run yet"))
            continue
        p = c.adjusted if adjusted else c.difference.p_value
        better = label(c.two if c.difference.estimate.mean < 0 else c.one)
        verdict = f"{better} is better" if p is not None and p < SIGNIFICANT else "not told apart"
        numbers = [probability(c.difference.p_value), *([probability(c.adjusted)] if adjusted else [])]
        rows.append((pair, c.budget, bracketed(c.difference.estimate, "+.4f"), *numbers, verdict))
    columns = ("", "tokens", "difference", "p", *(["p, Holm"] if adjusted else []), "")
    return Table(columns, rows, left=(0, len(columns) - 1))


def probability(p: float | None) -> str:
    return NONE if p is None else f"{p:.1g}" if p < 0.001 else f"{p:.3f}"


def speed_ups(results: Results) -> Table:
    """Speed-up over GPT+ with the same optimizer, in tokens and time, and over GPT+ with Adam."""
    rows = []
    for arm in ARMS:
        own = results.with_muon if ":" in arm else results.with_adam
        for budget, arms in {**BUDGETS, **LARGEST}.items():
            if arm not in arms or arm == "gpt+":
                continue
            same, adam = results.row(arm, budget, own), results.row(arm, budget, results.against_adam)
            if same is None or adam is None:
                rows.append(
                    (label(arm), budget, "diverged" if results.diverged(arm, budget) else "not run yet", "", "")
                )
                continue
            found = same.speedup_tokens, same.speedup_seconds, adam.speedup_tokens
            rows.append((label(arm), budget, *(speedup(**vars(s)) if s else NONE for s in found)))
    same_optimizer = ("in tokens", "in time")
    return Table(("", "tokens", *same_optimizer, "in tokens, over GPT+ with Adam"), rows)


def finite(found: dict[int, float | None]) -> list[float]:
    """The losses if all have finished."""
    known = [loss for loss in found.values() if loss is not None and loss < math.inf]
    return known if len(known) == len(found) else []


def seeds(found: dict[int, float | None]) -> str:
    known = [shown(loss, 3) for loss in found.values() if loss is not None]
    return ", ".join(known) or "not run yet"


def ablation(results: Results) -> Table:
    """The paper's table of ablations beside ours; changes are relative to anGPT."""
    base, theirs = finite(results.ablation("angpt")), paper.ABLATION["angpt"]
    rows = []
    for name, loss in paper.ABLATION.items():
        recipe, _, tokens = name.partition(", ")
        budget = {"half the tokens": "40M", "twice the tokens": "160M"}.get(tokens, "80M")
        found = results.ablation(recipe, budget)
        diverged = any(value == math.inf for value in found.values())
        ours, change = results.change(finite(found), base), loss / theirs - 1
        of_paper = "NaN" if loss == math.inf else f"{loss:.3f} ({percent_change(change)})"
        verdict = paper.change_judged(ours, change) if name != "angpt" else ""
        if diverged:
            verdict = paper.HOLDS if loss > 2 * theirs else paper.FAILS
        elif loss == math.inf and ours is not None:
            verdict = paper.FAILS
        rows.append((_name(name), of_paper, seeds(found), overhead(ours, 2) if ours else "", verdict))
    return Table(("", "paper, 0.5B, 10B tokens", "ours, 32M, 80M tokens", "change", ""), rows, left=(0, 4))


def _name(name: str) -> str:
    recipe, comma, rest = name.partition(", ")
    return label(recipe) + comma + rest


def percent_change(value: float) -> str:
    return f"{100 * value + 0.0:+.2f} %".replace("-", "−")


def improvements(results: Results, base: Recipe, of_paper: dict[str, float]) -> Table:
    """A figure of the paper with improvements in per cent over a baseline, beside ours."""
    rows = [(label(base), "", seeds(results.ablation(base)), "", "")]
    for recipe, theirs in of_paper.items():
        found = results.ablation(recipe)
        ours = results.change(finite(found), finite(results.ablation(base)))
        cells = percent_change(-theirs / 100), seeds(found), overhead(ours, 2) if ours else ""
        rows.append((label(recipe), *cells, paper.change_judged(ours, -theirs / 100)))
    return Table(("", "paper", "ours", "change", ""), rows, left=(0, 4))


def sensitivity(protocol: Protocol) -> Table:
    """Tuning losses with other values of one setting than the chosen one."""
    rows = []
    for arm in ARMS:
        chosen = protocol.loss("sensitivity", f"{arm_name(arm)}-chosen")
        for key in SENSITIVITY:
            losses = curve(protocol, arm, key)
            found = {value: loss for value, loss in losses.items() if loss is not None}
            text = ", ".join(f"{value.replace('x', '× ')}: {shown(loss, 3)}" for value, loss in found.items())
            worst = max(found.values(), default=math.nan)
            cost = f"{worst - chosen:+.3f}" if chosen is not None and len(found) > 1 and worst < math.inf else ""
            known = text if chosen is not None and len(found) > 1 else "not run yet"
            if losses:
                rows.append((label(arm), key.rpartition(".")[2], known, cost))
    return Table(("", "setting", "tuning loss at each value", "worst − chosen"), rows, left=(0, 1, 2))


def expected_best(values: Sequence[float], count: int) -> float:
    """The mean of the lowest of `count` values, over all choices of so many of them."""
    ordered, ways = sorted(values), math.comb(len(values), count)
    return sum(value * math.comb(len(ordered) - i - 1, count - 1) for i, value in enumerate(ordered)) / ways


def best_of(protocol: Protocol) -> Table:
    """The tuning loss to expect from fewer random trials: how much tuning an arm needs."""
    rows = []
    for arm in ARMS:
        found = [trial.loss for trial in protocol.trials(arm, extended=False)]
        known = [min(loss, GUESS) for loss in found if loss is not None]
        if len(known) < len(found):
            rows.append((label(arm), *["not run yet"] * len(SHOWN_TRIALS)))
            continue
        best = min(known)
        rows.append((label(arm), *(f"+{expected_best(known, n) - best:.3f}" for n in SHOWN_TRIALS[:-1]), f"{best:.3f}"))
    return Table(("", *(f"best of {n}" for n in SHOWN_TRIALS)), rows)


def tasks(results: Results) -> Table:
    """The paper's table of tasks beside ours."""
    models = {name: results.tasks(name) for name in ("gpt+", "angpt", "gpt+:muon", "angpt:muon")}
    rows = []
    for task, (theirs, theirs_angpt) in paper.TASKS.items():
        cells = []
        for found in models.values():
            value = found.task(task) if found else None
            error = f" ± {value.stderr:.3g}" if value and value.stderr else ""
            cells.append(f"{value.value:.3g}{error}" if value else "not run yet")
        rows.append((task, f"{theirs:g}", f"{theirs_angpt:g}", *cells))
    return Table(("", "GPT+, paper, 1B", "anGPT, paper, 1B", *(f"{label(name)}, 32M" for name in models)), rows)


def quantized(results: Results) -> Table:
    """Loss and tasks of the same models with matrices in bf16 and in 8 bits."""
    forms = ("bf16", *EIGHT_BITS)
    columns = [f"{label(arm)}, {form}" for arm in QUANTIZED for form in forms]
    found = [results.evaluated(arm, INSIDE[0], "" if form == "bf16" else form) for arm in QUANTIZED for form in forms]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return Table(("", *columns), [("loss, seven tasks", *["not run yet"] * len(columns))])
    rows = [
        (f"{line.label}, {line.metric} {'↑' if line.higher else '↓'}", *map(with_error, line.values))
        for line in lines(known)
    ]
    return Table(("", *columns), rows)
