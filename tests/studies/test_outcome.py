import pytest

from angpt.studies.outcome import markdown
from tests.studies.conftest import ONE, pretend
from tests.studies.test_summarise import chosen, summarised


def test_diverged_runs_are_data(make):
    study = make(("lrs = [", "seeds = [0, 1, 2]\nlrs = ["), *ONE[1:])
    for job in study.jobs():
        lr, seed, variant = job.config.optimizer.lr, job.config.seed, job.config.model.architecture
        lost = (variant == "angpt" and lr > 0.01) or (variant == "gpt+" and lr > 0.06 and seed == 1)
        pretend(job, "diverged" if lost else "finished", None if lost else 2 + abs(lr - 0.05) + 0.001 * seed)
    gpt, ours = study.result().rows
    assert (gpt.lr, gpt.lr_side, gpt.diverged, gpt.val_loss.n) == (0.016, 0, 0, 3)  # 0.064 lost a seed
    assert (ours.lr, ours.lr_side) == (0.004, -1)
    for job in study.jobs():
        pretend(job, "diverged", None)
    gpt, ours = study.result().rows
    assert (gpt.val_loss, gpt.diverged, gpt.seeds, ours.change) == (None, 3, 3, None)
    assert "| anGPT | diverged (3 of 3 seeds) |" in markdown(study.result())
    assert study.result().complete


def test_changes_are_relative_to_a_budget_of_the_baseline(make):
    study = make(
        ('budgets = ["2048"]', 'budgets = ["1k", "2k", "4k"]'),
        ('baseline = "gpt+"', 'baseline = "gpt+"\nbaseline_budget = "2000"'),
        ("lrs = [0.004, 0.016, 0.064]", "lrs = [0.004]"),
        *ONE[1:],
    )
    for job in study.jobs():
        pretend(job, val_loss={"1000": 3.0, "2000": 2.0, "4000": 1.0}[job.config.tokens])
    changes = {(r.architecture, r.budget): r.change and r.change.mean for r in study.result().rows}
    assert changes == pytest.approx(
        {("gpt+", "1k"): 0.5, ("gpt+", "2k"): None, ("gpt+", "4k"): -0.5}
        | {("angpt", "1k"): 0.5, ("angpt", "2k"): 0.0, ("angpt", "4k"): -0.5}
    )


def test_the_file_explains_intervals_where_there_are_some():
    several = markdown(summarised(chosen("gpt+", 1, 3.0, 3.1), chosen("angpt", 1, 2.9)))
    assert "pooled over the rows of a size except those that vary far more." in several
    single = markdown(summarised(chosen("gpt+", 1, 3.0), chosen("angpt", 1, 2.9)))
    assert "Changes are relative to GPT+.\n" in single
