"""The real benchmarks, where they are at hand: ../shared/benchmarks, or ANGPT_BENCHMARKS."""

import math
from pathlib import Path

import pyarrow.parquet
import pytest
from rich.console import Console

from angpt.config import ModelConfig
from angpt.data.tokenizers import load_tokenizer
from angpt.evaluation import tasks
from angpt.evaluation.evaluate import Evaluator, Harness, How, Watch, evaluate_tasks
from angpt.evaluation.subjects import open_subject
from angpt.evaluation.tasks import PAPER, TASKS, choose, local_files
from tests.evaluation.material import BENCHMARKS, small_run

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason=f"no benchmarks in {BENCHMARKS}; set ANGPT_BENCHMARKS")

CHANCE = {"piqa": 1 / 2, "hellaswag": 1 / 4, "winogrande": 1 / 2, "mmlu": 1 / 4}
"""Of a model that knows nothing."""


def test_the_files_have_the_rows_that_the_table_expects() -> None:
    for task in TASKS.values():
        files = [path for splits in local_files(task, BENCHMARKS).values() for path in splits[task.split]]
        assert sum(pyarrow.parquet.read_metadata(path).num_rows for path in files) == task.samples, task.name
    assert len(tasks._subjects(TASKS["mmlu"])) == 57


def arc_chance() -> float:
    """Most questions have four answers, some three or five."""
    (file,) = local_files(TASKS["arc_easy"], BENCHMARKS)["arc_easy"]["test"]
    rows = pyarrow.parquet.read_table(file).to_pylist()
    return sum(1 / len(row["choices"]["text"]) for row in rows) / len(rows)


@pytest.mark.slow
def test_a_random_model_is_at_the_level_of_chance_on_every_sample(prepared: Path, tmp_path: Path) -> None:
    """Bytes as tokens, so that the logits cost little. Perplexities are those of guessing among all tokens.

    Four standard errors: one in 16,000 for each task, were the answers independent of the question's form.
    """
    config = ModelConfig(architecture="angpt", d_model=32, n_layers=1, n_heads=2, vocab_size=257, context=512)
    subject = open_subject(small_run(tmp_path / "random", prepared, config=config))
    watch = Watch(Console(quiet=True))
    evaluator = Evaluator(subject, How.choose("cpu", "fp32", None, None), watch)
    evaluate_tasks(evaluator, choose(PAPER), Harness(BENCHMARKS, None, watch), load_tokenizer(prepared))
    found = {result.origin.task: result for result in evaluator.results.tasks}
    for name, chance in (CHANCE | {"arc_easy": arc_chance()}).items():
        result = found[name]
        assert result.samples == TASKS[name].samples
        assert result.stderr == pytest.approx(math.sqrt(chance * (1 - chance) / result.samples), rel=0.1), name
        assert abs(result.value - chance) < 4 * result.stderr, f"{name}: {result.value} ± {result.stderr}"
    assert found["wikitext"].metrics["bits_per_byte"] == pytest.approx(math.log2(257), abs=0.3)
    assert found["lambada_openai"].metrics["acc"] < 0.01
