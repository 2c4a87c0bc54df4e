"""experiments/evidence: what the page says of made-up final runs, first what speaks against anGPT."""

import dataclasses
import gzip
import math
import statistics

import pytest

pytest.importorskip("scipy", reason="the evidence needs the extra `report`")

from angpt.config import parse_budget
from angpt.present.words import bracketed
from angpt.results import SpeedUp
from angpt.stats import Interval
from experiments.evidence import exhibits, findings, paper, tables
from experiments.evidence.items import records
from experiments.evidence.protocol import BUDGETS, LARGEST, Protocol
from experiments.evidence.results import Results
from tests.test_evidence import tuned, write

SHRINKS = "its lead over GPT+{} shrinks with the budget, or is gone at 320M or 640M"


def millions(config):
    return parse_budget(config.tokens, 1) / 1e6


def results(tmp_path, offsets, skip=lambda name: False, stages=("final",)):
    """Final runs (and those of other stages) whose losses fall with the tokens, by an offset for each arm: a number, or
    a function of the budget; `inf` diverges."""
    tuned(tmp_path)
    for item in Protocol((tmp_path,)).items():
        if item.stage not in stages or skip(item.name):
            continue
        config = item.config
        offset = offsets.get(config.recipe, 0.0)
        offset = offset(item) if callable(offset) else offset
        noise = 0.001 * math.sin(7 * config.seed + 13 * len(config.recipe) + millions(config))
        loss = 3.7 * (millions(config) / 80) ** -0.05 + offset + noise
        seconds = millions(config) * (1.2 if config.recipe.startswith("angpt") else 1.0)
        if loss == math.inf:
            write(tmp_path / item.folder, config, None, "diverged", seconds)
        else:
            write(tmp_path / item.folder, config, loss, seconds=seconds)
    return Results(tmp_path)


def verdicts(found):
    return {row[0]: row[2] for row in findings.against(found).rows}


def test_before_the_final_runs_nothing_is_concluded(tmp_path):
    found = results(tmp_path, {}, skip=lambda name: True)
    assert findings.progress(found) == "None of its 58 final runs has ended: no conclusion is possible yet.\n"
    assert set(verdicts(found).values()) == {paper.NOT_RUN}
    assert findings.findings(found) == "- 12 comparisons of 12 have not run yet.\n"
    assert exhibits.speed_up(found, "angpt") == ("", paper.NOT_RUN)


def test_a_better_angpt_holds_although_its_longest_run_has_only_a_bound(tmp_path):
    found = results(tmp_path, dict.fromkeys(("angpt", "angpt:muon"), -0.1))
    assert findings.progress(found) == "58 of its 58 final runs have ended.\n"
    lines = findings.findings(found).splitlines()
    assert len(lines) == 12
    assert all(line.endswith("anGPT is better.") for line in lines)
    assert verdicts(found)["its mean loss is higher than that of GPT+ or nGPT, p < 0.01"] == findings.NO
    assert found.row("angpt", "640M", found.with_adam).speedup_tokens.relation == ">"
    text, verdict = exhibits.speed_up(found, "angpt")
    assert "mean over 80M, 160M and 320M; > " in text
    assert verdict == paper.HOLDS


def test_a_worse_angpt_is_said_first(tmp_path):
    found = results(tmp_path, {"angpt": 0.05, "angpt:muon": -0.1})
    first, *others = findings.findings(found).splitlines()
    assert first.startswith("- **anGPT against GPT+ at 80M: +0.05")
    assert first.endswith("anGPT is worse.**")
    assert [line.endswith("anGPT is worse.**") for line in others] == [True] * 6 + [False] * 6  # and at 640M
    assert exhibits.speed_up(found, "angpt")[1] == paper.FAILS
    assert verdicts(found)["its mean loss is higher than that of GPT+ or nGPT, p < 0.01"] == findings.YES
    assert verdicts(found)["its lead over GPT+ is there with one optimizer only"] == findings.YES


def test_a_lead_that_shrinks_is_found(tmp_path):
    def lead(item):
        return -0.1 * 80 / millions(item.config)

    found = results(tmp_path, {"angpt": lead, "angpt:muon": -0.1})
    assert verdicts(found)[SHRINKS.format("")] == findings.YES
    assert verdicts(found)[SHRINKS.format(" with Muon")] == findings.NO


def test_faster_in_tokens_but_not_in_time(tmp_path):
    """A step of anGPT takes 1.2 times as long here, and its lead is worth 1.1 to 1.15 times the tokens."""
    found = results(tmp_path, {"angpt": -0.02, "angpt:muon": -0.1})
    text = next(row[1] for row in findings.against(found).rows if row[0].startswith("it is faster"))
    assert text == "anGPT at 80M, anGPT at 160M and anGPT at 320M"


@pytest.mark.parametrize(
    ("in_tokens", "in_time", "verdict"),
    [
        ((1.3, 1.1, 1.5), (0.9, 0.8, 1.0), findings.YES),
        ((1.3, 0.98, 1.7), (0.9, 0.8, 1.0), paper.OPEN),
        ((1.3, 1.1, 1.5), (1.2, 1.1, 1.3), findings.NO),
        ((0.9, 0.8, 1.0), (0.8, 0.7, 0.9), findings.NO),
    ],
)
def test_time_and_tokens_are_judged_by_their_lower_ends(tmp_path, monkeypatch, in_tokens, in_time, verdict):
    found = results(tmp_path, {"angpt": -0.1, "angpt:muon": -0.1})
    row = dataclasses.replace(
        found.row("angpt", "80M", found.with_adam),
        speedup_tokens=SpeedUp(*in_tokens, "="),
        speedup_seconds=SpeedUp(*in_time, "="),
    )
    monkeypatch.setattr(Results, "row", lambda *_: row)
    assert findings._time(found)[1] == verdict


@pytest.mark.parametrize(
    ("found", "lower"),
    [(SpeedUp(1.5, 1.4, 1.6, "="), 1.4), (SpeedUp(1.5, None, None, "="), 0.0), (SpeedUp(1.5, None, None, ">"), 1.5),
     (SpeedUp(1.5, None, None, "<"), 0.0)],
)  # fmt: skip
def test_what_a_speed_up_is_at_least(found, lower):
    assert findings._at_least(found) == lower


def test_what_diverged_is_not_called_missing(tmp_path):
    gone = {"gpt+": lambda item: math.inf if "160M" in item.name else 0.0}
    found = results(tmp_path, gone | {"angpt": -0.1, "angpt:muon": -0.1}, stages=("final", "ablation"))
    assert "- Diverged, and therefore not compared: GPT+ at 160M." in findings.findings(found)
    assert exhibits.speed_up(found, "angpt") == ("diverged: GPT+ at 160M", paper.DIVERGED)
    assert tables.speed_ups(found).note == "Diverged, so that the curve has no point there: GPT+ at 160M."
    base = {"angpt": lambda item: math.inf if item.name == "angpt-80M-s1" else -0.1}
    other = results(tmp_path / "other", base, stages=("final", "ablation"))
    rows = {row[0]: row for row in tables.ablation(other).rows}
    assert rows["anGPT"][-1] == ""
    assert {row[-1] for name, row in rows.items() if name != "anGPT"} == {paper.DIVERGED}
    assert "not run yet" not in "".join(map(str, rows.values()))


def test_a_lead_that_is_gone_at_the_largest_budget_is_found(tmp_path):
    """Its one run has no test, but it is named first, and the mean over the other budgets does not hold."""

    def late(item):
        return 0.1 if "640M" in item.name else -0.05

    found = results(tmp_path, {"angpt": late, "angpt:muon": -0.05})
    assert findings.findings(found).splitlines()[0] == (
        "- **anGPT against GPT+ at 640M: +0.100, one seed: anGPT is worse.**"
    )
    assert verdicts(found)[SHRINKS.format("")] == findings.YES
    assert verdicts(found)[SHRINKS.format(" with Muon")] == findings.NO
    assert exhibits.speed_up(found, "angpt")[1] == paper.FAILS


@pytest.mark.parametrize("budget", ["320M", "640M"])
def test_a_lead_is_gone_where_angpt_diverged_and_gpt_plus_did_not(tmp_path, budget):
    gone = {"angpt": lambda item: math.inf if budget in item.name else -0.1, "angpt:muon": -0.1}
    found = results(tmp_path, gone)
    rows = {row[0]: row[1:] for row in findings.against(found).rows}
    text, verdict = rows[SHRINKS.format("")]
    assert text.startswith(f"anGPT diverged at {budget}, −0.1")
    assert verdict == findings.YES
    assert rows[SHRINKS.format(" with Muon")][-1] == findings.NO
    assert f"- Diverged, and therefore not compared: anGPT at {budget}." in findings.findings(found)
    assert exhibits.speed_up(found, "angpt") == (f"diverged: anGPT at {budget}", paper.DIVERGED)


def test_a_lead_is_not_compared_where_gpt_plus_diverged(tmp_path):
    found = results(
        tmp_path,
        {"angpt": -0.1, "angpt:muon": -0.1, "gpt+": lambda item: math.inf if "640M" in item.name else 0.0},
    )
    assert verdicts(found)[SHRINKS.format("")] == paper.DIVERGED
    assert "Diverged, and therefore not compared: GPT+ at 640M." in findings.findings(found)


def test_a_lead_is_gone_whatever_diverged_elsewhere(tmp_path):
    """GPT+ at 320M, or anGPT at 80M: there is no comparison there, but one at 640M."""
    for i, (arm, where) in enumerate((("gpt+", "320M"), ("angpt", "80M"))):
        offsets = {"angpt": lambda item: 0.2 if "640M" in item.name else -0.1}
        plain = offsets.get(arm, lambda item: 0.0)
        offsets[arm] = lambda item, plain=plain, where=where: math.inf if where in item.name else plain(item)
        found = results(tmp_path / str(i), offsets)
        assert verdicts(found)[SHRINKS.format("")] == findings.YES


def test_divergence_counts_when_the_run_of_gpt_plus_has_ended(tmp_path):
    gone = {"angpt": lambda item: math.inf if "640M" in item.name else -0.1}
    found = results(tmp_path, gone, skip=lambda name: name == "gpt+-640M-s1")
    assert verdicts(found)[SHRINKS.format("")] == paper.DIVERGED


def test_a_lead_within_a_tie_at_the_largest_budget_is_gone(tmp_path):
    """It has one seed there: a lead within the noise between seeds does not count."""
    found = results(tmp_path, {"angpt": -0.004, "angpt:muon": -0.1})
    own = [c for c in found.primary if (c.one, c.two) == ("gpt+", "angpt")]
    lead = found.compare("gpt+", "angpt", "640M").difference.estimate.mean
    assert findings._shrinks(found, own)[1] == findings.NO
    found.__dict__["tie"] = -lead + 1e-6
    assert findings._shrinks(found, own)[1] == findings.YES
    found.__dict__["tie"] = -lead - 1e-6
    assert findings._shrinks(found, own)[1] == findings.NO


def test_a_lead_that_shrinks_only_at_the_largest_budget_is_found(tmp_path):
    late = {"angpt": lambda item: -0.05 if "640M" in item.name else -0.1, "angpt:muon": -0.1}
    assert verdicts(results(tmp_path, late))[SHRINKS.format("")] == findings.YES


def test_what_is_not_told_apart_has_its_interval(tmp_path):
    found = results(tmp_path, {"angpt:muon": -0.1, "ngpt:muon": 0.0})
    text = next(line for line in findings.findings(found).splitlines() if line.startswith("- Not told apart"))
    estimate = next(c for c in found.primary if (c.two, c.budget) == ("angpt", "80M")).difference.estimate
    assert f"anGPT and GPT+ at 80M, {bracketed(estimate, '+.4f')}" in text


def test_the_time_of_a_step_is_judged_by_what_was_measured_in_turns(tmp_path, monkeypatch):
    """Final runs, in which a step of anGPT takes 1.2 times as long here, are shown and decide nothing."""
    found = results(tmp_path / "runs", {})
    page = tmp_path / "performance.md"
    monkeypatch.setattr(exhibits, "EVIDENCE", tmp_path / "evidence")
    for ratio, low, high, verdict in (
        (1.01, 1.00, 1.02, paper.HOLDS),
        (1.02, 1.01, 1.03, paper.OPEN),
        (1.05, 1.04, 1.06, paper.FAILS),
    ):
        rows = f"| 0.5B, 8 sequences: GPT+ * | 100 | – | 1 | |\n| anGPT * | 101 | – | {ratio} | {low}–{high} |\n"
        page.write_text("| | ms/step | quartiles | ÷ GPT+ | 95 % |\n|---|---|---|---|---|\n" + rows)
        text, judged = exhibits.step_time(found, "angpt")
        assert judged == verdict
        assert text.startswith(f"+{100 * (ratio - 1):.1f} % ± 1.0 %")
        assert text.endswith("+20.0 % ± 0.0 % in the final runs")


def test_a_table_of_times_that_has_changed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(exhibits, "EVIDENCE", tmp_path / "evidence")
    (tmp_path / "performance.md").write_text(
        "| | ms/step |\n|---|---|\n| 0.5B, 8 sequences: GPT+ | 1 |\n| anGPT | 1 |\n"
    )
    with pytest.raises(ValueError, match="no row 'anGPT' below"):
        exhibits.in_turns("angpt")


def test_an_arm_that_diverged_does_not_lead(tmp_path):
    gone = {"angpt": -0.1, "angpt:muon": lambda item: math.inf if "320M" in item.name else -0.1}
    title = "its lead over GPT+ is there with one optimizer only"
    assert verdicts(results(tmp_path, gone))[title] == findings.YES


def test_a_setting_with_which_angpt_diverges_is_not_one_that_it_needs(tmp_path):
    def without_is_worse(item):
        if item.name == "angpt-adam-warmup-0.1":
            return math.inf
        return 0.1 * (item.name in ("gpt+-adam-warmup-0", "gpt+-adam-weight_decay-0"))

    offsets = dict.fromkeys(("gpt+", "angpt"), without_is_worse)
    found = results(tmp_path, offsets, stages=("final", "sensitivity"))
    text, verdict = exhibits.fewer_settings(found)
    assert "anGPT, warmup: diverges with" in text
    assert verdict == paper.HOLDS


def test_settings_are_needed_if_the_loss_without_is_higher_than_with_the_chosen_value(tmp_path):
    """Not than with the best of the values that were tried besides."""

    def lucky(item):
        return -0.1 * item.name.endswith("weight_decay-0.1")

    found = results(tmp_path, {"gpt+": lucky}, stages=("final", "sensitivity"))
    assert exhibits.fewer_settings(found)[1] == paper.FAILS


def test_moments_of_a_diverged_run_are_not_called_missing(tmp_path):
    gone = {"gpt+": lambda item: math.inf if item.name == "gpt+-adam-warmup-0" else 0.0}
    found = results(tmp_path, gone, stages=("final", "sensitivity"))
    found.__dict__["claims"] = []  # those of other models stand in until the final runs are analysed
    assert exhibits.claim(found, "Without warm-up")[1] == paper.DIVERGED


def test_divergence_of_what_the_paper_calls_worse_holds_weaker(tmp_path):
    gone = {"gpt+/dyt": math.inf, "gpt+/ln-scaling": math.inf}
    rows = {row[0]: row for row in tables.improvements(
        results(tmp_path, gone, stages=("final", "ablation")), "gpt+", paper.RELATED
    ).rows}  # fmt: skip
    assert rows["GPT+ dyt"][-1] == paper.WEAK
    assert rows["GPT+ ln-scaling"][-1] == paper.FAILS


def test_records_are_read_compressed_extracted_or_not_at_all(tmp_path):
    assert records(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"kind": "val"}\n')
    assert records(tmp_path) == [{"kind": "val"}]
    (tmp_path / "metrics.jsonl.gz").write_bytes(gzip.compress(b'{"kind": "train"}\n'))
    assert records(tmp_path) == [{"kind": "train"}]


def test_defaults_are_compared_with_the_chosen_settings(tmp_path):
    def loss(item):
        return 0.03 if item.stage == "defaults" else 0.0

    found = results(tmp_path, {"gpt+": loss}, stages=("final", "defaults"))
    rows = {tuple(row[:2]): row[2:] for row in tables.defaults(found).rows}
    assert rows["GPT+", "80M"][2:] == ("+0.030", "no")
    assert rows["anGPT", "320M"][2:] in (("+0.000", "yes"), ("−0.000", "yes"))
    assert set(rows) == {(name, b) for name in {row[0] for row in rows} for b in tables.DEFAULTS}


@pytest.mark.parametrize(
    ("mean", "low", "high", "relation", "verdict"),
    [
        (1.5, 1.4, 1.6, "=", paper.HOLDS),
        (1.5, 0.9, 1.6, "=", paper.OPEN),
        (1.5, None, None, ">", paper.HOLDS),
        (1.15, None, None, ">", paper.WEAK),
        (0.9, None, None, ">", paper.OPEN),
        (0.9, None, None, "<", paper.FAILS),
        (1.1, None, None, "<", paper.OPEN),
    ],
)
def test_bounds_are_judged_by_their_side(mean, low, high, relation, verdict):
    assert paper.bound_judged(Interval(mean, low, high), relation, 1.4) == verdict


def test_ties_follow_the_seeds_once_there_are_final_runs(tmp_path):
    found = results(tmp_path, {})
    groups = [list(found.losses(arm, "80M").values()) for arm in {**BUDGETS, **LARGEST}["80M"]]
    spread = math.sqrt(sum(sum((x - sum(g) / 3) ** 2 for x in g) / 2 for g in groups) / len(groups))
    assert found.tie == pytest.approx(2 * math.sqrt(2) * spread)


def test_ties_leave_out_arms_that_diverged(tmp_path):
    found = results(tmp_path, {"ngpt": lambda item: math.inf if item.name == "ngpt-80M-s2" else 0.0})
    groups = [found.complete(arm, "80M") for arm in BUDGETS["80M"] if arm != "ngpt"]
    spread = math.sqrt(sum(statistics.variance(g) for g in groups) / len(groups))
    assert found.tie == pytest.approx(2 * math.sqrt(2) * spread)
