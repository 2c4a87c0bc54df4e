"""What the final runs say, in sentences: first what speaks against anGPT, then the rest."""

import math
from collections.abc import Sequence

from angpt.config import Recipe
from angpt.present.tables import Table
from angpt.present.words import bracketed, label, listed, plural
from angpt.results import SpeedUp
from angpt.stats import Interval
from experiments.evidence import paper
from experiments.evidence.items import records
from experiments.evidence.protocol import BUDGETS, LARGEST, SEEDS, SENSITIVITY, SHARED
from experiments.evidence.results import SIGNIFICANT, Comparison, Results
from experiments.evidence.tables import DEFAULTS, difference, probability
from experiments.evidence.trials import ARMS, TRIED, arm_name, best_trial

YES, NO = "**yes**", "no"


def progress(results: Results) -> str:
    """How many of the final runs have ended, in a sentence."""
    every = [loss for b, arms in {**BUDGETS, **LARGEST}.items() for a in arms for loss in results.losses(a, b).values()]
    done = sum(loss is not None for loss in every)
    if not done:
        return f"None of its {len(every)} final runs has ended: no conclusion is possible yet.\n"
    return (
        f"{done} of its {len(every)} final runs have ended{'.' if done == len(every) else ': the rest is missing.'}\n"
    )


def findings(results: Results) -> str:
    """The outcome of the primary comparisons as a list, the worst for anGPT first."""
    worse, open_, better, diverged, missing = [], [], [], [], 0
    for c in results.primary:
        pair = f"{label(c.two)} and {label(c.one)} at {c.budget}"
        gone = [f"{label(arm)} at {c.budget}" for arm in (c.one, c.two) if results.diverged(arm, c.budget)]
        diverged += [name for name in gone if name not in diverged]
        if c.difference is None:
            missing += not gone
        elif c.adjusted is None or c.adjusted >= SIGNIFICANT:
            open_.append(f"{pair}, {bracketed(c.difference.estimate, '+.4f')}")
        else:
            text = f"{label(c.two)} against {label(c.one)} at {c.budget}: {bracketed(c.difference.estimate, '+.4f')}, "
            text += f"p = {probability(c.adjusted)}"
            (worse if c.difference.estimate.mean > 0 else better).append(text)
    longest = [(arm, budget) for budget, arms in LARGEST.items() for arm in arms]
    diverged += [f"{label(arm)} at {budget}" for arm, budget in longest if results.diverged(arm, budget)]
    lines = [f"- **{text}: anGPT is worse.**" for text in worse + behind(results)]
    lines += [f"- Diverged, and therefore not compared: {listed(diverged)}."] if diverged else []
    lines += [f"- Not told apart: {'; '.join(open_)}."] if open_ else []
    lines += [f"- {text}: anGPT is better." for text in better]
    if missing:
        lines.append(f"- {plural(missing, 'comparison')} of {len(results.primary)} have not run yet.")
    return "\n".join(lines) + "\n"


def behind(results: Results) -> list[str]:
    """Where anGPT has a higher loss than GPT+ at budgets with one seed."""
    found = [results.compare(f"gpt+{s}", f"angpt{s}", budget) for budget in LARGEST for s in ("", ":muon")]
    return [
        f"{label(c.two)} against {label(c.one)} at {c.budget}: {difference(c.difference.estimate.mean)}, one seed"
        for c in found
        if c.difference and c.difference.estimate.mean > 0
    ]


def against(results: Results) -> Table:
    """What would count against anGPT, by the protocol, and whether it was found."""
    primary = {(c.one, c.two, c.budget): c for c in results.primary}
    rows = [("its mean loss is higher than that of GPT+ or nGPT, p < 0.01", *_worse(results))]
    for suffix in ("", ":muon"):
        with_muon = " with Muon" if suffix else ""
        for other, words in (("ngpt", "nGPT{}"), ("gpt+", "GPT+{}, whose decay and warm-up are tuned")):
            found = [primary[f"{other}{suffix}", f"angpt{suffix}", budget] for budget in BUDGETS]
            same = [c.budget for c in found if c.adjusted is not None and c.adjusted >= SIGNIFICANT]
            verdict = YES if same else NO if all(c.difference for c in found) else _open(results, found)
            title = f"it is not told apart from {words.format(with_muon)}"
            rows.append((title, f"at {listed(same)}" if same else "", verdict))
        own = [primary[f"gpt+{suffix}", f"angpt{suffix}", budget] for budget in BUDGETS]
        rows.append(
            (
                f"its lead over GPT+{with_muon} shrinks with the budget, or is gone at 320M or 640M",
                *_shrinks(results, own),
            )
        )
    rows.append(("it is faster than GPT+ in tokens, but not in time", *_time(results)))
    rows.append(("it loses its lead over GPT+ with another stored scale, or with the defaults", *_settings(results)))
    rows.append(("its lead over GPT+ is there with one optimizer only", *_one_optimizer(results)))
    return Table(("what would count against anGPT", "found", ""), rows, left=(0, 1, 2))


def _open(results: Results, found: Sequence[Comparison]) -> str:
    """Why there is no answer: the comparison has not run, or a run has diverged."""
    gone = all(c.difference or results.diverged(c.one, c.budget) or results.diverged(c.two, c.budget) for c in found)
    return paper.DIVERGED if gone else paper.NOT_RUN


def _worse(results: Results) -> tuple[str, str]:
    found = [c for c in results.primary if c.adjusted is not None and c.adjusted < SIGNIFICANT]
    worse = [f"{label(c.one)} at {c.budget}" for c in found if c.difference and c.difference.estimate.mean > 0]
    known = all(c.difference for c in results.primary)
    return listed(worse), YES if worse else NO if known else _open(results, results.primary)


def _shrinks(results: Results, found: Sequence[Comparison]) -> tuple[str, str]:
    """The difference at the smallest budget, at 320M and at 640M. It shrinks if its change is larger than its noise,
    and is gone where anGPT alone diverged or the two are not told apart: where there is one seed, if it is a tie."""
    first, last = found[0], found[-1]
    later = [last, *(results.compare(first.one, first.two, budget) for budget in LARGEST)]
    lost = [c.budget for c in later if results.diverged(c.two, c.budget) and results.complete(c.one, c.budget)]
    leads = {c.budget: c.difference.estimate for c in (first, *later) if c.difference is not None}
    noise = {budget: results.tie if budget in LARGEST else _half(lead) for budget, lead in leads.items()}
    tied = [budget for budget in LARGEST if budget in leads and leads[budget].mean > -results.tie]
    told_apart = last.adjusted is not None and last.adjusted < SIGNIFICANT
    level = last.budget in leads and not (told_apart and leads[last.budget].mean < 0)
    start = leads.get(first.budget)
    shrunk = start is not None and any(
        lead.mean - start.mean > math.hypot(noise[first.budget], noise[budget]) for budget, lead in leads.items()
    )
    text = [f"{label(first.two)} diverged at {listed(lost)}"] if lost else []
    for budget, lead in leads.items():
        several = f"{bracketed(lead, '+.3f')} at {budget}"
        text.append(f"{difference(lead.mean)} at {budget} (one seed)" if budget in LARGEST else several)
    unknown = [c for c in (first, *later) if c.difference is None]
    verdict = YES if lost or tied or level or shrunk else _open(results, unknown) if unknown else NO
    return ", ".join(text), verdict


def _half(interval: Interval) -> float:
    return math.inf if interval.low is None or interval.high is None else (interval.high - interval.low) / 2


def _time(results: Results) -> tuple[str, str]:
    """Speed-ups in tokens above 1 while those in time are not known to be; open where the first may be below 1, too."""
    found, doubtful, known = [], False, True
    for suffix, result in (("", results.with_adam), (":muon", results.with_muon)):
        for budget in BUDGETS:
            row = results.row(f"angpt{suffix}", budget, result)
            known = known and row is not None and None not in (row.speedup_tokens, row.speedup_seconds)
            if row is None or row.speedup_tokens is None or row.speedup_seconds is None:
                continue
            if _at_least(row.speedup_seconds) > 1:
                continue
            if _at_least(row.speedup_tokens) > 1:
                found.append(f"{label(f'angpt{suffix}')} at {budget}")
            doubtful = doubtful or (row.speedup_tokens.relation != "<" and row.speedup_tokens.value > 1)
    unknown = paper.OPEN if all(c.difference for c in results.primary) else _open(results, results.primary)
    return listed(found), YES if found else unknown if not known else paper.OPEN if doubtful else NO


def _at_least(speed_up: SpeedUp) -> float:
    """The lower end of a speed-up; 0 if none is known."""
    lower = {"=": speed_up.low, ">": speed_up.value, "<": None}[speed_up.relation]
    return 0.0 if lower is None else lower


def _settings(results: Results) -> tuple[str, str]:
    """Against GPT+ with its chosen settings, the same seed and text; with defaults, on the validation file."""
    protocol, pairs = results.protocol, []
    for suffix in ("", ":muon"):
        arm, base = f"angpt{suffix}", f"gpt+{suffix}"
        chosen = protocol.loss("sensitivity", f"{arm_name(base)}-chosen")
        for value in SENSITIVITY["model.stored_scale"]:
            ours = protocol.loss("sensitivity", f"{arm_name(arm)}-stored_scale-{value}")
            pairs.append((f"{label(arm)}, stored scale × {value[1:]}", ours, chosen))
        for budget in DEFAULTS:
            ours, theirs = results.with_defaults(arm, budget)[1], results.losses(base, budget)[SEEDS[0]]
            pairs.append((f"{label(arm)}, defaults at {budget}", ours, theirs))
    known = [(title, ours, theirs) for title, ours, theirs in pairs if ours is not None and theirs is not None]
    lost = [
        f"{title}: {'diverged' if ours == math.inf else difference(ours - theirs)}"
        for title, ours, theirs in known
        if ours >= theirs
    ]
    unknown = paper.DIVERGED if any(theirs == math.inf for _, _, theirs in known) else NO
    return "; ".join(lost), YES if lost else unknown if len(known) == len(pairs) else paper.NOT_RUN


def _one_optimizer(results: Results) -> tuple[str, str]:
    last = [*BUDGETS][-1]
    found: dict[Recipe, bool | None] = {}
    for c in results.primary:
        if c.budget == last and c.one.startswith("gpt+"):
            known = c.difference is not None and c.adjusted is not None
            lead = known and c.difference is not None and c.difference.estimate.mean < 0
            found[c.two] = (lead and (c.adjusted or 0.0) < SIGNIFICANT) if known else None
    gone = {arm for arm in found if results.diverged(arm, last)}
    found |= dict.fromkeys(gone, False)  # a model that diverged does not lead
    if None in found.values():
        return "", _open(results, [c for c in results.primary if c.budget == last and c.one.startswith("gpt+")])
    text = ", ".join(f"{label(arm)}: {'leads' if leads else 'does not lead'}" for arm, leads in found.items())
    return f"at {last}, {text}", YES if len(set(found.values())) > 1 else NO


def weaknesses(results: Results) -> str:
    """What is known of the best trials that may favour an arm: the memory of decay, the share of clipped steps, and the
    gain from the trials of the edge rule."""
    protocol = results.protocol
    lines, shares, gains = [], {}, {}
    for arm in ARMS:
        first = best_trial(protocol.trials(arm, extended=False))
        best = best_trial(protocol.trials(arm, protocol.extended))
        if first is None or best is None or first.loss is None or best.loss is None:
            continue
        gains[arm] = first.loss - best.loss
        if steps := [r for r in records(results.root / "tuning" / best.name) if r["kind"] == "train"]:
            shares[arm] = sum(r["grad_norm"] > 1 for r in steps) / len(steps)
        if arm == "gpt+":
            memory = 1 / (best.settings["optimizer.lr"] * best.settings["optimizer.weight_decay"])
            short, long = (f"{100 * memory * SHARED['batch_tokens'] / tokens:.0f} %" for tokens in (80e6, 640e6))
            lines.append(
                "- Besides β₂, only GPT+ has a tuned setting that counts in steps: in its best trial with Adam, decay "
                f"forgets a weight within 1/(lr·λ) = {memory:.0f} steps, {short} of a run of 80M "
                f"tokens and {long} of one of 640M."
            )
    clipped = ", ".join(f"{label(arm)} {100 * share:.0f} %" for arm, share in shares.items())
    lines.append(
        f"- Gradients are clipped at 1 in all arms; the best trials clipped these shares of their steps: {clipped}."
    )
    if protocol.extended and protocol.tuned:  # equally many trials
        gained = ", ".join(f"{label(arm)} {gain:.3f}" for arm, gain in gains.items())
        lines.append(
            "- Equally many trials are not equally good tuning. The trials that the edge rule added lowered the best "
            f"tuning loss of the first {TRIED} by: {gained}. More trials might gain most where these have gained much."
        )
    return "\n".join(lines) + "\n"
