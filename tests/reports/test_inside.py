import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from angpt.analysis.analyse import Analysis
from angpt.reports import inside
from angpt.reports.page import open_sources
from angpt.reports.records import read_material
from tests.reports.conftest import Written
from tests.reports.synthetic import make_data, make_result, make_study, run_results


def refuse(*args: object, **options: object) -> Analysis:
    raise AssertionError("measured again")


def test_the_page_shows_claims_tables_and_why_a_figure_is_missing(complete: Written) -> None:
    html = complete.html
    assert '<h2 id="inside">Inside the models</h2>' in html
    assert "The residual norm of GPT+ grows with depth" in html
    assert html.count("<details>") == 9
    assert "No run has recorded it; train with --record-moments." in html
    found = Analysis.read(complete.page.parent / "analysis.json")
    assert [run.label for run in found.runs] == ["GPT+", "nGPT", "anGPT"]
    assert [run.run for run in found.runs] == ["0-80000-0", "1-80000-0", "2-80000-0"]


def test_what_lies_in_the_folder_is_used_as_long_as_it_is_of_these_checkpoints(
    complete: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "write_chart", lambda chart, folder: chart)
    study = read_material(complete.runs, complete.result)
    stored = tmp_path / "analysis" / "analysis.json"
    stored.parent.mkdir()
    shutil.copy(complete.page.parent / "analysis.json", stored)
    monkeypatch.setattr(inside, "analyse", refuse)
    sources = open_sources(study)
    found = inside.look_inside(study, sources, tmp_path, tmp_path / "out")
    assert len(found.tables) == 9
    analysis = Analysis.read(stored)
    other = dataclasses.replace(analysis.runs[0], fingerprint="0" * 64)
    Analysis((other, *analysis.runs[1:])).write(stored)
    with pytest.raises(AssertionError, match="measured again"):
        inside.look_inside(study, sources, tmp_path, tmp_path / "out")
    stored.write_text("{")
    with pytest.raises(AssertionError, match="measured again"):
        inside.look_inside(study, sources, tmp_path, tmp_path / "out")


def test_large_models_are_left_to_the_command(
    complete: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "LARGEST", 19_999)
    study = read_material(complete.runs, complete.result)
    found = inside.look_inside(study, open_sources(study), tmp_path, tmp_path / "out")
    assert not found.tables
    assert f"--out {tmp_path / 'out' / 'analysis'} does it for the next page" in found.note


def test_large_models_are_measured_where_there_is_a_gpu(
    complete: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def analyse(folders: list[Path], device: str, sources: object) -> Analysis:
        asked.append(device)
        return Analysis.read(complete.page.parent / "analysis.json")

    monkeypatch.setattr(inside, "analyse", analyse)
    monkeypatch.setattr(inside, "choose_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(inside, "write_chart", lambda chart, folder: chart)
    study = read_material(complete.runs, complete.result)
    for largest in (19_999, 20_000):
        monkeypatch.setattr(inside, "LARGEST", largest)
        (tmp_path / "analysis.json").unlink(missing_ok=True)
        inside.look_inside(study, open_sources(study), tmp_path, tmp_path)
    assert asked == ["auto", "cpu"]


def test_without_data_or_checkpoints_the_note_says_so(tmp_path: Path) -> None:
    results = run_results(["gpt+", "angpt"], [40_000])
    runs = make_study(tmp_path, results, data := make_data(tmp_path / "data"))
    study = read_material(runs, make_result(results))
    shutil.rmtree(data)
    assert "no such file or folder" in inside.look_inside(study, open_sources(study), tmp_path, tmp_path).note
    for run in runs:
        shutil.rmtree(run / "checkpoints")
    note = inside.look_inside(study, open_sources(study), tmp_path, tmp_path).note
    assert note == "0-40000-0 has no good checkpoint yet. 1-40000-0 has no good checkpoint yet."
