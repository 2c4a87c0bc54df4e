import dataclasses
import math

import pytest

from angpt.results import Cost, Row, RunResult, SpeedUp
from angpt.stats import Interval
from angpt.studies.grid import Group
from angpt.studies.search import Optimum
from angpt.studies.summarise import Chosen, contest, summarise, verdict


def row(architecture, budget, mean, spread=0.01, speedup=None):
    loss = Interval(mean, *((mean - spread, mean + spread, 3) if spread else (None, None, 1)))
    return Row(architecture, "", str(budget), 1, budget, 1, 0.1, 0, 0, 1, 3, 0, loss, None, speedup, None, ())


COSTS = [
    Cost("gpt+", "", 1, Interval(10, 9, 11, 3), None, None),
    Cost("angpt", "", 1, Interval(10, 9, 11, 3), Interval(0.03, 0.01, 0.05, 3), 1),
]


def told(rows, costs=(), half=0.01):
    """The verdict on the last row against the first, whose change has an interval of this half width."""
    mean = rows[-1].val_loss.mean / rows[0].val_loss.mean - 1
    change = Interval(mean) if half is None else Interval(mean, mean - half, mean + half)
    return verdict(rows[-1], rows[0], change, change.covers(0.0), rows, costs)


def chosen(architecture, tokens, *losses, status="finished"):
    """A group of runs with these losses."""
    runs = [
        RunResult(
            f"{architecture}-{tokens}-{i}", architecture, "", 1, tokens, 1, 0.1, i, status, 1.0, loss, 1, 1.0, 1.0, 1.0
        )
        for i, loss in enumerate(losses)
    ]
    return Chosen(Group(architecture, "", str(tokens)), Optimum(1, 0.1, 0.0, 0, 0), 1, tuple(runs))


def summarised(*groups):
    return summarise(groups, [run for group in groups for run in group.runs], "gpt+")


def test_a_clear_win():
    speedups = SpeedUp(1.4, 1.3, 1.5, "="), SpeedUp(1.0, None, None, ">")
    rows = [
        row("gpt+", 2, 3.0),
        row("gpt+", 1, 3.2),
        row("ngpt", 2, 2.95),
        row("angpt", 1, 3.1, speedup=speedups[0]),
        row("angpt", 2, 2.9, speedup=speedups[1]),
    ]
    assert told(rows, COSTS) == (
        "anGPT reaches 2.900, GPT+ 3.000 (−3.3 %). "
        "To match anGPT at 1 tokens, GPT+ needs 1.40× the tokens [1.30, 1.50]. A step takes 3.0 % more time."
    )


def test_noise_is_called_noise():
    """A bound on the speed-up is left out, since noise may have made it."""
    rows = [row("gpt+", 1, 3.0), row("angpt", 1, 2.95, speedup=SpeedUp(1.0, None, None, ">"))]
    assert (
        told(rows, half=0.02) == "anGPT reaches 2.950, GPT+ 3.000 (−1.7 % ± 2.0 %). Too noisy to tell which is better."
    )
    assert told(rows, half=0.01) == (
        "anGPT reaches 2.950, GPT+ 3.000 (−1.7 %). To match anGPT at 1 tokens, GPT+ needs more than 1.00× the tokens."
    )


@pytest.mark.parametrize(("low", "high", "noisy"), [(1.0, 2.1, True), (1.0, 1.9, False)])
def test_a_wide_speed_up_is_not_told_as_a_number(low, high, noisy):
    rows = [row("gpt+", 1, 3.0), row("angpt", 1, 2.9, speedup=SpeedUp(1.4, low, high, "="))]
    wide = f"GPT+ needs {low:.2f}× to {high:.2f}× the tokens: too noisy to tell the speed-up."
    assert told(rows).endswith(wide if noisy else f"GPT+ needs 1.40× the tokens [{low:.2f}, {high:.2f}].")


@pytest.mark.parametrize(("losses", "noisy"), [((2.9, 3.06, 2.85), True), ((2.7, 2.71, 2.69), False)])
def test_the_verdict_and_the_table_agree_on_what_is_noise(losses, noisy):
    result = summarised(chosen("gpt+", 1, 3.0, 3.1, 2.9), chosen("angpt", 1, *losses))
    assert result.rows[1].change.covers(0) == noisy
    assert ("Too noisy to tell which is better" in result.verdict) == noisy


def test_a_loss_is_called_one():
    rows = [row("gpt+", 1, 3.0), row("angpt", 1, 3.3, speedup=SpeedUp(0.8, None, None, "<"))]
    assert told(rows) == (
        "anGPT reaches 3.300, GPT+ 3.000 (+10.0 %). To match anGPT at 1 tokens, GPT+ needs less than 0.80× the tokens."
    )


def test_a_cost_that_is_none_is_called_none():
    costs = [COSTS[0], Cost("angpt", "", 1, Interval(10, 9, 11, 3), Interval(-0.01, -0.04, 0.02, 3), 1)]
    found = told([row("gpt+", 1, 3.0), row("angpt", 1, 2.0)], costs)
    assert found.endswith("No measurable difference in time per step (± 3.0 %).")


def test_one_seed_has_no_error_bars():
    rows = [row(n, 1, m, spread=0) for n, m in (("gpt+", 3.0), ("angpt", 2.9))]
    assert told(rows, half=None).endswith("(−3.3 %). One seed: no intervals.")


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([chosen("gpt+", 1, 3.0)], "No verdict: GPT+ was trained alone."),
        (
            [chosen("angpt", 1, 3.0), chosen("ngpt", 1, 3.0)],
            "No verdict: GPT+ was not trained with 1 tokens, the largest budget of the others.",
        ),
        (
            [chosen("gpt+", 1, 3.0), chosen("angpt", 2, 3.0), chosen("ngpt", 1, None, status="diverged")],
            "No verdict: GPT+ was not trained with 2 tokens, the largest budget of the others.",
        ),
        (
            [chosen("gpt+", 1, None, status="diverged"), chosen("gpt+", 2, 3.0)],
            "No verdict: GPT+ was trained alone.",
        ),
        (
            [chosen("gpt+", 1, 3.0), chosen("angpt", 1, None, status="diverged")],
            "No verdict: all runs that GPT+ is compared with diverged.",
        ),
        (
            [
                chosen("gpt+", 1, 3.0),
                chosen("angpt", 1, None, status="diverged"),
                chosen("angpt:muon", 1, 2.9),
            ],
            "No verdict: all runs that GPT+ is compared with diverged.",
        ),
        (
            [chosen("gpt+", 2, None, None, status="diverged"), chosen("angpt", 2, 3.0)],
            "No verdict: all runs of GPT+ at 2 tokens diverged.",
        ),
        (
            [chosen("gpt+", 1, 3.0), chosen("angpt", 1, None, status="running")],
            "Too few runs have finished for a verdict.",
        ),
    ],
)
def test_without_a_verdict_the_reason_is_told(groups, said):
    assert summarised(*groups).verdict == said


def test_diverged_seeds_are_told():
    found = summarised(chosen("gpt+", 1, 3.0, 3.01, 2.99), chosen("angpt", 1, 2.9, None, None, status="diverged"))
    assert found.verdict.startswith("anGPT reaches 2.900, with 2 of 3 seeds diverged, GPT+ 3.000 (")


def test_one_that_varies_far_more_does_not_widen_the_intervals_of_others():
    """Neither where it is a variant nor where it is a model of another size."""
    calm = [chosen("gpt+", 1, 3.3, 3.31, 3.29), chosen("gpt+", 2, 3.0, 3.01, 2.99), chosen("angpt", 1, 3.1, 3.11, 3.09)]
    wild = chosen("angpt/no-lerp", 1, 2.6, 3.1, 3.7)
    alone, beside = summarised(*calm).rows, summarised(*calm, wild).rows
    assert beside[2].speedup_tokens == alone[2].speedup_tokens
    assert beside[3].speedup_tokens.high > 4 * beside[3].speedup_tokens.low
    shortest = summarised(*calm, chosen("gpt+", 0.5, 3.9, 4.7, 3.4))
    assert shortest.rows[2].speedup_tokens == alone[2].speedup_tokens  # it was read from other points of the curve
    noisy = [chosen("gpt+", 1, 3.3, 3.5, 3.1), chosen("angpt", 1, 3.1, 3.3, 2.9)]
    noisy = [dataclasses.replace(c, group=dataclasses.replace(c.group, size="large")) for c in noisy]
    assert [r.change for r in summarised(*calm, *noisy).rows[:3]] == [r.change for r in alone]


def test_the_best_of_many_may_be_so_by_chance():
    """Its own interval does not contain 0, that of the best of ten does."""
    groups = [chosen("gpt+", 1, 3.0, 3.03, 2.97)]
    groups += [chosen(f"v{i}", 1, 3.0, 3.03, 2.97) for i in range(9)]
    result = summarised(*groups, chosen("angpt", 1, 2.945, 2.975, 2.915))
    assert not result.rows[-1].change.covers(0)
    assert "Too noisy to tell which is better, since it is the best of several. No measurable" in result.verdict


def test_steps_of_different_batches_are_not_compared():
    one, other = chosen("gpt+", 1, 3.0, 3.1), chosen("angpt", 1, 2.9, 3.0)
    assert summarised(one, other).costs[1].overhead.mean == 0
    half = dataclasses.replace(other, runs=tuple(dataclasses.replace(run, batch=2) for run in other.runs))
    assert summarised(one, half).costs[1].overhead is None


def test_the_run_that_is_shown_is_one_of_the_best_settings():
    bad, good = chosen("angpt", 1, 5.0), chosen("angpt", 1, 2.0)
    bad = dataclasses.replace(bad, group=dataclasses.replace(bad.group, settings="lr 0.5"))
    bad = dataclasses.replace(bad, runs=(dataclasses.replace(bad.runs[0], name="bad"),))
    assert [run.val_loss for run in summarised(chosen("gpt+", 1, 3.0), bad, good).representatives()] == [3.0, 2.0]


def test_the_best_at_the_largest_budget_is_compared_with_the_baseline():
    groups = [chosen("gpt+", 1, 3.2), chosen("gpt+", 2, 3.0), chosen("ngpt", 2, 2.95), chosen("angpt", 2, 2.9, 2.901)]
    assert contest([*groups, chosen("angpt", 1, 1.0)], "gpt+") == (groups[3], groups[1], 2)
    assert summarised(*groups).verdict.startswith("anGPT reaches 2.900, GPT+ 3.000 (−3.3 %).")


def test_architectures_are_compared_with_the_same_optimizer():
    adam = [chosen("gpt+", 2, 3.0), chosen("angpt", 2, 2.9)]
    muon = [chosen("angpt:muon", 2, 2.7), chosen("ngpt:muon", 2, 2.8)]
    lacking = "GPT+ was not trained with it, so this compares no architectures."
    found = summarised(*adam, *muon).verdict
    assert found.startswith("anGPT reaches 2.900, GPT+ 3.000")
    assert found.endswith(f"With Muon: anGPT 2.700, nGPT 2.800; {lacking}")
    assert summarised(*adam, *muon, chosen("gpt+:muon", 2, 2.6)).verdict.endswith(
        " With Muon: GPT+ 2.600, anGPT 2.700, nGPT 2.800."
    )
    alone = summarised(adam[0], muon[0]).verdict
    assert alone.startswith("anGPT with Muon reaches 2.700, GPT+ 3.000")
    assert alone.endswith(f"With Muon: anGPT 2.700; {lacking}")
    waiting = chosen("angpt", 2, None, status="running")
    assert contest([adam[0], waiting, muon[0]], "gpt+") is None


def test_a_longer_run_of_the_baseline_turns_a_bound_into_a_number():
    groups = [chosen("gpt+", b, 3.2 - b / 10) for b in (1, 2)] + [chosen("angpt", b, 3.1 - b / 10) for b in (1, 2)]
    before, after = summarised(*groups), summarised(*groups, chosen("gpt+", 4, 2.8))
    assert [row.speedup_tokens.relation for row in (before.rows[3], after.rows[3])] == [">", "="]
    assert after.rows[3].speedup_tokens.value == pytest.approx(2 ** (math.log(3.0 / 2.9) / math.log(3.0 / 2.8)))
    assert after.verdict.startswith("anGPT reaches 2.900, GPT+ 3.000")
    assert after.largest_budget("") == 2
    assert [run.tokens for run in after.representatives()] == [2, 2]
    assert summarised(chosen("gpt+", 4, 2.8)).largest_budget("") == 4


def test_of_bounds_the_strongest_is_told():
    bounds = SpeedUp(2.0, None, None, ">"), SpeedUp(1.0, None, None, ">")
    rows = [row("gpt+", 1, 3.2), row("gpt+", 2, 3.0)]
    rows += [row("angpt", b + 1, 2.9 - b / 10, speedup=bounds[b]) for b in (0, 1)]
    assert "at 1 tokens, GPT+ needs more than 2.00× the tokens" in told(rows)


@pytest.mark.parametrize(
    ("bound", "told_as"),
    [(SpeedUp(0.8, None, None, ">"), None), (SpeedUp(1.3, None, None, "<"), None),
     (SpeedUp(0.8, None, None, "<"), "less than 0.80×"), (SpeedUp(1.0, None, None, "<"), "less than 1.00×")],
)  # fmt: skip
def test_a_bound_that_does_not_tell_which_is_faster_is_not_told(bound, told_as):
    text = told([row("gpt+", 1, 3.2), row("angpt", 1, 2.9, speedup=bound)])
    assert (told_as in text) if told_as else "the tokens" not in text


def test_an_average_says_how_many_budgets_have_no_speed_up():
    rows = [row("gpt+", b, 3.0 - b / 10) for b in (1, 2, 3)]
    found = (SpeedUp(1.2, 1.1, 1.3, "="), SpeedUp(1.6, 1.3, 1.9, "="), None)
    rows += [row("angpt", b + 1, 2.9 - b / 10, speedup=s) for b, s in enumerate(found)]
    assert "over the 2 of 3 budgets where it is known is 1.40×" in told(rows)


def test_the_average_over_budgets_is_told_where_several_are_known():
    known = [SpeedUp(1.2, 1.1, 1.3, "="), SpeedUp(1.6, 1.3, 1.9, "="), SpeedUp(9.0, None, None, ">")]
    rows = [row("gpt+", b, 3.0 - b / 10) for b in (1, 2, 3)]
    rows.append(row("ngpt", 1, 2.9, speedup=SpeedUp(5.0, None, None, "=")))
    rows += [row("angpt", b + 1, 2.9 - b / 10, speedup=s) for b, s in enumerate(known)]
    assert "The average speed-up over the 2 of 3 budgets where it is known is 1.40× [1.20, 1.60]." in told(rows)
    assert "average" not in told([r for r in rows if r.tokens > 1])


def test_an_average_without_intervals_has_none_and_one_that_is_too_noisy_is_not_told():
    rows = [row("gpt+", b, 3.0 - b / 10, 0) for b in (1, 2)]
    found = told([*rows, *(row("angpt", b, 2.7, 0, SpeedUp(b / 2 + 1, None, None, "=")) for b in (1, 2))], half=None)
    assert "The average speed-up over the 2 budgets is 1.75×." in found
    noisy = [row("angpt", b, 2.7, speedup=SpeedUp(2.0, 1.0, 4.0, "=")) for b in (1, 2)]
    assert "average" not in told([*rows, *noisy])


def test_under_way():
    waiting = chosen("ngpt", 1, None, status="waiting")
    result = summarised(chosen("gpt+", 1, 3.0), chosen("angpt", 1, 2.0), waiting)
    assert result.verdict.startswith("So far: anGPT reaches 2.000, GPT+ 3.000 (−33.3 %).")
    assert not result.complete
    assert result.rows[2].val_loss is None


def test_a_page_has_the_runs_of_its_size_alone():
    small, large = (
        [chosen(name, 1, loss) for name, loss in (("gpt+", 3.0), ("angpt", 2.0))],
        [chosen(name, 1, loss) for name, loss in (("gpt+", 2.5), ("angpt", 1.5))],
    )
    groups = [
        Chosen(Group(c.group.architecture, size, "1"), c.best, 1, tuple(named(run, size) for run in c.runs))
        for size, of_size in (("a", small), ("b", large))
        for c in of_size
    ]
    result = summarised(*groups)
    assert result.sizes == ("a", "b")
    assert result.verdict.count("\n") == 1
    part = result.of_size("b")
    assert [row.val_loss.mean for row in part.rows] == pytest.approx([2.5, 1.5])
    assert {run.name for run in part.runs} == {"gpt+-1-0-b", "angpt-1-0-b"}
    assert [run.name for run in part.representatives()] == ["gpt+-1-0-b", "angpt-1-0-b"]
    assert part.verdict == result.verdicts["b"]


def named(run, size):
    return dataclasses.replace(run, name=f"{run.name}-{size}", size=size)
