import re
from pathlib import Path

from angpt.evaluation.requests import Origin, Scored
from angpt.evaluation.results import Evaluated, LossResult, Results, TaskResult, write_results
from angpt.reports import write_report
from tests.reports.synthetic import make_data, make_result, make_study, run_results


def evaluate(run: Path, number: int) -> None:
    """Invented results, of which each run has its own."""
    scored = Scored(f"{number}" * 64, "r", "fp32", "cpu", 1.0, 0, 0)
    loss = LossResult("data/x", "val", "f", None, 3, 96, 2.5 - number / 10, 0.01, 12.0, 1.5, "fp32", "cpu", 1.0)
    tasks = [
        TaskResult(Origin(task, "d", None, "0.4.13", "t"), metric, value, 0.0125, {metric: value}, samples, scored)
        for task, metric, value, samples in (
            ("piqa", "acc", 0.6 + number / 100, 1838),
            ("wikitext", "word_perplexity", 30.25 - number, 62),
        )
    ]
    write_results(run, Results(Evaluated(run.name, "run", f"{number}" * 64, 32, 257, None), (loss,), tuple(tasks)))


def table(html: str) -> list[list[str]]:
    """Rows of the table of evaluations as text, ** around what is bold."""
    (part,) = re.findall(r'<table class="evaluations".*?</table>', html, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)
    found = []
    for row in rows:
        cells = re.findall(r"<t[hd]([^>]*)>(.*?)</t[hd]>", row, re.DOTALL)
        plain = [(kind, " ".join(re.sub("<[^>]*>", " ", cell).split())) for kind, cell in cells]
        found.append([f"**{cell}**" if "best" in kind else cell for kind, cell in plain])
    return found


def test_evaluated_runs_stand_side_by_side(tmp_path: Path) -> None:
    results = run_results(["gpt+", "angpt"], [40_000])
    runs = make_study(tmp_path, results, make_data(tmp_path / "data"))
    evaluate(runs[0], 1)
    evaluate(runs[2], 2)
    html = write_report(tmp_path, runs, make_result(results), tmp_path / "out").read_text()
    assert table(html) == [
        ["Task", "Metric", "Size", "GPT+ 40k, seed 0 11111111", "anGPT 40k, seed 0 22222222"],
        ["data/x val", "loss ↓", "96", "2.4000 ± 0.0100", "**2.3000 ± 0.0100**"],
        ["data/x val", "perplexity ↓", "96", "12.000", "12.000"],
        ["data/x val", "bits per byte ↓", "96", "1.5000", "1.5000"],
        ["PIQA", "acc ↑", "1,838", "0.6100 ± 0.0125", "**0.6200 ± 0.0125**"],
        ["WikiText", "word_perplexity ↓", "62", "29.250 ± 0.013", "**28.250 ± 0.013**"],
    ]
    assert 'href="#evaluations"' in html


def test_without_evaluations_there_is_no_such_part(tmp_path: Path) -> None:
    results = run_results(["gpt+"], [40_000])
    runs = make_study(tmp_path, results, make_data(tmp_path / "data"))
    html = write_report(tmp_path, runs, make_result(results), tmp_path / "out").read_text()
    assert 'class="evaluations"' not in html
    assert "#evaluations" not in html
