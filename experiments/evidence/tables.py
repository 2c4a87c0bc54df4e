"""Tables of docs/evidence, computed from its run folders. Runs that are missing are said to be missing."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from angpt.config import Recipe, TrainConfig, parse_budget
from angpt.evaluation.results import lines, with_error
from angpt.evaluation.tasks import TASKS
from angpt.present.tables import Table
from angpt.present.words import NONE, bracketed, label, overhead, quantity, speedup
from angpt.studies.jobs import ended
from angpt.training.plan import make_plan
from experiments.evidence import paper
from experiments.evidence.inside import FORMS
from experiments.evidence.protocol import BUDGETS, INSIDE, LARGEST, QUANTIZED, SEEDS, SENSITIVITY, Protocol
from experiments.evidence.queue import STAGES
from experiments.evidence.results import SIGNIFICANT, Comparison, Results, curve
from experiments.evidence.trials import ARMS, TRIED, Trial, arm_name, best_trial, edges_of

GUESS = math.log(50_304)
"""Loss of a uniform guess; that of a run that diverged in means over trials."""
SHOWN_TRIALS = (1, 2, 4, 8, 12)
BASELINES: tuple[Recipe, ...] = ("gpt+", "gpt+:muon")
DEFAULTS, NEAR = ("80M", "320M"), 0.02
"""Budgets at which the defaults are compared with the chosen settings, and the difference that is small enough."""
SCALED: tuple[Recipe, ...] = ("gpt+", "angpt", "gpt+:muon", "angpt:muon")
"""Arms that are trained at other sizes, and scored on tasks."""


def state(protocol: Protocol) -> Table:
    """How many runs of each part have ended."""
    counts: dict[str, list[bool]] = {}
    for item in protocol.items():
        if item.stage in STAGES and STAGES[item.stage][0].isdigit():
            budget = f", {quantity(parse_budget(item.config.tokens, 1))}" if item.stage == "final" else ""
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


def choice(results: Results) -> Table:
    """The best trial of each arm, ties, and what the edge rule says."""
    rows, protocol = [], results.protocol
    for arm in ARMS:
        found = protocol.trials(arm, protocol.extended)
        best, ran = best_trial(found), [trial for trial in found if trial.loss is not None]
        if best is None or best.loss is None:
            rows.append((arm_name(arm), f"{len(ran)} of {len(found)}", "", "not run yet", "", "", ""))
            continue
        near = [t.name for t in ran if t is not best and t.loss is not None and t.loss <= best.loss + results.tie]
        sides = [edge_words(protocol.edges(arm)), edge_words(edges_of(found)) if protocol.tuned else ""]
        cells = best.name, shown(best.loss), ", ".join(near) or NONE, *sides
        rows.append((arm_name(arm), f"{len(ran)} of {len(found)}", *cells))
    note = "Chosen." if protocol.tuned else "So far: settings are chosen when every trial has ended."
    edges = f"edge, of the first {TRIED}", "edge, of all"
    columns = ("arm", "trials", "best", "tuning loss", f"within {results.tie:.2g} of it", *edges)
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
        verdict = f"{better} is better{'' if adjusted else ', exploratory'}"
        verdict = verdict if p is not None and p < SIGNIFICANT else "not told apart"
        verdict = "one seed: no test" if p is None else verdict
        numbers = [probability(c.difference.p_value), *([probability(c.adjusted)] if adjusted else [])]
        rows.append((pair, c.budget, bracketed(c.difference.estimate, "+.4f"), *numbers, verdict))
    columns = ("", "tokens", "difference", "p", *(["p, Holm"] if adjusted else []), "")
    return Table(columns, rows, left=(0, len(columns) - 1))


def probability(p: float | None) -> str:
    return NONE if p is None else f"{p:.1g}" if p < 0.001 else f"{p:.4f}" if p < 2 * SIGNIFICANT else f"{p:.3f}"


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
                ran = "no baseline" if results.complete(arm, budget) else "not run yet"
                rows.append((label(arm), budget, "diverged" if results.diverged(arm, budget) else ran, "", ""))
                continue
            found = [same.speedup_tokens, same.speedup_seconds, *([adam.speedup_tokens] if ":" in arm else [])]
            cells = [speedup(**vars(s)) if s else NONE for s in found]
            rows.append((label(arm), budget, *cells, *[""] * (3 - len(cells))))
    gone = [f"{label(arm)} at {b}" for b in (*BUDGETS, *LARGEST) for arm in BASELINES if results.diverged(arm, b)]
    note = f"Diverged, so that the curve has no point there: {', '.join(gone)}." if gone else ""
    columns = ("", "tokens", "in tokens", "in time", "in tokens, over GPT+ with Adam")
    return Table(columns, rows, note=note)


Losses = dict[int, float | None]
"""Losses by seed: infinite if it diverged, None if it has not run."""


def finite(found: Losses) -> list[float]:
    """The losses if all have finished."""
    known = [loss for loss in found.values() if loss is not None and loss < math.inf]
    return known if len(known) == len(found) else []


def seeds(found: Losses) -> str:
    known = [shown(loss, 3) for loss in found.values() if loss is not None]
    return ", ".join(known) or "not run yet"


def ablation(results: Results) -> Table:
    """The paper's table of ablations beside ours; changes are relative to anGPT."""
    base, theirs = results.ablation("angpt"), paper.ABLATION["angpt"]
    rows = []
    for name, loss in paper.ABLATION.items():
        recipe, _, tokens = name.partition(", ")
        budget = {"half the tokens": "40M", "twice the tokens": "160M"}.get(tokens, "80M")
        found, change = results.ablation(recipe, budget), loss / theirs - 1
        of_paper = "NaN" if loss == math.inf else f"{loss:.3f} ({percent_change(change)})"
        cells = ("", "") if name == "angpt" else changed(results, found, base, change)
        rows.append((_name(name), of_paper, seeds(found), *cells))
    return Table(("", "paper, 0.5B, 10B tokens", "ours, 32M, 80M tokens", "change", ""), rows, left=(0, 4))


def changed(results: Results, found: Losses, base: Losses, theirs: float) -> tuple[str, str]:
    """The change of the loss, and whether it agrees with that of the paper: infinite if the paper's run diverged."""
    if None in base.values() or None in found.values():
        return "", paper.NOT_RUN
    if math.inf in base.values():
        return "", paper.DIVERGED
    if math.inf in found.values():  # worse than any loss, as the paper says of some
        return "", paper.HOLDS if theirs > 1 else paper.WEAK if theirs >= paper.SMALL else paper.FAILS
    ours = results.change(finite(found), finite(base))
    assert ours is not None
    if theirs == math.inf:  # ours did not diverge, but may be worse
        return overhead(ours, 2), paper.WEAK if ours.low is not None and ours.low > 0 else paper.FAILS
    return overhead(ours, 2), paper.change_judged(ours, theirs)


def _name(name: str) -> str:
    recipe, comma, rest = name.partition(", ")
    return label(recipe) + comma + rest


def percent_change(value: float) -> str:
    return f"{100 * value + 0.0:+.2f} %".replace("-", "−")


def improvements(results: Results, base: Recipe, of_paper: dict[str, float]) -> Table:
    """A figure of the paper with improvements in per cent over a baseline, beside ours."""
    rows = [(label(base), "", seeds(results.ablation(base)), "", "")]
    for recipe, theirs in of_paper.items():
        found, change = results.ablation(recipe), -theirs / 100
        cells = changed(results, found, results.ablation(base), change)
        rows.append((label(recipe), percent_change(change), seeds(found), *cells))
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
            missing = [value.replace("x", "× ") for value, loss in losses.items() if loss is None]
            if missing and found:
                text += f" (not run yet: {', '.join(missing)})"
            worst = max(found.values(), default=math.nan)
            known = chosen is not None and chosen < math.inf and len(found) > 1
            cost = (
                "" if not known or chosen is None else "diverges" if worst == math.inf else difference(worst - chosen)
            )
            if losses:
                rows.append((label(arm), key.rpartition(".")[2], text or "not run yet", cost))
    return Table(("", "setting", "tuning loss at each value", "worst − chosen"), rows, left=(0, 1, 2))


def difference(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


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
    """The paper's table of tasks beside ours, all at the same budget."""
    budget = results.tasks_budget()
    models = [results.evaluated(name, budget) if budget else None for name in SCALED]
    rows = []
    for name, (theirs, theirs_angpt) in paper.TASKS.items():
        cells, task = [], TASKS[name]
        for found in models:
            value = found.task(name) if found else None
            error = f" ± {value.stderr:.3g}" if value and value.stderr else ""
            cells.append(f"{value.value:.3g}{error}" if value else "not run yet")
        title = f"{task.label}, {task.metric.replace('_', ' ')} {'↑' if task.higher else '↓'}"
        rows.append((title, f"{theirs:g}", f"{theirs_angpt:g}", *cells))
    ours = [f"{label(name)}, 32M{f', {budget}' if budget else ''}" for name in SCALED]
    return Table(("", "GPT+, paper, 1B", "anGPT, paper, 1B", *ours), rows)


def defaults(results: Results) -> Table:
    """Losses with the defaults of `angpt train` beside those with the chosen settings, first seed."""
    rows = []
    for budget in DEFAULTS:
        for arm in ARMS:
            tuned = results.losses(arm, budget)[SEEDS[0]]
            differ, own = results.with_defaults(arm, budget)
            cost, near = "", ""
            if own is not None and tuned is not None and math.isfinite(own - tuned):
                cost, near = difference(own - tuned), "yes" if own - tuned <= NEAR else "no"
            cells = shown(tuned, 3), shown(own, 3) if differ else "the same settings", cost, near
            rows.append((label(arm), budget, *cells))
    return Table(("", "tokens", "chosen", "defaults", "defaults − chosen", f"within {NEAR:g}"), rows)


def scaling(results: Results) -> Table:
    """Losses of other sizes with the defaults, one seed; parameters and tokens are those of GPT+."""
    items = [item for item in results.protocol.files() if item.stage == "scaling"]
    losses = {(_size(item.config), item.config.recipe): results.protocol.loss(item.stage, item.name) for item in items}
    rows = []
    for item in (item for item in items if item.config.recipe == SCALED[0]):
        plan = make_plan(dataclasses.replace(item.config, device="cpu"))
        place = quantity(plan.parameters), quantity(plan.steps * plan.batch_tokens)
        rows.append((*place, *(shown(losses[_size(item.config), arm], 3) for arm in SCALED)))
    return Table(("parameters", "tokens", *map(label, SCALED)), rows)


def _size(config: TrainConfig) -> tuple[int, int]:
    return config.model.d_model, config.model.n_layers


def quantized(results: Results) -> Table:
    """Loss and tasks of the same folded models with matrices in bf16 (full) and in 8 bits."""
    columns = [f"{label(arm)}, {form.replace('full', 'bf16')}" for arm in QUANTIZED for form in FORMS]
    found = [results.evaluated(arm, INSIDE[0], form) for arm in QUANTIZED for form in FORMS]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return Table(("", *columns), [("loss, seven tasks", *["not run yet"] * len(columns))])
    rows = [
        (f"{line.label}, {line.metric} {'↑' if line.higher else '↓'}", *map(with_error, line.values))
        for line in lines(known)
    ]
    return Table(("", *columns), rows)
