import base64
import csv
import dataclasses
import hashlib
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from angpt.errors import UserError
from angpt.present import words as text
from angpt.present.charts import Chart, write_chart
from angpt.reports import inside, write_report
from angpt.reports.figures import loss_curves
from angpt.reports.records import Material, ReportedRun
from angpt.results import Result
from angpt.stats import Interval
from angpt.training import checkpoint
from angpt.training.record import Evaluation
from tests.reports.conftest import COMMANDS, Written
from tests.reports.synthetic import make_data, make_result, make_run, make_study, run_results

CHARTS = ("loss", "budgets", "costs", "training", "input-norms", "alphas", "row-norms")
DRAWINGS = 3
"""Of the architectures."""
PAPER = "https://arxiv.org/abs/2505.22014"
INSIDE = ("norms", "gamma", "bound", "factors", "learned", "logit-scales", "robustness", "attention")
"""What an analysis shows of runs that did not record the first moment."""
BARS = ("costs", "robustness")
"""Figures that the script does not draw, and that have a narrow form."""


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """But in the report of the complete comparison, which is made before any test: measuring and drawing take time."""
    monkeypatch.setattr(inside, "LARGEST", 0)


def data_of(html: str, figure: str) -> list[dict[str, Any]]:
    """The panels that the script of the page draws for a figure."""
    return json.loads(html.partition(f'<figure id="{figure}">')[2].partition('json">')[2].partition("</script>")[0])


class Page(HTMLParser):
    """Tags with their attributes, the visible text, and the rows of the table of losses."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.cells: dict[tuple[str, str], dict[str, str]] = {}
        self.row: tuple[str, str] | None = None
        self.column = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "tr":
            self.row = (
                (values["data-architecture"] or "", values["data-budget"] or "") if "data-budget" in values else None
            )
        if tag in ("td", "th"):
            self.column = (values.get("class") or "").split(" ")[0]
        if tag == "data" and self.row:
            self.cells.setdefault(self.row, {})[f"{self.column}-value"] = values["value"] or ""

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.column = ""

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.row and self.column and data.strip():
            cell = self.cells.setdefault(self.row, {})
            cell[self.column] = cell.get(self.column, "") + data.strip()

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def assert_table_is_result(cells: dict[tuple[str, str], dict[str, str]], result: Result) -> None:
    assert len(cells) == len(result.rows)
    for cell in result.rows:
        shown = {n: v.replace("\u00a0", " ") for n, v in cells[cell.architecture, str(cell.tokens)].items()}
        assert shown["diverged"] == str(cell.diverged)
        if cell.val_loss is None:
            assert shown["loss"] == ("diverged" if cell.diverged == cell.seeds else "not yet")
        else:
            assert float(shown["loss-value"]) == cell.val_loss.mean
            numbers = [float(n) for n in shown["loss"].split(" ± ")]
            assert numbers[0] == round(cell.val_loss.mean, 4)
            if cell.val_loss.low is None or cell.val_loss.high is None:
                assert len(numbers) == 1
            else:
                assert numbers[1] == pytest.approx((cell.val_loss.high - cell.val_loss.low) / 2, abs=5e-5)
        for name, speedup in (("tokens", cell.speedup_tokens), ("seconds", cell.speedup_seconds)):
            if speedup is None:
                assert shown[name] in ("baseline", "–")
            else:
                bound = "" if speedup.relation == "=" else f"{speedup.relation} "
                assert shown[name].startswith(f"{bound}{speedup.value:.2f}×")
                assert float(shown[f"{name}-value"]) == speedup.value
                assert ("[" in shown[name]) == (speedup.low is not None)


def test_the_table_shows_the_numbers_of_the_result(complete: Written) -> None:
    assert_table_is_result(Page(complete.html).cells, complete.result)


def test_the_page_says_what_was_found_and_how_to_repeat_it(complete: Written) -> None:
    page = Page(complete.html)
    assert "GPT+, nGPT and anGPT compared" in page.text
    assert complete.result.verdict in page.text
    assert "Complete: 12 of 12 runs finished." in page.text
    assert "Partial" not in page.text
    for expected in (*COMMANDS, "2.13.0", "c0ffee", "A <fast> one", *(run.name for run in complete.result.runs)):
        assert expected in page.text


def test_every_figure_is_there_as_png_svg_and_csv_with_its_description(complete: Written) -> None:
    page = Page(complete.html)
    drawn = [values for tag, values in page.tags if tag == "svg"]
    assert len(drawn) == len(CHARTS + INSIDE + BARS) + DRAWINGS
    assert all(values["role"] == "img" and len(values["aria-label"] or "") > 40 for values in drawn)
    links = {v["download"]: v["href"] or "" for tag, v in page.tags if tag == "a" and "download" in v}
    for name in CHARTS + INSIDE:
        figures = complete.page.parent / "figures"
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (figures / f"{name}.svg").read_text()
        table = (figures / f"{name}.csv").read_text()
        assert base64.b64decode(links[f"{name}.csv"].partition(",")[2]).decode() == table
        rows = list(csv.reader(io.StringIO(table)))
        assert len(rows) > 3
        assert {len(row) for row in rows} == {len(rows[0])}


def test_the_numbers_behind_the_curves_are_those_of_the_runs(complete: Written) -> None:
    with (complete.page.parent / "figures" / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20 * len(complete.runs)
    last = [row for row in rows if row["run"] == complete.runs[-1].name][-1]
    assert (last["architecture"], last["tokens"], last["seconds"]) == ("angpt", "80000", "8.0")


def test_nothing_is_fetched(complete: Written) -> None:
    page = Page(complete.html)
    for tag, values in page.tags:
        assert tag not in ("img", "iframe", "object", "embed")
        for name in ("src", "href", "srcset", "xlink:href", "action", "poster"):
            link = values.get(name) or "#"
            assert link.startswith(("#", "data:")) or (tag, link) == ("a", PAPER), (tag, name)
    assert not re.search(r"url\((?!#)|@import", complete.html)
    scripts = [values for tag, values in page.tags if tag == "script"]
    assert [values for values in scripts if values != {"type": "application/json"}] == [{}]
    assert re.findall('https?://[^"* ]*', complete.html) == [PAPER, "https://github.com/leeoniya/uPlot"]


def test_the_policy_allows_the_one_script_with_its_licence(complete: Written) -> None:
    script = complete.html.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(v["content"] for t, v in Page(complete.html).tags if t == "meta" and "http-equiv" in v)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    assert "The MIT License (MIT)" in script
    assert "Leon Sorokin" in script


def test_the_result_can_be_taken_from_the_page(complete: Written) -> None:
    link = next(v["href"] or "" for _, v in Page(complete.html).tags if v.get("download") == "result.json")
    found = json.loads(base64.b64decode(link.partition(",")[2]))
    assert found == json.loads(json.dumps(dataclasses.asdict(complete.result)))


def test_the_story_is_open_and_the_rest_is_folded(complete: Written) -> None:
    before, *folded = complete.html.split('<details class="section">')
    assert re.findall(r'<(?:figure|table|h2)[^>]* (?:id|class)="([^"]*)"', before) == [
        "losses", "loss", "losses", "compared", "recipes"
    ]  # fmt: skip
    assert [re.findall(r'<h2 id="([^"]*)"', part)[0] for part in folded] == [
        "speed", "steps", "layers", "inside", "samples", "repeat"
    ]  # fmt: skip


def test_no_line_joins_a_number_and_a_bound(complete: Written) -> None:
    lines = data_of(complete.html, "budgets")[1]["series"]
    assert [(line["name"], line["note"], len(line["x"])) for line in lines] == [
        (name, note, 1) for name in ("nGPT", "anGPT") for note in ("", "more than")
    ]


def test_each_architecture_has_its_recipe(complete: Written) -> None:
    table = complete.html.partition('<table class="recipes">')[2].partition("</table>")[0]
    rows = [re.sub("<[^>]*>", "|", row) for row in table.split("<tr>")[2:]]
    assert [[cell.strip() for cell in row.split("|") if cell.strip()] for row in rows] == [
        [name, "Adam", "0.01", "none", "cosine to 1\u00a0%", "none", "at norm 1"] for name in ("GPT+", "nGPT", "anGPT")
    ]


def test_ids_are_unique_and_references_find_them(complete: Written) -> None:
    ids = re.findall(r'\sid="([^"]*)"', complete.html)
    assert len(ids) == len(set(ids))
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)|aria-(?:labelledby|describedby)="([^"]*)"', complete.html)
    assert {next(filter(None, groups)) for groups in used} <= set(ids)


def test_figures_take_the_colours_of_the_page(complete: Written) -> None:
    svgs = re.findall(r'class="picture[^>]*>(<svg .*?</svg>)', complete.html, re.DOTALL)
    assert len(svgs) == len(CHARTS + INSIDE + BARS)
    for svg in svgs:
        assert "currentColor" in svg
        assert "#000000" not in svg.lower()
        assert "#ffffff" not in svg.lower()
        assert "DejaVu" not in svg


def test_equal_inputs_give_equal_bytes(complete: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "LARGEST", 10**6)
    again = write_report(complete.folder, complete.runs, complete.result, tmp_path / "again", COMMANDS)
    assert again.read_bytes() == complete.page.read_bytes()
    for path in (complete.page.parent / "figures").iterdir():
        assert (tmp_path / "again" / "figures" / path.name).read_bytes() == path.read_bytes()


def test_every_checkpoint_is_verified_once(complete: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, read as a whole for its checksum."""
    monkeypatch.setattr(inside, "LARGEST", 10**6)
    verified: list[Path] = []
    newest = checkpoint.newest

    def counted(folder: Path) -> Path | None:
        verified.append(folder)
        return newest(folder)

    monkeypatch.setattr(checkpoint, "newest", counted)
    write_report(complete.folder, complete.runs, complete.result, tmp_path / "again", COMMANDS)
    assert len(verified) == len(set(verified)) == 3  # one run per architecture


def test_each_model_continues_the_same_prompts(complete: Written) -> None:
    blocks = re.findall(r"<h4>.*?</span>(.*?)</h4>\s*<pre><span[^>]*>(.*?)</span>(.+?)</pre>", complete.html, re.DOTALL)
    assert [name for name, _, _ in blocks] == 3 * ["GPT+", "nGPT", "anGPT"]
    assert blocks[0][1] == blocks[1][1] == blocks[2][1] == "def f(x)"
    assert len({made for _, _, made in blocks}) == 9


def test_a_comparison_under_way(tmp_path: Path) -> None:
    """One run is done by half and one has not started; both runs of anGPT have diverged."""
    results = run_results(budgets=(40_000,))
    results[1] = dataclasses.replace(results[1], status="stopped", progress=0.5)
    results[3] = dataclasses.replace(results[3], status="waiting", progress=0.0, val_loss=None, seconds=None)
    results[4:] = [dataclasses.replace(run, status="diverged", progress=0.3, val_loss=None) for run in results[4:]]
    result = make_result(results, complete=False)
    runs = make_study(tmp_path, results, make_data(tmp_path / "data"))
    waiting = tmp_path / "runs" / results[3].name
    page = Page(write_report(tmp_path, [*runs, waiting], result, tmp_path / "out").read_text())
    assert "Partial: 2 of 6 runs finished, 2 diverged, 1 unfinished, 1 waiting." in page.text
    assert "50 % done" in page.text
    assert_table_is_result(page.cells, result)
    assert sum(tag == "svg" for tag, _ in page.tags) == len(CHARTS) + 1 + DRAWINGS  # the narrow form of costs


def test_before_the_first_step_each_part_says_why_it_is_empty(tmp_path: Path) -> None:
    results = [
        dataclasses.replace(run, status="waiting", progress=0.0, val_loss=None, seconds=None) for run in run_results()
    ]
    result = dataclasses.replace(make_result(results, complete=False), costs=())
    page = Page(write_report(tmp_path, [], result, tmp_path / "out").read_text())
    assert sum(tag == "svg" for tag, _ in page.tags) == DRAWINGS
    for reason in ("No run has been evaluated yet.", "No run has finished yet.", "No run has recorded its layers",
                   "No run has trained long enough", "No run has started yet."):  # fmt: skip
        assert reason in page.text


def test_without_tokenizer_layers_or_checkpoints(tmp_path: Path) -> None:
    results = run_results(["gpt+", "angpt"], [40_000])
    result = make_result(results)
    data = make_data(tmp_path / "data", tokenizer=False)
    runs = make_study(tmp_path, results, data, layers=False, saved=False)
    page = Page(write_report(tmp_path, runs, result, tmp_path / "out").read_text())
    assert "There is no tokenizer to write text with" in page.text
    assert page.text.count("No run has recorded its layers") == 3
    load = make_data(tmp_path / "other") / "tokenizer.json"
    load.rename(data / "tokenizer.json")
    page = Page(write_report(tmp_path, runs, result, tmp_path / "out").read_text())
    assert "GPT+ has no good checkpoint yet. anGPT has no good checkpoint yet." in page.text


def test_many_variants_have_different_looks(tmp_path: Path) -> None:
    from angpt.present.style import FURTHER, looks

    names = ["angpt", *(f"angpt/v{i}" for i in range(20)), "gpt+"]
    found = looks(names)
    assert len(set(found.values())) == len(names)
    assert found["angpt"] == looks(["angpt"])["angpt"]
    assert len({found[name].color for name in names[1 : 1 + len(FURTHER)]}) == len(FURTHER)


def test_a_longer_run_of_the_baseline_has_values_and_stands_last(tmp_path: Path) -> None:
    """It answers to the pointer, unlike runs of which the mean is shown; runs are listed by budget first."""
    results = run_results(budgets=(40_000,))
    longer = dataclasses.replace(results[0], name="longer", tokens=80_000)
    results = [longer, *reversed(results)]
    runs = make_study(tmp_path, results, make_data(tmp_path / "data"))
    rows = [row for row in make_result(results).rows if row.runs]
    result = dataclasses.replace(make_result(results), rows=tuple(rows))
    html = write_report(tmp_path, runs, result, tmp_path / "out", COMMANDS).read_text(encoding="utf-8")
    for panel in data_of(html, "loss"):
        notes = [(line["name"], line["note"]) for line in panel["series"]]
        assert notes.count(("GPT+", "single run")) == 1
        assert notes.count(("GPT+", "each run")) == 2
    listed = re.findall(r'<th scope="row">([-\w]+)</th>', html.partition('<table class="runs">')[2])
    order = {name: i for i, name in enumerate(result.architectures)}
    expected = sorted(result.runs, key=lambda run: (run.tokens, order[run.architecture], run.seed))
    assert listed == [run.name for run in expected]
    assert listed[-1] == "longer"


def test_lines_of_commands_break_at_spaces(complete: Written) -> None:
    """Words with hyphens, after which a line could break, are boxes of their own."""
    assert "<code>angpt compare <span>--budgets</span> 40k 80k &amp;&amp; echo &lt;done&gt;</code>" in complete.html


def test_every_line_of_gamma_has_a_name_of_its_own(complete: Written) -> None:
    names = [{(line["name"], line["note"]) for line in panel["series"]} for panel in data_of(complete.html, "gamma")]
    assert names == [{("GPT+, attention", ""), ("GPT+, MLP", "")}] * 2


def test_only_figures_that_the_script_does_not_draw_have_a_narrow_form(complete: Written) -> None:
    figures = re.findall(r"<figure id.*?</figure>", complete.html, flags=re.DOTALL)
    assert len(figures) > 5
    for figure in figures:
        assert ('class="picture narrow"' in figure) == ('<script type="application/json">' not in figure)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "angpt/<script>alert('1')</script>\"&$x$"
    results = run_results(["gpt+", evil], [40_000])
    runs = make_study(tmp_path, results, make_data(tmp_path / "data"))
    result = dataclasses.replace(make_result(results), verdicts={"": "<img src=x onerror=alert(1)> & {{ 7 * 7 }}"})
    path = write_report(tmp_path, runs, result, tmp_path / "out", ["angpt </code><script>alert(2)</script>"])
    page = Page(path.read_text())
    assert not any(tag == "img" for tag, _ in page.tags)
    scripts = [values for tag, values in page.tags if tag == "script"]
    assert [values for values in scripts if values != {"type": "application/json"}] == [{}]
    assert text.label(evil) in {line["name"] for panel in data_of(path.read_text(), "loss") for line in panel["series"]}
    assert not any(name.startswith("on") for _, values in page.tags for name in values)
    assert result.verdict in page.text
    assert text.label(evil) in page.text


def test_a_folder_that_the_result_does_not_name_is_an_error(complete: Written, tmp_path: Path) -> None:
    stranger = make_run(tmp_path / "stranger", complete.result.runs[0], tmp_path)
    with pytest.raises(UserError, match=r"stranger: not among the runs"):
        write_report(tmp_path, [stranger], complete.result, tmp_path / "out")


def test_two_folders_of_one_name_are_an_error(complete: Written, tmp_path: Path) -> None:
    twin = make_run(tmp_path / complete.runs[0].name, complete.result.runs[0], tmp_path)
    with pytest.raises(UserError, match="two runs of the name"):
        write_report(tmp_path, [*complete.runs, twin], complete.result, tmp_path / "out")


def test_numbers_read_well() -> None:
    assert [text.quantity(n) for n in (950, 400_000, 1_500_000, 2_000_000_000)] == ["950", "400k", "1.5M", "2B"]
    assert [text.quantity(n) for n in (999.7, 999_499, 999_999, 999_817_216)] == ["1k", "999k", "1M", "1B"]
    assert [text.duration(s) for s in (1.25, 119, 150, 7300)] == ["1.2 s", "119.0 s", "2.5 min", "2.0 h"]
    assert text.interval(Interval(2.34567, None, None, 1), 4) == "2.3457"
    assert text.overhead(Interval(-0.0312, -0.041, -0.021, 3)) == "−3.1 % ± 1.0 %"
    assert text.speedup(1.7999, relation=">") == "> 1.80×"
    assert text.label("angpt/no-lerp") == "anGPT no-lerp"


def test_broken_metrics_are_an_error_that_names_the_file(complete: Written, tmp_path: Path) -> None:
    run = make_run(tmp_path / complete.result.runs[0].name, complete.result.runs[0], tmp_path)
    (run / "metrics.jsonl").write_text('{"kind": "val"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1: cannot be read"):
        write_report(tmp_path, [run], complete.result, tmp_path / "out")


def test_many_runs_with_many_evaluations_make_a_small_page(tmp_path: Path) -> None:
    """2,000 runs, of which each has a hundred evaluations: the page links to their numbers."""
    runs = [
        dataclasses.replace(run, name=f"{run.name}-{copy}", seed=copy)
        for copy in range(500)
        for run in run_results(["gpt+", "angpt"], [40_000, 80_000])[::2]
    ]
    material = Material(make_result(runs), tuple(ReportedRun(run, Curve(run.tokens)) for run in runs))  # type: ignore[arg-type]
    chart = loss_curves(material)
    assert isinstance(chart, Chart)
    drawn = write_chart(chart, tmp_path)
    assert {line["note"] for panel in drawn.panels for line in panel["series"]} == {""}  # means alone
    assert drawn.narrow is None  # the script draws it
    assert len(drawn.wide) + len(drawn.data_uri) + len(json.dumps(drawn.panels)) < 1_000_000
    assert drawn.data_uri == f"{tmp_path.name}/loss.csv"
    assert (tmp_path / "loss.csv").read_text().count("\n") == 1 + 100 * len(runs)


class Curve:
    """The evaluations of a run."""

    def __init__(self, tokens: int) -> None:
        self.evaluations = [
            Evaluation(tokens * i // 100, 0.1 * i, 2 + 1 / i + 0.01 * math.sin(i)) for i in range(1, 101)
        ]
