from pathlib import Path

import numpy as np
import pytest

from angpt.errors import UserError
from angpt.evaluation.requests import Origin, Requests, Scored, Scores

ORIGIN = Origin("piqa", "d1ge57", None, "0.4.13", "f1nger")
PAIRS = [([1, 2, 3], [4]), ([1, 2, 3], [5, 6]), ([7], [8])]


@pytest.mark.parametrize("largest", [9, 70_000])
def test_requests_come_back_as_they_were(tmp_path: Path, largest: int) -> None:
    pairs = [*PAIRS, ([9], [largest])]
    requests = Requests.of(ORIGIN, 3, pairs)
    requests.save(tmp_path / "piqa.safetensors")
    again = Requests.load(tmp_path / "piqa.safetensors")
    assert [(list(a), list(b)) for a, b in again.pairs] == pairs
    assert (again.origin, again.samples, again.max_token) == (ORIGIN, 3, largest)
    assert again.digest == requests.digest
    assert len(again.contexts) == 3  # one is shared


def test_a_digest_tells_where_a_context_ends() -> None:
    digests = {Requests.of(ORIGIN, 1, [pair]).digest for pair in (([1, 2], [3]), ([1], [2, 3]), ([1, 2], [4]))}
    assert len(digests) == 3


def test_an_empty_text_is_a_request(tmp_path: Path) -> None:
    requests = Requests.of(ORIGIN, 2, [([256], []), ([256], [1])])
    requests.save(tmp_path / "x")
    assert [list(b) for _, b in Requests.load(tmp_path / "x").pairs] == [[], [1]]


def test_scores_come_back_as_they_were(tmp_path: Path) -> None:
    scored = Scored("we1ghts", "r3quests", "bf16", "H200", 1.5, 2, 3)
    scores = Scores(scored, np.array([-1.25, -1e-17, -300.1]), np.array([True, False, True]))
    scores.save(tmp_path / "deep" / "scores.safetensors")
    again = Scores.load(tmp_path / "deep" / "scores.safetensors")
    assert again.scored == scored
    assert again.logprob.tolist() == scores.logprob.tolist()
    assert again.greedy.tolist() == scores.greedy.tolist()


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "piqa.safetensors"
    if damage == "cut":
        Requests.of(ORIGIN, 3, PAIRS).save(path)
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "other":
        Scores(Scored("w", "r", "fp32", "cpu", 1.0, 0, 0), np.zeros(1), np.ones(1, bool)).save(path)
    with pytest.raises(UserError, match=r"piqa.safetensors: cannot be read .*delete it and create it again"):
        Requests.load(path)
