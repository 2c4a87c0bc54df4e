from collections.abc import Iterator
from pathlib import Path

import pytest

from angpt.evaluation import tasks
from tests.data.corpora import prepare, write_jsonl
from tests.evaluation.material import SUBJECTS, small_tasks, write_benchmarks


@pytest.fixture(scope="package")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens: bytes, and end-of-text."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_jsonl(folder / "text.jsonl", 30)
    prepare((str(source),), folder / "data", tokenizer="bytes", val_fraction=0.3)
    return folder / "data"


@pytest.fixture(scope="module")
def benchmarks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Small benchmarks, and the matching table of tasks."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval")
    subjects, known = tasks._subjects, dict(tasks.TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.setattr(tasks, "_subjects", lambda task: {k: v for k, v in subjects(task).items() if k in SUBJECTS})
        tasks.TASKS.update(small_tasks())
        yield write_benchmarks(tmp_path_factory.mktemp("benchmarks"))
        tasks.TASKS.update(known)
