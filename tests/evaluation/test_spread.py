"""Several models on several GPUs, tested with processes on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

from angpt.cli.evaluation import evaluate as command
from angpt.evaluation import evaluate, spread
from angpt.evaluation.results import read_results
from tests.evaluation.material import small_run


def test_each_process_has_its_part(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [small_run(tmp_path / name, prepared) for name in ("a", "b", "c")]
    monkeypatch.setattr(spread, "gpus", lambda _: 2)
    monkeypatch.setattr(sys, "argv", ["a-script-of-ones-own.py", "--delete", "everything"])

    def not_here(*_: object) -> None:
        raise AssertionError("the others have done it")

    monkeypatch.setattr(evaluate, "losses", not_here)
    command(tuple(folders), data=(prepared,), device="cpu", limit=2)
    assert capsys.readouterr().out.count("known already") == 3
    for folder in folders:
        results = read_results(folder)
        assert results is not None
        assert [loss.limit for loss in results.losses] == [2]


def test_the_options_of_a_call_become_those_of_a_command() -> None:
    paths = Path("runs/a"), Path("runs/b c")
    found = spread.command_line(paths, data=(Path("d"), Path("e")), tasks=(), limit=None, batch_tokens=8, device="cpu")
    assert found == ["eval", "runs/a", "runs/b c", "--data", "d", "e", "--batch-tokens", "8", "--device", "cpu"]


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
