"""experiments/evidence/eight_bits.py: runs in pairs, and the table that compares them."""

import itertools
import math
import tarfile
from statistics import fmean

import pytest

pytest.importorskip("scipy", reason="the evidence needs the extra `report`")

from scipy import stats

from angpt.training.run import Run
from experiments.evidence import eight_bits, tokens
from experiments.evidence.protocol import Protocol
from experiments.evidence.queue import Queue, Speed, rehearsal
from tests.test_evidence import stored


def table(root):
    return eight_bits.table(root, Protocol((root,)).loss)


def test_runs_are_pairs_and_the_table_is_computed_from_them(tmp_path, monkeypatch):
    monkeypatch.setattr(eight_bits, "BATCHES", {"32M": 65_536})
    monkeypatch.setattr(eight_bits, "SEEDS", (0, 1))
    monkeypatch.setattr(eight_bits, "ARCHITECTURES", ("angpt", "gpt+"))
    tokens.make_up(tmp_path)
    queue = Queue(tmp_path / "runs", tmp_path / "evidence", rehearsal(tmp_path), Speed({}, 1e12))
    assert "not run yet" in table(tmp_path / "evidence").markdown()
    queue.run(1e9, tmp_path / "a.tar", stages=["fp8"])
    with tarfile.open(tmp_path / "a.tar") as tar:
        tar.extractall(tmp_path / "evidence", filter="data")

    runs = {path.name: Run(path) for path in (tmp_path / "runs" / "fp8").iterdir()}
    assert sorted(runs) == sorted(
        f"{a}-32M-{p}-s{s}" for a in ("angpt", "gpt+") for p in ("bf16", "fp8") for s in (0, 1)
    )
    loss = Protocol((tmp_path / "evidence",)).loss
    for architecture in ("angpt", "gpt+"):
        low, high = (runs[f"{architecture}-32M-{p}-s0"] for p in ("bf16", "fp8"))
        assert (low.config().precision, high.config().precision) == ("bf16", "fp8")
        pair = eight_bits.read_pair(tmp_path / "evidence", loss, architecture, "32M", 0)
        assert pair.losses == (low.summary().val_loss, high.summary().val_loss)
        assert pair.difference != 0
        ends = [[r["loss"] for r in run.records() if r["kind"] == "train"][-1] for run in (low, high)]
        assert pair.training == pytest.approx(ends[1] - ends[0])  # a tenth of five steps is one
        shares = [
            (max(values), name)
            for record in high.records()
            if record["kind"] == "fp8"
            for name, values in record.items()
            if name.endswith("_saturated")
        ]
        assert pair.saturated == (max(shares)[0], max(shares)[1].removesuffix("_saturated"))
    lines = table(tmp_path / "evidence").markdown().splitlines()
    assert [line.split(" | ")[2] for line in lines[2:]] == ["0", "1", "mean"] * 2
    assert f"{pair.losses[0]:.4f} | {pair.losses[1]:.4f}" in lines[5]


def made_up(*differences):
    return [eight_bits.Pair((3.5, 3.5 + x), x / 2, (0.0, "")) for x in differences]


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.004, -0.002, 0.001), "equal"),
        ((-0.01, 0.012, -0.004), "too noisy to tell"),
        ((0.004, 0.005, 0.004), "not equal"),  # small, but not by chance
        ((0.001, 0.04, 0.002), "not equal"),  # within two standard errors, but large
        ((-0.004, -0.005, -0.004), "not equal"),
    ],
)
def test_verdicts(differences, verdict):
    first, last = eight_bits._means(made_up(*differences))
    mean = sum(differences) / 3
    error = (sum((x - mean) ** 2 for x in differences) / 2 / 3) ** 0.5
    half = stats.t.ppf(0.975, 2) * error
    shown = f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}], ± {error:.4f}: {verdict}"
    assert first == shown.replace("-", "−")
    assert last == f"{mean / 2:+.4f} ± {error / 2:.4f}".replace("-", "−")


def test_a_run_that_diverged_in_8_bits_alone_is_not_equal():
    pairs = made_up(0.001, -0.001)
    assert eight_bits._means([*pairs, eight_bits.Pair((3.5, math.nan), 0.0, (0.0, ""))])[0] == (
        "1 of 3 diverged in fp8 alone: not equal"
    )
    assert eight_bits._means([*pairs, eight_bits.Pair((math.nan, math.nan), 0.0, (0.0, ""))])[0] == "no mean: diverged"


def test_the_last_tenth_of_what_is_stored():
    """Of 1,221 steps: step 1, every tenth, and the last, which would count as much as ten others."""
    run = [{"kind": "train", "step": s, "loss": float(s)} for s in (1, *range(10, 1221, 10), 1221)]
    assert eight_bits.last_tenth([*run, {"kind": "val", "step": 1221, "loss": 0.0}]) == fmean(range(1100, 1221, 10))
    assert eight_bits.last_tenth(run[:1]) == 1.0


def test_a_run_that_diverged_has_no_difference():
    cells = eight_bits._cells(eight_bits.Pair((3.5, float("nan")), 0.1, (0.25, "W_d_input")))
    assert cells == ("3.5000", "diverged", "", "", "0.25 (W_d_input)")


def test_runs_without_records_have_rows_all_the_same(tmp_path):
    for seed, precision in itertools.product((0, 1, 2), ("bf16", "fp8")):
        stored(tmp_path / "fp8", f"angpt-32M-{precision}-s{seed}", 3.5 + 0.001 * seed * (precision == "fp8"))
    rows = table(tmp_path).rows
    assert rows[0] == ("anGPT", "32M", "0", "3.5000", "3.5000", "+0.0000", "", "")
    assert rows[3][:3] == ("anGPT", "32M", "mean")
    assert rows[3][5].startswith("+0.0010 [")
    assert rows[3][6:] == ("", "")
