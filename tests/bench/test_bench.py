"""Statistics of `angpt bench`, and a run of each command on the CPU."""

import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import angpt.fast
from angpt.bench import optimizer
from angpt.bench.measure import between, in_turns, median, orders, ratio
from angpt.bench.train import GROUPS, PARTS, Case, grouped, record_alike
from angpt.cli.main import main
from angpt.config import PRESETS, ModelConfig, OptimizerConfig, TrainConfig
from angpt.constraints import largest_violation
from angpt.errors import UserError
from angpt.models.variants import build
from angpt.stats import Interval
from tests.intervals import check_intervals


def test_turns_are_taken_in_all_orders():
    assert sorted(map("".join, orders("abc", 6))) == ["abc", "acb", "bac", "bca", "cab", "cba"]
    assert [order[0] for order in orders("abcde", 20)].count("c") == 4
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    seconds = in_turns(functions, torch.device("cpu"), rounds=2, calls=2)
    assert "".join(calls) == "aabbccccbbaa"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2, "c": 2}


def test_median_and_quartiles():
    assert median([5.0, 1.0, 3.0, 2.0, 4.0]) == Interval(3.0, 2.0, 4.0)
    assert median([2.0]).times(1e3) == Interval(2000.0, 2000.0, 2000.0)


def test_drift_cancels_in_a_ratio_of_rounds():
    drift = np.exp(np.random.default_rng(0).normal(0, 0.3, 40))
    found = ratio((1.02 * drift).tolist(), drift.tolist())
    assert (found.mean, found.low, found.high) == pytest.approx((1.02, 1.02, 1.02))


@pytest.mark.parametrize("rounds", [3, 20])
def test_an_interval_of_a_ratio_covers_the_truth(rounds):
    rng = np.random.default_rng(1)
    trials = []
    for _ in range(100):
        a, b = 1.05 * rng.normal(1, 0.02, rounds), rng.normal(1, 0.02, rounds)
        trials.append([ratio(a.tolist(), b.tolist())])
    check_intervals(trials, [1.05], hits=88)


def test_one_round_gives_no_interval():
    assert (ratio([2.0], [1.0]).mean, ratio([2.0], [1.0]).low) == (pytest.approx(2.0), None)
    assert between(ratio([2.0], [1.0]), ".1f") == ("2.0", "")


def test_precisions_take_turns(tmp_path):
    out = tmp_path / "bench.json"
    options = ["--precision", "bf16", "fp8", "--context", "16", "--rounds", "2", "--steps", "1", "--device", "cpu"]
    main(["bench", "train", "laptop:2", "--architectures", "angpt", "ngpt", *options, "--out", str(out)])
    results = json.loads(out.read_text())["results"]
    assert [r["architecture"] for r in results] == ["angpt bf16", "angpt fp8", "ngpt bf16", "ngpt fp8"]
    assert results[0]["ratio"]["value"] == 1.0
    assert results[1]["step_ms"]["value"] > 0


def test_cases():
    assert Case.parse("0.5B:8") == Case("0.5B", 8, 8)
    assert Case.parse("0.5B:128/16") == Case("0.5B", 128, 16)
    assert Case.parse("laptop:8") == Case("laptop", 8, 8)
    for text in ("0.5B", "0.5B:0", "0.5B:x", "32M:8/3", "32M:8/0", "32M:8/"):
        with pytest.raises(UserError, match="SIZE:SEQUENCES"):
            Case.parse(text)


def test_bytes_of_an_optimizer_step():
    """A matrix in bf16: gradient read twice, three fp32 tensors read and written, the copy written."""
    model = build(ModelConfig(d_model=32, n_layers=1, n_heads=2, vocab_size=64, context=16))
    matrices = sum(p.numel() for p in model.matrices().values())
    vectors = model.parameter_count() - matrices
    adam, muon = OptimizerConfig(), OptimizerConfig(name="muon")
    assert optimizer.floor_bytes(model, adam, low_precision=True) == matrices * (2 + 2 + 24 + 2) + vectors * (8 + 24)
    assert optimizer.floor_bytes(model, adam, low_precision=False) == model.parameter_count() * 32
    hidden = 16 * 32**2  # q, k, v, p of 32 × 32; u, z, d of 32 × 128
    saved = optimizer.floor_bytes(model, adam, True) - optimizer.floor_bytes(model, muon, True)
    assert saved == hidden * (16 - 8 - 4)  # the second moment, less an update in bf16, written and read
    square, rectangular = 5 * (3 * 32**3 + 32**3), 3 * 3 * 32**2 * 128 + (5 + 2 * 3) * 32**3
    products = 4 * square + 3 * rectangular
    assert (optimizer.floor_flops(model, adam), optimizer.floor_flops(model, muon)) == (0, products)


def test_optimizer_steps_on_the_cpu(tmp_path, capsys, monkeypatch, recwarn):
    """The tables have the parts of the floor; PyTorch's optimizers apply every constraint of the model."""
    monkeypatch.setitem(PRESETS, "tiny", {"model": {"d_model": 32, "n_layers": 1, "n_heads": 2}})
    out, names = tmp_path / "bench.json", ["angpt", "angpt:muon"]
    main(["bench", "optimizer", "--size", "tiny", "--architectures", *names, "--rounds", "1", "--out", str(out),
          "--device", "cpu"])  # fmt: skip
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("GFLOP/s", "GB/s", "÷ floor", "memory, GB", "products, TFLOP"))
    for name, found in zip(names, json.loads(out.read_text())["results"], strict=True):
        train = TrainConfig(model=ModelConfig.size("tiny")).with_recipe(name)
        model = build(train.model)
        assert found["architecture"] == name
        assert found["gigabytes"] == optimizer.floor_bytes(model, train.optimizer, low_precision=False) / 1e9
        assert found["teraflops"] == optimizer.floor_flops(model, train.optimizer) / 1e12
        assert (found["products_ms"] > 0) == (name == "angpt:muon")
        for p in model.parameters():
            p.data.mul_(10)
            p.grad = torch.zeros_like(p)
        optimizer.torch_step(model, train.optimizer)()
        assert largest_violation(model, model.constraints()) < 1e-5
    assert not [w for w in recwarn if "left as they are" in str(w.message)]


def test_training_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "bench.json"
    options = ["--context", "16", "--rounds", "2", "--steps", "1", "--device", "cpu", "--profile", "3"]
    main(["bench", "train", "32M:1", "--architectures", "gpt+", "angpt", *options, "--out", str(out)])
    assert "÷ gpt+" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["environment"]["torch"] == torch.__version__
    gpt, an = record["results"]
    assert gpt["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert an["architecture"] == "angpt"
    assert set(an["parts_ms"]) == set(PARTS)
    assert an["tokens_per_s"] == pytest.approx(16e3 / an["step_ms"]["value"])
    assert len(an["kernels"]) == 3
    assert an["groups_ms"]["all"] >= an["groups_ms"]["matrix products"] > 0


def test_kernels_are_grouped_by_what_they_are_for():
    kernels = [
        ("nvjet_sm90_x", 2, 3.0),
        ("cudnn_y", 1, 2.0),
        ("_step_rows", 1, 1.0),
        ("triton_poi_fused", 4, 0.5),
        ("z", 1, 0.25),
    ]
    found = grouped(kernels)
    assert {name: ms for name, ms in found.items() if ms} == {
        "matrix products": 3.0, "attention": 2.0, "optimizer": 1.0, "compiled": 0.5, "other": 0.25, "all": 6.75
    }  # fmt: skip
    assert grouped([]) == {}


def test_each_pattern_of_our_kernels_matches_one():
    sources = (path.read_text(encoding="utf-8") for path in Path(angpt.fast.__file__).parent.glob("*.py"))
    kernels = [name for source in sources for name in re.findall(r"@triton\.jit\ndef (_\w+)", source)]
    for pattern in GROUPS.values():
        start, _, names = pattern.split("|multi")[0].partition("^_")
        for name in names.strip("()").split("|") if not start and names else ():
            assert any(kernel.startswith(f"_{name}") for kernel in kernels), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "9B:1"], "unknown size '9B'"),
        (["train", "32M:1", "--rounds", "0"], "--rounds 0"),
        (["train", "32M:1", "--architectures", "gtp+"], "gpt+"),
        (["optimizer", "--size", "33M"], "32M"),
        (["data", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments, "--device", "cpu"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("launch_bound", "recorded"), [((False, False), 0), ((False, True), 2), ((True, False), 2)])
def test_all_passes_are_graphs_or_none(launch_bound, recorded):
    subjects = [mock.Mock(**{"engine.launch_bound.return_value": value}) for value in launch_bound]
    record_alike(subjects)
    assert sum(subject.engine.record.call_count for subject in subjects) == recorded
