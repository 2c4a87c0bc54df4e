"""Several models on several GPUs, tested with processes on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

from angpt.evaluation import evaluate, spread
from angpt.evaluation.results import read_results
from tests.command import call
from tests.evaluation.material import small_run


def test_each_process_has_its_part(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [small_run(tmp_path / name, prepared) for name in ("a", "b", "c")]
    arguments = ["eval", *map(str, folders), "--device", "cpu", "--limit", "2"]
    monkeypatch.setattr(spread, "gpus", lambda _: 2)
    monkeypatch.setattr(sys, "argv", ["angpt", *arguments])

    def not_here(*_: object) -> None:
        raise AssertionError("the others have done it")

    monkeypatch.setattr(evaluate, "losses", not_here)
    code, out, err = call(capsys, *arguments)
    assert code == 0, err
    assert out.count("known already") == 3
    for folder in folders:
        results = read_results(folder)
        assert results is not None
        assert len(results.losses) == 1


def test_parts_are_disjoint_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spread.own_part("abcde") is None
    found = []
    for i in range(3):
        monkeypatch.setenv(spread.PART, f"{i}/3")
        part = spread.own_part("abcde")
        assert part is not None
        found.append("".join(part))
    assert sorted("".join(found)) == list("abcde")
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert spread.gpus(torch.device("cpu")) == 0
