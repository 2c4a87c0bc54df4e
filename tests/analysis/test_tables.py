import dataclasses
import re

import pytest

from angpt.analysis.analyse import Analysis, analyse
from angpt.analysis.claims import claims
from angpt.analysis.factors import MeasuredFactor
from angpt.analysis.learned import Spread
from angpt.analysis.moments import GroupMoments, Moments
from angpt.analysis.norms import BlockNorms, RowNorms
from angpt.analysis.probe import Stats
from angpt.analysis.robustness import Robustness, Shift
from angpt.analysis.tables import places, tables
from angpt.analysis.write import markdown
from angpt.present.words import number, span


def stats(mean, std=0.0):
    return Stats(10, mean, std, mean, 1 / mean, mean, mean, std / mean)


def test_numbers_in_words():
    written = [number(v) for v in (0.99999, 1.0, 0.0502, 12.345, 545.68, 1831.42, -0.31, 4e-8, 0.00012, None)]
    assert written == ["1.00", "1.00", "0.0502", "12.3", "546", "1,831", "-0.310", "0", "0.000120", "–"]
    assert number(3.61388, 4) == "3.614"
    assert [number(999.7), number(-999.4), number(99.97, 2)] == ["1,000", "-999", "100"]
    assert span([1.0, None, 2.5]) == "1.00 to 2.50"
    assert span([1.0001, 1.0002]) == "1.00"
    assert span([None]) == "–"


def test_first_middle_and_last_layer():
    assert places(24) == {"first": 0, "middle": 12, "last": 23}
    assert places(1) == {"first": 0, "middle": 0, "last": 0}


@pytest.fixture(scope="module")
def measured(runs):
    return analyse([runs["gpt+"], runs["gpt+nowarm"], runs["ngpt"], runs["angpt"]], tokens=64)


def planted(analysis):
    """The analysis with known norms in place of the measured ones."""
    block = BlockNorms.of(2.0, 4.0, 1.0, 3.0, 5.0)
    other = BlockNorms.of(2.0, 1.0, 6.0, 3.0, 5.0)
    runs = []
    for run in analysis.runs:
        grown = (1.5, 3.0, 7.5) if run.architecture == "gpt+" else (1.0, 1.25, 0.5)
        found = dataclasses.replace(
            run.norms, stream=tuple(stats(m) for m in grown), attention=(block, block), mlp=(block, other)
        )
        runs.append(dataclasses.replace(run, norms=found))
    return Analysis(tuple(runs))


def test_tables_hold_the_planted_numbers_beside_those_of_the_paper(measured):
    found = {t.title: t for t in tables(planted(measured))}
    assert len(found) == 10
    streams = {row[0]: row for row in found["Length of the residual stream"].rows}
    assert streams["GPT+"][1:6] == ("1.50", "3.00", "3.00", "7.50", "1.50 to 7.50")
    assert streams["anGPT"][5] == "0.500 to 1.25"
    ratios = {row[0]: row[1:] for row in found["Mean output norm over mean input norm of the blocks"].rows}
    assert ratios["maps: first attention"][:3] == ("0.01", "1.07", "0.250")
    assert ratios["maps: last MLP"] == ("5.83", "1.22", *["6.00"] * 4)
    assert ratios["update: last MLP"][:3] == ("–", "–", "1.50")
    assert ratios["stream: last MLP"][2] == "2.50"
    shift = {row[0]: row[1:] for row in found["Mean residual norm on text and on repetitions of one token"].rows}
    assert shift["GPT+, paper"] == ("1,831.42", "353.93", "545.68", "78.80", "3.36")
    assert shift["anGPT, paper"] == ("2.48", "0.18", "1.65", "0.15", "1.50")
    for table in found.values():
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert table.markdown().count("\n|") == len(table.rows) + 2


def streams(*means):
    return {"norms": {"stream": tuple(stats(m) for m in means)}}


def blocks(*maps):
    """Norms with these ratios of the blocks."""
    found = tuple(BlockNorms.of(1.0, 1.0, m, 1.0, 1.0) for m in maps)
    return {"norms": {"attention": found, "mlp": found}}


def alphas(*means):
    found = tuple(Spread(i, m, abs(m), 0.1, m, m, 0.0) for i, m in enumerate(means, 1))
    return {"learned": {"alpha": {"alpha_a": found, "alpha_m": found}}}


def moments(**values):
    groups = tuple(GroupMoments(g, ((1.0,),), **({"peak": 1, "peak_at": 0, "early": 0, "spread": 0} | values))
                   for g in ("W_qkv", "W_p", "W_uz", "W_d"))  # fmt: skip
    return {"moments": Moments(10, (1, 2), groups, 0.0)}


def repeated(change):
    shift = Shift("same token", "", 1, 1, 1.0, 1.0, 1.0, (), change, 1, change)
    return {"robustness": Robustness((shift,), ())}


def rows_of(*means):
    return {"norms": {"rows": tuple(RowNorms("W_p", i, m, 0.0, m, m, "bound", 0.5, 4) for i, m in enumerate(means))}}


def factors(*errors):
    return {"factors": tuple(MeasuredFactor("q", 1, 2.0, 2.0, 2.0, 2.0, 0.1, 1.0, e, None) for e in errors)}


GPT, NO_WARMUP, NGPT, ANGPT = range(4)
CASES = {
    "residual norm of GPT+ grows": ({GPT: streams(1.0, 1.5, 2.0)}, {GPT: streams(1.0, 2.5, 1.9)}),
    "residual norm of anGPT": ({ANGPT: streams(0.4, 1.0, 2.9)}, {ANGPT: streams(1.0, 1.0, 3.1)}),
    "residual norm of nGPT": ({NGPT: streams(0.999, 1.0, 1.001)}, {NGPT: streams(1.0, 1.0, 1.02)}),
    "Output over input norm": (
        {ANGPT: blocks(0.86, 1.86), GPT: blocks(0.01, 5.83)},
        {ANGPT: blocks(0.18, 2.0), GPT: blocks(0.01, 15.5)},  # spread less than GPT+, but not near 1
    ),
    "rows of anGPT's weights": ({ANGPT: rows_of(0.91, 1.0)}, {ANGPT: rows_of(0.84, 1.0)}),
    "α rises": ({ANGPT: alphas(0.12, 0.2, 0.25)}, {ANGPT: alphas(0.2, -1.6, 1.94)}),
    "constant in place": ({ANGPT: factors(0.001, 0.019)}, {ANGPT: factors(0.001, 0.021)}),
    "first moment is small": (
        {ANGPT: moments(early=0.05), GPT: moments(early=0.5)},
        {ANGPT: moments(early=0.11), GPT: moments(early=0.5)},
    ),
    "Without warm-up": (
        {GPT: moments(peak=3.0), NO_WARMUP: moments(peak=3.4)},
        {GPT: moments(peak=3.0), NO_WARMUP: moments(peak=3.1)},
    ),
    "On a repeated token": (
        {GPT: repeated(3.4), ANGPT: repeated(1.5)},
        {GPT: repeated(1.11), ANGPT: repeated(1.07)},  # less in anGPT, but no such change in GPT+
    ),
}
"""For each claim, measurements of which it holds and measurements of which it does not."""


def with_measurements(analysis, changes):
    runs = list(analysis.runs)
    for index, parts in changes.items():
        for part, values in parts.items():
            found = dataclasses.replace(getattr(runs[index], part), **values) if isinstance(values, dict) else values
            runs[index] = dataclasses.replace(runs[index], **{part: found})
    return Analysis(tuple(runs))


@pytest.mark.parametrize("words", CASES)
def test_a_claim_holds_only_if_its_numbers_do(measured, words):
    for changes, holds in zip(CASES[words], (True, False), strict=True):
        [claim] = [c for c in claims(with_measurements(measured, changes)) if words in c.paper]
        assert claim.holds == holds, claim
        assert claim.test


def test_every_claim_has_a_case(measured):
    found = [c.paper for c in claims(measured)]
    assert all(any(words in paper for words in CASES) for paper in found)
    assert len(found) == len(CASES)  # γ needs three layers


def test_gamma_must_follow_the_stream(measured):
    block = BlockNorms.of(1.0, 1.0, 1.0, 1.0, 1.0)
    for values, holds in (((1.0, 2.0, 3.0), True), ((2.0, 3.0, 2.1), False)):
        norms = {"gamma": {"norm_a": values}, "attention": (block,) * 3, **streams(1.0, 2.0, 3.0, 4.0)["norms"]}
        [claim] = [c for c in claims(with_measurements(measured, {GPT: {"norms": norms}})) if c.paper.startswith("γ")]
        assert claim.holds == holds, claim


def test_lengths_that_overflowed_decide_no_claim(measured):
    norms = streams(1.0, 2.0, 3.0, 4.0)["norms"]
    lost = {"stream": (*norms["stream"][:-1], dataclasses.replace(norms["stream"][-1], mean=None))}
    found = claims(with_measurements(measured, {GPT: {"norms": norms | lost}}))
    assert not any("residual norm of GPT+" in claim.paper for claim in found)
    assert any("residual norm of anGPT" in claim.paper for claim in found)


def test_a_claim_names_what_was_measured(measured):
    found = claims(with_measurements(measured, {GPT: streams(1.5, 3.0, 7.5), ANGPT: alphas(0.2, -1.6, 1.94)}))
    here = {c.paper.split()[0]: c.here for c in reversed(found)}
    assert here["The"] == "From 1.50 into the first layer to 7.50 after the last, 5.00 times."
    assert here["α"] == "From 0.05 to means of -1.60 to 1.94; of |α|, 0.200 to 1.94."


def test_names_are_no_html(measured):
    """Folders, whose names label runs that would have the same name, and arguments of the command may hold anything."""
    tag = "<img src=x onerror=alert(1)></td><!-- `"
    runs = [dataclasses.replace(run, label=tag + run.label) for run in measured.runs]
    page = markdown(dataclasses.replace(measured, runs=runs), [], f"angpt analyze {tag}\n{tag}")
    assert page.count("&lt;img") > 4
    assert not re.search("<[a-zA-Z/!?]", page)


def test_every_row_of_the_document_has_the_cells_of_its_heading(measured):
    heading, tables_seen = 0, 0
    for line in markdown(measured, [], "angpt analyze").splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1 if line.startswith("|") else 0
        assert not (heading and cells) or cells == heading, line
        tables_seen += cells > 0 and heading == 0
        heading = cells
    assert tables_seen == len(tables(measured)) + 1  # that of the claims


def test_the_claim_about_factors_names_the_worst(measured):
    good = MeasuredFactor("q", 1, 2.0, 2.0, 2.0, 2.02, 0.1, 1.0, 0.01, None)
    bad = MeasuredFactor("d", 2, 2.0, 1.0, 2.0, 1.3, 0.1, 2.0, 0.3, None)
    for rows, holds in (((good,), True), ((good, bad), False)):
        run = dataclasses.replace(measured.runs[-1], factors=rows)
        [claim] = [c for c in claims(Analysis((run,))) if "constant in place" in c.paper]
        assert claim.holds == holds
    assert "30.0 % (W_d h_m, layer 2)" in claim.here


def test_runs_of_one_kind_make_no_comparison(measured):
    alone = claims(Analysis(measured.runs[-1:]))
    assert alone
    assert all("GPT+ spikes" not in c.paper and "repeated" not in c.paper for c in alone)
    assert claims(Analysis(())) == []
    assert tables(Analysis(())) == []
