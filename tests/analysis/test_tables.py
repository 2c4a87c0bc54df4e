import dataclasses
import re

import pytest

from angpt.analysis.analyse import Analysis, analyse
from angpt.analysis.claims import claims
from angpt.analysis.factors import MeasuredFactor
from angpt.analysis.norms import BlockNorms
from angpt.analysis.probe import Stats
from angpt.analysis.tables import places, tables
from angpt.analysis.write import markdown
from angpt.present.words import number, span


def stats(mean, std=0.0):
    return Stats(10, mean, std, mean, 1 / mean, mean, mean, std / mean)


def test_numbers_in_words():
    written = [number(v) for v in (0.99999, 1.0, 0.0502, 12.345, 545.68, 1831.42, -0.31, 4e-8, 0.00012, None)]
    assert written == ["1.00", "1.00", "0.0502", "12.3", "546", "1,831", "-0.310", "0", "0.000120", "–"]
    assert number(3.61388, 4) == "3.614"
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
    found = {t.name: t for t in tables(planted(measured))}
    names = "streams ratios gammas rows factors learned moments shift robustness attention"
    assert list(found) == names.split()
    streams = {row[0]: row for row in found["streams"].rows}
    assert streams["GPT+"][1:6] == ("1.50", "3.00", "3.00", "7.50", "1.50 to 7.50")
    assert streams["anGPT"][5] == "0.500 to 1.25"
    ratios = {row[0]: row[1:] for row in found["ratios"].rows}
    assert ratios["maps: first attention"][:3] == ("0.01", "1.07", "0.250")
    assert ratios["maps: last MLP"] == ("5.83", "1.22", *["6.00"] * 4)
    assert ratios["update: last MLP"][:3] == ("–", "–", "1.50")
    assert ratios["stream: last MLP"][2] == "2.50"
    shift = {row[0]: row[1:] for row in found["shift"].rows}
    assert shift["GPT+, paper"] == ("1,831.42", "353.93", "545.68", "78.80", "3.36")
    assert shift["anGPT, paper"] == ("2.48", "0.18", "1.65", "0.15", "1.50")
    for table in found.values():
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert table.markdown().count("\n|") == len(table.rows) + 2


def test_claims_are_judged_by_the_criterion_that_they_state(measured):
    found = {c.paper[:24]: c for c in claims(planted(measured))}
    assert (
        found["The residual norm of GPT"].here == "From 1.50 into the first layer to 7.50 after the last, 5.00 times."
    )
    assert found["The residual norm of GPT"].holds
    assert found["The residual norm of anG"].holds
    shrunk = planted(measured)
    runs = tuple(
        dataclasses.replace(r, norms=dataclasses.replace(r.norms, stream=tuple(stats(m) for m in (5.0, 4.0, 3.5))))
        for r in shrunk.runs
    )
    found = {c.paper[:24]: c for c in claims(Analysis(runs))}
    assert not found["The residual norm of GPT"].holds
    assert not found["The residual norm of anG"].holds
    assert len(found) == 10  # γ needs three layers


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
