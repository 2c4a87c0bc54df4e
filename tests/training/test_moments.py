import statistics

import pytest
import torch

from angpt.bench.moments import bench_moments, tables
from angpt.bench.train import Case
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.launch import resume, start
from angpt.training.moments import MomentRecorder, default_interval, matrix_group
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from angpt.training.strategy import SingleProcess
from tests.training.conftest import Stops, all_tensors, parameters, small, without_timing


def recorded(run):
    return {r["step"]: r for r in Run.open(run).records() if r["kind"] == "moments"}


def test_a_record_is_the_variance_over_the_entries_of_each_matrix(data):
    model = build(small(data).model)
    optimizer = torch.optim.AdamW(model.parameters())
    rng = torch.Generator().manual_seed(0)
    for number, p in enumerate(model.parameters()):
        # Means far from zero, so that forgetting to subtract them would show.
        optimizer.state[p]["exp_avg"] = 1e-3 * number + 1e-4 * torch.randn(p.shape, generator=rng)
    moments = {name: SingleProcess().shard(optimizer.state[p]["exp_avg"]) for name, p in model.matrices().items()}
    recorder = MomentRecorder(moments, 5, SingleProcess().whole)
    recorder.note(5)
    [(step, values)] = recorder.drain()
    assert step == 5
    assert set(values) == {"W_e", "W_h", "W_qkv", "W_p", "W_uz", "W_d"}

    def slow(weight):
        return statistics.pvariance(optimizer.state[weight]["exp_avg"].flatten().tolist())

    for name in ("W_e", "W_h"):
        assert values[name] == pytest.approx(slow(getattr(model, name).weight), rel=1e-4)
    for name in ("W_qkv", "W_p", "W_uz", "W_d"):
        expected = [slow(getattr(block, name).weight) for block in model.blocks]
        assert values[name] == pytest.approx(expected, rel=1e-4)
    assert not list(recorder.drain())


def test_the_first_step_and_every_interval_are_recorded():
    recorder = MomentRecorder({"W_e.weight": SingleProcess().shard(torch.ones(2, 2))}, 5, SingleProcess().whole)
    for step in range(1, 17):
        recorder.note(step)
    assert [step for step, _ in recorder.drain()] == [1, 5, 10, 15]
    assert [default_interval(steps) for steps in (1, 300, 2000, 2001, 40_000)] == [10, 10, 10, 11, 200]


def test_names_of_matrices():
    assert matrix_group("blocks.11.W_uz.weight") == ("W_uz", 11)
    assert matrix_group("W_h.weight") == ("W_h", None)


def test_a_run_records_by_option_only_and_trains_the_same(data, tmp_path):
    for name, on in (("on", True), ("off", False)):
        start(small(data, record_moments=on), tmp_path / name, Quiet())
    assert list(recorded(tmp_path / "on")) == [1, 10]
    assert all(len(r["W_uz"]) == 2 and r["W_e"] > 0 for r in recorded(tmp_path / "on").values())
    assert not recorded(tmp_path / "off")
    assert parameters(Run.open(tmp_path / "on")) == parameters(Run.open(tmp_path / "off"))


def test_the_record_is_that_of_the_optimizer(data, tmp_path):
    """The run ends with step 10, whose first moments are in the last checkpoint."""
    start(small(data, record_moments=True, tokens="2560"), tmp_path / "run", Quiet())
    last = all_tensors(checkpoint.newest(tmp_path / "run" / "checkpoints"))
    record = recorded(tmp_path / "run")[10]
    assert record["W_h"] == pytest.approx(last["exp_avg/W_h.weight"].var(correction=0).item(), rel=1e-5)
    assert record["W_d"][1] == pytest.approx(last["exp_avg/blocks.1.W_d.weight"].var(correction=0).item(), rel=1e-5)


def test_a_resumed_run_leaves_the_same_records(data, tmp_path):
    config = small(data, record_moments=True)
    start(config, tmp_path / "whole", Quiet())
    # after the sixth step, between two records
    assert start(config, tmp_path / "halves", Stops(6)).status == "interrupted"
    assert resume(tmp_path / "halves", Quiet()).status == "finished"
    assert without_timing(Run.open(tmp_path / "halves")) == without_timing(Run.open(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.long
def test_recording_costs_under_one_percent_of_a_step():
    """For the laptop model, whose steps are the shortest; the best of three, since other load only makes it worse.
    It is 0.02 % on a quiet machine. `angpt bench moments` measures larger models."""
    cpu = torch.device("cpu")
    parts = []
    for _ in range(3):
        [found] = bench_moments(["angpt"], Case.parse("laptop:8"), 256, cpu, torch.float32, rounds=5)
        parts.append(found.overhead.mean)
    assert min(parts) < 0.01
    assert found.overhead.mean == pytest.approx(found.record_ms.mean / (10 * found.step_ms.mean), rel=1e-6)
    assert f"{found.step_ms.mean:.2f}" in tables([found])[0].rows[0]
