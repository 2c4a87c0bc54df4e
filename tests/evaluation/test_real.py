"""The real benchmarks, if available: ../shared/benchmarks, or ANGPT_BENCHMARKS."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from angpt.config import ModelConfig
from angpt.data.tokenizers import load_tokenizer
from angpt.evaluation import tasks
from angpt.evaluation.evaluate import Display, Evaluator, Harness, Settings, evaluate_tasks
from angpt.evaluation.subjects import open_subject
from angpt.evaluation.tasks import PAPER, TASKS, choose, local_files
from tests.evaluation.material import BENCHMARKS, small_run

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason=f"no benchmarks in {BENCHMARKS}; set ANGPT_BENCHMARKS")


def test_the_files_have_the_rows_that_the_table_expects() -> None:
    for task in TASKS.values():
        files = [path for splits in local_files(task, BENCHMARKS).values() for path in splits[task.split]]
        assert sum(pyarrow.parquet.read_metadata(path).num_rows for path in files) == task.samples, task.name
    assert len(tasks._subjects(TASKS["mmlu"])) == 57


def rows(name: str) -> list[dict[str, Any]]:
    files = [path for splits in local_files(TASKS[name], BENCHMARKS).values() for path in splits[TASKS[name].split]]
    return [row for path in files for row in pyarrow.parquet.read_table(path).to_pylist()]


def chances() -> dict[str, tuple[float, float]]:
    """The range of scores of a model without knowledge.

    On MMLU, whose answers are the letters A to D for every question, it has a favourite among them, and scores as often
    as that one is right.
    """
    arc = [1 / len(row["choices"]["text"]) for row in rows("arc_easy")]  # most have four answers, some three or five
    letters = [count / TASKS["mmlu"].samples for count in Counter(row["answer"] for row in rows("mmlu")).values()]
    even = {"piqa": 1 / 2, "arc_easy": sum(arc) / len(arc), "hellaswag": 1 / 4, "winogrande": 1 / 2}
    return {name: (chance, chance) for name, chance in even.items()} | {"mmlu": (min(letters), max(letters))}


@pytest.mark.slow
@pytest.mark.long
def test_a_random_model_is_at_the_level_of_chance_on_every_sample(prepared: Path, tmp_path: Path) -> None:
    """Bytes as tokens, so that the logits cost little. Perplexities are those of guessing among all tokens.

    Four standard errors, since such a model is not quite without an opinion: it takes the shorter of two answers.
    """
    config = ModelConfig(architecture="angpt", d_model=32, n_layers=1, n_heads=2, vocab_size=257, context=512)
    subject = open_subject(small_run(tmp_path / "random", prepared, config=config))
    display = Display(progress=False)
    evaluator = Evaluator(subject, Settings.choose("cpu", "fp32", None, None), display)
    evaluate_tasks(evaluator, choose(PAPER), Harness(BENCHMARKS, None, display), load_tokenizer(prepared))
    found = {result.origin.task: result for result in evaluator.results.tasks}
    assert list(found) == list(PAPER)
    for name, (low, high) in chances().items():
        result = found[name]
        assert result.samples == TASKS[name].samples
        assert result.stderr == pytest.approx(math.sqrt(low * (1 - low) / result.samples), rel=0.1), name
        assert low - 4 * result.stderr < result.value < high + 4 * result.stderr, f"{name}: {result.value}"
    assert found["wikitext"].metrics["bits_per_byte"] == pytest.approx(math.log2(257), abs=0.3)
    assert found["lambada_openai"].metrics["acc"] < 0.01
