import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_lists_every_pinned_version_with_a_licence():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {tuple(line.split("==")) for line in lines if "==" in line}
    page, others = (ROOT / "docs" / "dependencies.md").read_text().split("## Files of others")
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \| (.+) \|$", page, re.MULTILINE)[1:]
    assert {(name, version) for name, version, _, _ in rows} == pinned, "run `make docs`"
    assert all(licence != "unknown" for _, _, licence, _ in rows)
    uplot = (ROOT / "angpt" / "reports" / "assets" / "uplot" / "uPlot.iife.min.js").read_text()
    assert f"| {uplot.partition('(v')[2].partition(')')[0]} | MIT |" in others
