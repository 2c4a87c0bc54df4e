"""Run folders of any origin: what may be averaged, and what is compared with what."""

import dataclasses
import html

import pytest

from angpt.cli.main import main
from angpt.errors import UserError
from angpt.studies.folders import summarise_runs
from angpt.studies.jobs import Job
from tests.studies.conftest import pretend, tiny


@pytest.fixture
def run(data, tmp_path):
    """Leave a finished run; `changes` are settings by their dotted names."""

    def run(name, loss, architecture="gpt+", **changes):
        config = tiny(data).train
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, architecture=architecture),
            optimizer=dataclasses.replace(config.optimizer, lr=0.01),
            tokens="2048",
        )
        for dotted, value in changes.items():
            section, _, key = dotted.rpartition("__")
            if section:
                value = dataclasses.replace(getattr(config, section), **{key: value})
            config = dataclasses.replace(config, **{section or key: value})
        folder = tmp_path / "runs" / name
        pretend(Job(config, folder), val_loss=loss)
        return folder

    return run


def rows(result):
    return {
        (row.architecture, row.size, row.budget, row.settings): (round(row.val_loss.mean, 6), row.val_loss.n)
        for row in result.rows
    }


def test_seeds_are_averaged(run):
    folders = [run(f"s{seed}", 2.0, seed=seed) for seed in range(3)]
    assert rows(summarise_runs(folders, "gpt+")) == {("gpt+", "", "2.048k", ""): (2.0, 3)}


def test_settings_that_differ_have_separate_rows(run):
    folders = [
        run("a0", 2.0),
        run("a1", 2.2, seed=1),
        run("b0", 1.0, optimizer__lr=0.02),
        run("c0", 3.0, optimizer__lr=0.02, optimizer__warmup=0.0),
        run("d0", 4.0, batch_tokens=512),
        run("other", 1.5, architecture="angpt"),
    ]
    found = rows(summarise_runs(folders, "gpt+"))
    common = "batch_tokens 256"
    assert found == {
        ("gpt+", "", "2.048k", f"lr 0.01, warmup 0.1, {common}"): (pytest.approx(2.0976, abs=1e-4), 2),
        ("gpt+", "", "2.048k", f"lr 0.02, warmup 0.1, {common}"): (1.0, 1),
        ("gpt+", "", "2.048k", f"lr 0.02, warmup 0, {common}"): (3.0, 1),
        ("gpt+", "", "2.048k", "lr 0.01, warmup 0.1, batch_tokens 512"): (4.0, 1),
        ("angpt", "", "2.048k", ""): (1.5, 1),
    }


def test_settings_that_do_not_change_the_loss_are_ignored(run):
    folders = [
        run("a", 2.0),
        run("b", 2.0, seed=1, micro_batch=4, log_every=3, keep_checkpoints=1, record_moments=True),
    ]
    assert len(summarise_runs(folders, "gpt+").rows) == 1


def test_the_best_settings_are_compared(run):
    folders = [
        run("low", 2.0, tokens="1024"),
        run("bad", 3.0),
        run("good", 1.0, optimizer__lr=0.02),
        run("ours", 1.5, architecture="angpt", tokens="1024"),
        run("late", 1.1, architecture="angpt"),
    ]
    result = summarise_runs(folders, "gpt+")
    found = {row.runs[0]: row for row in result.rows}
    assert found["ours"].speedup_tokens.value == pytest.approx(4 / 3)  # on the line from (1024, 2.0) to (2048, 1.0)
    assert found["late"].change.mean == pytest.approx(0.1)
    assert found["bad"].change.mean == pytest.approx(2.0)
    assert found["good"].change is None
    assert result.verdict.startswith("anGPT reaches 1.100, GPT+ 1.000 (+10.0 %)")
    assert [row.runs[0] for row in result.leaders] == ["low", "good", "ours", "late"]
    assert result.costs[0].step_ms.n == 2  # of GPT+: a run of each budget


def test_sizes_and_data_that_differ_are_never_compared(run, tmp_path, capsys):
    folders = [
        run("small", 3.0),
        run("small-ours", 2.0, architecture="angpt"),
        run("large", 2.5, model__d_model=32),
        run("large-ours", 1.5, architecture="angpt", model__d_model=32),
        run("precise", 2.4, model__d_model=32, eval_tokens=1024),
    ]
    result = summarise_runs(folders, "gpt+")
    small, large, precise = "16x1x2-eval_tokens-512", "32x1x2-eval_tokens-512", "32x1x2-eval_tokens-1024"
    assert result.sizes == (small, large, precise)
    assert result.verdicts[small].startswith("anGPT reaches 2.000, GPT+ 3.000")
    assert result.verdicts[large].startswith("anGPT reaches 1.500, GPT+ 2.500")
    assert result.verdicts[precise] == "No verdict: GPT+ was trained alone."
    main(["report", *map(str, folders), "--out", str(tmp_path / "page")])
    pages = {path.parent.name: path.read_text(encoding="utf-8") for path in (tmp_path / "page").rglob("report.html")}
    assert set(pages) == set(result.sizes)
    assert "anGPT reaches 1.500" in html.unescape(pages[large])
    assert ">3.0000<" not in pages[large]


def test_a_page_names_the_settings_of_its_rows(run, tmp_path):
    folders = [run("a", 2.0), run("b", 1.0, optimizer__lr=0.02)]
    main(["report", *map(str, folders), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "lr 0.01</span>" in page
    assert "lr 0.02</span>" in page
    assert page.count('class="loss best"') == 1


def test_a_run_is_not_counted_twice(run):
    folders = [run("a", 2.0), run("copy", 2.0)]
    with pytest.raises(UserError, match="a and copy have the same settings and the same seed; leave one out"):
        summarise_runs(folders, "gpt+")
