import pytest

from angpt.results import Cost, Row, SpeedUp
from angpt.stats import Interval
from angpt.studies.summarise import verdict


def row(architecture, budget, mean, spread=0.01, speedup=None):
    loss = Interval(mean, *((mean - spread, mean + spread, 3) if spread else (None, None, 1)))
    return Row(architecture, "", str(budget), 1, budget, 1, 0.1, 0, 0, 1, 3, 0, loss, None, speedup, None, ())


COSTS = [
    Cost("gpt+", "", 1, Interval(10, 9, 11, 3), None, None),
    Cost("angpt", "", 1, Interval(10, 9, 11, 3), Interval(0.03, 0.01, 0.05, 3), 1),
]


def apart(one, two):
    return True


def close(one, two):
    return False


def unknown(one, two):
    return None


def test_a_clear_win():
    speedups = SpeedUp(1.4, 1.3, 1.5, "="), SpeedUp(1.0, None, None, ">")
    rows = [
        row("gpt+", 1, 3.2),
        row("gpt+", 2, 3.0),
        row("ngpt", 2, 2.95),
        row("angpt", 1, 3.1, speedup=speedups[0]),
        row("angpt", 2, 2.9, speedup=speedups[1]),
    ]
    assert verdict(rows, COSTS, "gpt+", apart, True) == (
        "anGPT ends 3.3% below GPT+ in loss (2.900 against 3.000); for its loss after 1 tokens GPT+ needs 1.40 times "
        "as many (1.30 to 1.50); a step takes 3.0% more time."
    )


def test_a_tie_is_called_one():
    rows = [row("gpt+", 1, 3.0), row("angpt", 1, 2.95)]
    found = verdict(rows, [], "gpt+", close, True)
    assert found == "anGPT and GPT+ end at losses that the seeds do not tell apart (2.950 against 3.000)."


def test_a_loss_is_called_one():
    rows = [row("gpt+", 1, 3.0), row("angpt", 1, 3.3, speedup=SpeedUp(0.8, None, None, "<"))]
    assert verdict(rows, [], "gpt+", apart, True) == (
        "anGPT ends 10.0% above GPT+ in loss (3.300 against 3.000); "
        "for its loss after 1 tokens GPT+ needs less than 0.80 times as many."
    )


def test_a_cost_that_is_none_is_called_none():
    costs = [COSTS[0], Cost("angpt", "", 1, Interval(10, 9, 11, 3), Interval(-0.01, -0.04, 0.02, 3), 1)]
    found = verdict([row("gpt+", 1, 3.0), row("angpt", 1, 2.0)], costs, "gpt+", apart, True)
    assert found.endswith("a step takes the same time (to within 4.0%).")


def test_one_seed_has_no_error_bars():
    rows = [row(n, 1, m, spread=0) for n, m in (("gpt+", 3.0), ("angpt", 2.9))]
    assert verdict(rows, [], "gpt+", unknown, True).endswith("(one seed: no error bars).")


@pytest.mark.parametrize("rows", [[], [row("gpt+", 1, 3.0)], [row("angpt", 1, 3.0), row("ngpt", 1, 3.0)]])
def test_too_little_to_tell(rows):
    assert verdict(rows, [], "gpt+", apart, False) == "Too few runs have finished for a verdict."


def test_of_bounds_the_strongest_is_told():
    bounds = SpeedUp(2.0, None, None, ">"), SpeedUp(1.0, None, None, ">")
    rows = [row("gpt+", 1, 3.2), row("gpt+", 2, 3.0)]
    rows += [row("angpt", b + 1, 2.9 - b / 10, speedup=bounds[b]) for b in (0, 1)]
    assert "after 1 tokens GPT+ needs more than 2.00 times as many" in verdict(rows, [], "gpt+", apart, True)


def test_under_way():
    assert verdict([row("gpt+", 1, 3.0), row("angpt", 1, 2.0)], [], "gpt+", apart, False).startswith("So far: anGPT")
