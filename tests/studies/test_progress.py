import pytest

from angpt.studies.jobs import note_failure
from angpt.studies.progress import gpu_hours, progress, seconds_left
from angpt.training.run import Run
from tests.command import angpt
from tests.studies.conftest import ONE, pretend


def test_the_plan_counts_flops(make, capsys):
    study = make()
    code, said = angpt(
        capsys, "study", "plan", study.folder.with_suffix(".toml"), "--out", study.folder, "--tflops", "2e-9"
    )
    flops = sum(job.plan.flops_per_token * 2048 for job in study.jobs())
    assert code == 0
    assert f"24 of 24 runs to do: {flops:.3g} FLOPs, {flops / 2000 / 3600:,.0f} GPU hours at 2e-09 TFLOP/s" in said
    said = angpt(capsys, "study", "plan", study.folder.with_suffix(".toml"), "--out", study.folder)[1]
    assert f"24 of 24 runs to do: {flops:.3g} FLOPs (evaluation and compiling not counted)" in said
    assert "GPU" not in said  # its file says device = "cpu"
    assert not study.folder.exists()
    assert gpu_hours(3.6e15 * 125, 125) == 1


def test_the_time_left_is_that_of_the_rates_measured(make):
    study = make(*ONE[1:])
    jobs = study.jobs()
    for job in jobs:
        if job.config.optimizer.lr != 0.064:
            pretend(job, seconds=10.0 if job.config.model.architecture == "gpt+" else 20.0)
    assert seconds_left(progress(study)) == pytest.approx(30)
    for job in jobs:
        if job.config.model.architecture == "gpt+":
            pretend(job, seconds=10.0)
    assert seconds_left(progress(study)) == pytest.approx(20)
    assert seconds_left(progress(make(("2048", "4096")))) is None


def test_status_tells_what_runs(make, capsys):
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    first, second, third = study.jobs()
    pretend(first)
    pretend(second, "interrupted")
    note_failure(third, "lightning\nstruck")
    with Run(second.folder).lock():
        said = angpt(capsys, "study", "status", study.folder)[1]
    assert f"{first.folder.name} finished 100%" in said
    assert f"{second.folder.name} running" in said
    assert f"failed: {third.folder.name}: lightning" in said
    assert f"{second.folder.name} stopped" in angpt(capsys, "study", "status", study.folder)[1]


def test_many_runs_are_told_in_groups(make, capsys):
    study = make(("lrs = [", "seeds = [0, 1, 2]\nlrs = ["))
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    first = [job for job in study.jobs() if job.folder.name.startswith("gpt+-a-")]
    for job in first[:7]:
        pretend(job)
    said = angpt(capsys, "study", "status", study.folder)[1]
    assert "GPT+ 6.1k 18 11 waiting, 7 finished 39%" in said
    assert "72 runs: 65 waiting, 7 finished" in said


def test_damaged_summaries_are_named(make, capsys):
    study = make(*ONE)
    study.begin(study.folder.with_suffix(".toml"), "", on_this_machine=True)
    job = study.jobs()[0]
    pretend(job)
    (job.folder / "summary.json").write_text('{"status": "fini')
    code, said = angpt(capsys, "study", "status", study.folder)
    assert code == 2
    assert f"{job.folder}/summary.json: cannot be read" in said
