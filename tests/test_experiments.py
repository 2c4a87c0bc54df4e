import dataclasses
import math
import os
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from angpt.models.variants import ARCHITECTURES
from angpt.present.words import label
from angpt.studies.executor import Processes
from angpt.studies.outcome import markdown
from angpt.studies.progress import ASSUMED_TFLOPS, hours
from angpt.studies.study import Study
from tests.training.conftest import write_tokens

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "experiments").glob("*.toml"))
LARGE = [path for path in FILES if not path.stem.endswith("-small")]
SMALL = [path for path in FILES if path.stem.endswith("-small")]
DOCS = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
PAPER = Path(os.environ.get("ANGPT_PAPER", ROOT.parent / "shared" / "paper" / "angpt.tex"))

LABELS = {
    "fig:layer_in_norms": "Figure 1",
    "tab:transformer_comparison": "Table 1",
    "fig:hparams_fit": "Figure 2",
    "fig:comparison": "Figure 3",
    "tab:runtime_comparison": "Table 2",
    "fig:loss_curve_scaling": "Figure 4",
    "fig:ablation": "Figure 5",
    "fig:related_work": "Figure A.1",
    "fig:adam_momentum_var": "Figure B.1",
    "fig:adam_momentum_var_no_warm-up": "Figure B.2",
    "fig:gptplus_norms": "Figure C.1",
    "tbl:arch_hp": "Table F.1",
    "tbl:hyperparameters": "Table F.2",
    "fig:hparams_sweep": "Figure G.1",
    "fig:sanity_check": "Figure H.1",
    "fig:comparison_noQK": "Figure H.2",
    "fig:convergence_additional": "Figure I.1",
    "tab:combined_opt_params": "Table J.1",
    "fig:compute_optimal": "Figure J.1",
    "tab:downstream": "Table K.1",
    "tab:ablation": "Table L.1",
    "fig:alpha_evolution": "Figure M.1",
    "tab:norm_ratio": "Table N.1",
    "tab:ood": "Table O.1",
    "fig:angpt_norms": "Figure P.1",
}
"""The figures and tables of the paper by their labels in its source."""


def study(path):
    return Study.read(path, Path("nowhere"))


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_every_experiment_is_there_at_two_scales(path):
    small = path.with_name(f"{path.stem}-small.toml")
    assert small in SMALL
    names = [{a for grid in study(p).config.grid for a in grid.architectures} for p in (path, small)]
    assert names[0] == names[1] or path.stem == "hparams"
    assert names[1] <= names[0] <= set(ARCHITECTURES)
    assert study(path).config.baseline == study(small).config.baseline
    assert max(job.flops for job in study(small).jobs()) < 1e13  # minutes on a core
    assert f"{path.stem}.toml on a laptop" in small.read_text(encoding="utf-8")


def test_every_small_one_belongs_to_a_large_one():
    assert {path.stem.removesuffix("-small") for path in SMALL} == {path.stem for path in LARGE}


def test_the_ablations_cover_every_variant():
    used = {a for path in LARGE for grid in study(path).config.grid for a in grid.architectures}
    assert used == set(ARCHITECTURES)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_the_docs_know_it_and_what_it_costs(path):
    commands = [line for line in DOCS.splitlines() if line.startswith("| ") and f"`{path.name}`" in line]
    assert len(commands) >= 2
    cells = []
    for file in (path, path.with_name(f"{path.stem}-small.toml")):
        jobs, growth = study(file).jobs(), study(file).growth()
        flops, more = sum(job.flops for job in jobs), sum(job.flops for job in growth)
        cells.append(f"{len(jobs)} (+{len(growth)})" if growth else f"{len(jobs)}")
        cells.append(f"{flops:.2e} (+{more:.2e})" if growth else f"{flops:.2e}")
        if file is path:
            cost = hours(flops, ASSUMED_TFLOPS)
            cells.append(f"{cost} (+{hours(more, ASSUMED_TFLOPS)})" if growth else cost)
    assert f"| `{path.name}` | {' | '.join(cells)} |" in DOCS


def test_the_docs_name_every_figure_and_table():
    rows = [line.split("|")[1] for line in DOCS.splitlines() if re.match(r"\| (Figure|Table)", line)]
    named = [name.strip() for row in rows for name in row.split(",")]
    assert sorted(named) == sorted([*LABELS.values(), "Table N.2"])  # which has no label


def test_the_labels_are_those_of_the_paper():
    if not PAPER.exists():
        pytest.skip(f"{PAPER}: the paper is not here (ANGPT_PAPER)")
    found = re.findall(r"\\label\s*\{((?:fig|tab|tbl):[^}]*)\}", PAPER.read_text(encoding="utf-8"))
    assert sorted(found) == sorted(LABELS)


def test_files_named_in_the_docs_exist():
    named = set(re.findall(r"`([\w-]+\.toml)`", DOCS))
    assert {ROOT / "experiments" / name for name in named} <= set(FILES)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_every_small_one_runs(path, tmp_path):
    """With a twentieth of its tokens, one seed, and grids that stay as they are."""
    config = study(path).config
    grids = tuple(
        dataclasses.replace(
            grid,
            budgets=tuple(f"{float(b[:-1]) / 20:.4g}{b[-1]}" for b in grid.budgets),
            seeds=(0,),
            lr_limits=(),
            batch_limits=(),
        )
        for grid in config.grid
    )
    base = config.baseline_budget and f"{float(config.baseline_budget[:-1]) / 20:.4g}{config.baseline_budget[-1]}"
    data = dataclasses.replace(config.train.data, path=str(write_tokens(tmp_path)))
    train = dataclasses.replace(config.train, data=data, eval_tokens=512)
    small = Study(tmp_path / "s", dataclasses.replace(config, grid=grids, baseline_budget=base, train=train))
    small.folder.mkdir()
    small.check(on_this_machine=True)
    result = small.execute(Processes(2), lambda *_: None)
    assert result.complete, small.failed()
    axes = [(grid.architectures, grid.sizes or ("",), grid.budgets or (train.tokens,)) for grid in grids]
    expected = {group for axis in axes for group in product(*axis)}
    assert Counter((r.architecture, r.size) for r in result.rows) == Counter((a, size) for a, size, _ in expected)
    for row in result.rows:
        assert row.diverged == 0, row
        assert row.val_loss.mean < math.log(train.model.vocab_size), row  # better than a guess
    assert set(result.architectures) == {name for grid in grids for name in grid.architectures}
    shown = [line.split("|")[1].strip() for line in markdown(result).splitlines() if line.startswith("| ")]
    assert shown[2:] == [label(row.architecture) for row in result.rows]
