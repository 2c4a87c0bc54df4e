import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from angpt.errors import UserError
from angpt.evaluation.tasks import PAPER, TASKS, choose, data_digest, is_benchmarks, local_files, write_configs

pytest.importorskip("lm_eval")


@pytest.fixture
def copy(benchmarks: Path, tmp_path: Path) -> Path:
    """Small benchmarks that a test may damage."""
    return Path(shutil.copytree(benchmarks, tmp_path / "copy"))


def test_the_table_of_the_paper() -> None:
    assert [TASKS[name].label for name in PAPER] == [
        "PIQA", "ARC-Easy", "HellaSwag", "LAMBADA", "WikiText", "WinoGrande", "MMLU"
    ]  # fmt: skip
    assert choose(["paper"]) == [TASKS[name] for name in PAPER]
    assert choose(["mmlu", "piqa"]) == [TASKS["piqa"], TASKS["mmlu"]]
    with pytest.raises(UserError, match=r"unknown task 'hellswag': did you mean hellaswag"):
        choose(["piqa", "hellswag"])


def test_files_may_be_numbered_and_are_taken_in_order(copy: Path) -> None:
    file = copy / "piqa" / "validation.parquet"
    for number in (1, 0):
        shutil.copy(file, file.with_name(f"validation-0000{number}-of-00002.parquet"))
    file.unlink()
    names = [Path(p).name for p in local_files(TASKS["piqa"], copy)["piqa"]["validation"]]
    assert names == ["validation-00000-of-00002.parquet", "validation-00001-of-00002.parquet"]


def test_a_folder_without_the_task_says_what_is_there(copy: Path) -> None:
    shutil.rmtree(copy / "piqa")
    with pytest.raises(UserError, match=r"piqa: does not exist.*choose among arc_easy .* with --tasks"):
        local_files(TASKS["piqa"], copy)
    (copy / "wikitext2" / "test.parquet").unlink()
    with pytest.raises(UserError, match=r"wikitext2: has no test.parquet"):
        local_files(TASKS["wikitext"], copy)
    shutil.rmtree(copy / "mmlu" / "virology")
    with pytest.raises(UserError, match=r"virology: has no test.parquet"):
        local_files(TASKS["mmlu"], copy)
    assert is_benchmarks(copy)
    assert not is_benchmarks(copy / "mmlu")


def test_the_digest_is_of_the_contents(copy: Path, benchmarks: Path) -> None:
    task = TASKS["piqa"]
    assert data_digest(task, copy) == data_digest(task, benchmarks)
    file = copy / "piqa" / "validation.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(1), file)
    assert data_digest(task, copy) != data_digest(task, benchmarks)
    assert data_digest(task, None) == "hub"


def test_data_that_is_not_whole_is_refused(copy: Path) -> None:
    from angpt.evaluation.harness import Built

    file = copy / "piqa" / "validation.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(file).slice(1), file)
    with pytest.raises(UserError, match=r"piqa: 6 samples in .*piqa, but the task has 7; the data is incomplete"):
        Built(TASKS["piqa"], copy, None)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"piqa: .*piqa cannot be read .*is it complete"):
        Built(TASKS["piqa"], copy, None)


def test_from_the_hub_the_built_in_tasks_are_taken_as_they_are(tmp_path: Path) -> None:
    write_configs(TASKS["winogrande"], None, tmp_path)
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert list(written) == ["include"]
    assert written["include"].endswith("winogrande/default.yaml")
    assert Path(written["include"]).exists()


def test_the_hub_out_of_reach_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from angpt.evaluation.harness import Built

    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"piqa: the hub cannot be read \(ConnectionError: Couldn't reach the Hub\);"):
        Built(TASKS["piqa"], None, None)
