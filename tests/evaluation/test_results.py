import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from angpt.errors import UserError
from angpt.evaluation.requests import Origin, Scored
from angpt.evaluation.results import (
    Evaluated,
    LossResult,
    Results,
    TaskResult,
    lines,
    read_results,
    show,
    with_error,
    write_results,
)


def evaluated(name: str, weights: str = "0123456789abcdef0123") -> Evaluated:
    return Evaluated(name, "run", weights, 2048, 50304, None)


def task_result(name: str, value: float, metric: str = "acc", limit: int | None = None) -> TaskResult:
    origin = Origin(name, "d1gest", limit, "0.4.13", "t0ken")
    scored = Scored("w", "r", "bf16", "a GPU", 1.0, 0, 0)
    return TaskResult(origin, metric, value, 0.0123, {metric: value}, limit or 1838, scored)


def loss_result(loss: float, fingerprint: str = "same", limit: int | None = None, data: str = "data/x") -> LossResult:
    return LossResult(data, "val", fingerprint, limit, limit or 10, 100, loss, 0.01, 2.0, 1.1, "fp32", "a CPU", 1.0)


def results(name: str, loss: float, accuracy: float, perplexity: float) -> Results:
    tasks = task_result("piqa", accuracy), task_result("lambada_openai", perplexity, "perplexity")
    return Results(evaluated(name), (loss_result(loss),), tasks)


ONE = results("one", 3.0, 0.61, 40.5)
TWO = results("two", 3.1, 0.62, 30.5)


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    assert read_results(tmp_path) is None
    write_results(tmp_path, ONE)
    assert read_results(tmp_path) == ONE
    (tmp_path / "eval" / "results.json").write_text("{}")
    with pytest.raises(UserError, match=r"results.json: cannot be read"):
        read_results(tmp_path)


def test_a_new_result_takes_the_place_of_the_old() -> None:
    changed = ONE.with_task(task_result("piqa", 0.7)).with_loss(loss_result(2.0))
    assert [r.value for r in changed.tasks if r.origin.task == "piqa"] == [0.7]
    assert [r.loss for r in changed.losses] == [2.0]
    assert len(changed.tasks) == 2


def test_a_quick_check_and_the_full_result_are_both_kept() -> None:
    both = ONE.with_task(task_result("piqa", 0.5, limit=20)).with_loss(loss_result(2.0, limit=3))
    both = both.with_task(task_result("piqa", 0.7)).with_loss(loss_result(2.5))
    assert [both.task("piqa", limit).value for limit in (None, 20)] == [0.7, 0.5]  # type: ignore[union-attr]
    assert both.task("piqa", 10) is None
    shown = {(line.label, line.samples): line.values for line in lines([both]) if line.metric in ("acc", "loss")}
    assert shown == {
        ("data/x val, 3 windows", "100"): ((2.0, 0.01),), ("data/x val", "100"): ((2.5, 0.01),),
        ("PIQA", "20 of 1,838"): ((0.5, 0.0123),), ("PIQA", "1,838"): ((0.7, 0.0123),),
    }  # fmt: skip


def test_the_best_is_the_largest_accuracy_and_the_smallest_perplexity() -> None:
    found = {(line.label, line.metric): line for line in lines([ONE, TWO])}
    assert found["PIQA", "acc"].best == 1
    assert found["LAMBADA", "perplexity"].best == 1
    assert found["data/x val", "loss"].best == 0
    assert found["data/x val", "loss"].values == ((3.0, 0.01), (3.1, 0.01))
    assert {line.best for line in lines([ONE])} == {None}
    assert next(line for line in lines([ONE, ONE]) if line.label == "PIQA").best is None


def test_what_cannot_be_compared_stands_in_rows_of_its_own() -> None:
    other = dataclasses.replace(TWO, losses=(loss_result(3.1, "other"),), tasks=(task_result("piqa", 0.5, limit=20),))
    piqa = [line for line in lines([ONE, other]) if line.label == "PIQA"]
    assert [line.values for line in piqa] == [((0.61, 0.0123), None), (None, (0.5, 0.0123))]
    assert [line.samples for line in piqa] == ["1,838", "20 of 1,838"]
    losses = [line for line in lines([ONE, other]) if line.metric == "loss"]
    assert [line.values for line in losses] == [((3.0, 0.01), None), (None, (3.1, 0.01))]


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        ({"harness": "0.4.12"}, ("lm-eval 0.4.13", "lm-eval 0.4.12")),
        ({"data": "0ther-files"}, ("data d1gest", "data 0ther-")),
        ({"tokenizer": "other"}, ("tokenizer t0ken", "tokenizer other")),
    ],
)
def test_results_of_another_origin_are_marked_and_not_compared(change: dict[str, str], mark: tuple[str, str]) -> None:
    piqa, other = task_result("piqa", 0.61), task_result("piqa", 0.62)
    other = dataclasses.replace(other, origin=dataclasses.replace(other.origin, **change))
    found = lines([Results(evaluated("one"), tasks=(piqa,)), Results(evaluated("two"), tasks=(other,))])
    assert [line.label for line in found] == [f"PIQA, {words}" for words in mark]
    assert [line.values for line in found] == [((0.61, 0.0123), None), (None, (0.62, 0.0123))]
    assert {line.best for line in found} == {None}


def test_other_tokens_of_the_same_name_are_marked() -> None:
    other = dataclasses.replace(TWO, losses=(loss_result(3.1, "other1234"),), tasks=())
    labels = [line.label for line in lines([dataclasses.replace(ONE, tasks=()), other]) if line.metric == "loss"]
    assert labels == ["data/x val, tokens same", "data/x val, tokens other1"]


def test_the_same_tokens_under_another_path_stand_in_one_row() -> None:
    moved = dataclasses.replace(TWO, losses=(loss_result(3.1, data="/home/me/data/x"),), tasks=())
    (found,) = [line for line in lines([ONE, moved]) if line.metric == "loss"]
    assert (found.label, found.values) == ("data/x val", ((3.0, 0.01), (3.1, 0.01)))
    assert ONE.with_loss(moved.losses[0]).losses == moved.losses


def test_numbers_read_well() -> None:
    assert with_error((0.61234, 0.01136)) == "0.6123 ± 0.0114"
    assert with_error((36.9154, None)) == "36.915"
    assert with_error((368672.8793, 270.5)) == "368672.88 ± 270.50"
    assert with_error((1.234e10, 2.6e9)) == "1.23e+10 ± 2.6e+09"
    assert with_error(None) == "–"


def test_columns_are_told_apart_and_never_broken() -> None:
    same = dataclasses.replace(TWO, model=evaluated("one", "fedcba9876543210"))
    shown = io.StringIO()
    show(
        [ONE, same, dataclasses.replace(TWO, model=evaluated("a-very-long-name-of-a-run" * 4))],
        Console(file=shown, width=40),
    )
    text = shown.getvalue()
    assert "one (run, 012345)" in text
    assert "one (run, fedcba)" in text
    assert "one (run, fedcba): weights fedcba9876543210" in " ".join(text.split())
    piqa = next(line for line in text.splitlines() if "PIQA" in line)
    assert " ".join(piqa.split()) == "PIQA acc ↑ 1,838 0.6100 ± 0.0123 0.6200 ± 0.0123 0.6200 ± 0.0123"
