"""The tasks of the paper's table, by the definitions of lm-evaluation-harness, from the hub or from a local folder."""

import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from angpt.errors import UserError, nearest

FORMS = ("{}.parquet", "{}-*.parquet")
"""Patterns of the file names of a split."""


@dataclass(frozen=True)
class Task:
    """A task, the metric that the table shows, and its number of documents."""

    name: str
    """Name in the harness and for `--tasks`."""
    label: str
    metric: str
    """Name of the metric in the harness."""
    samples: int
    split: Literal["validation", "test"]
    folder: str
    """Its folder inside a local folder of benchmarks."""
    config: str
    """Its definition, relative to lm_eval/tasks."""

    @property
    def higher(self) -> bool:
        return self.metric == "acc"


TASKS = {
    task.name: task
    for task in (
        Task("piqa", "PIQA", "acc", 1_838, "validation", "piqa", "piqa/piqa.yaml"),
        Task("arc_easy", "ARC-Easy", "acc", 2_376, "test", "arc_easy", "arc/arc_easy.yaml"),
        Task("arc_challenge", "ARC-Challenge", "acc", 1_172, "test", "arc_challenge", "arc/arc_challenge.yaml"),
        Task("hellaswag", "HellaSwag", "acc", 10_042, "validation", "hellaswag", "hellaswag/hellaswag.yaml"),
        Task("lambada_openai", "LAMBADA", "perplexity", 5_153, "test", "lambada_openai", "lambada/lambada_openai.yaml"),
        Task("wikitext", "WikiText", "word_perplexity", 62, "test", "wikitext2", "wikitext/wikitext.yaml"),
        Task("winogrande", "WinoGrande", "acc", 1_267, "validation", "winogrande", "winogrande/default.yaml"),
        Task("mmlu", "MMLU", "acc", 14_042, "test", "mmlu", "mmlu/default/_mmlu.yaml"),
    )
}
"""Tasks in the order of the paper's table, which lacks ARC-Challenge."""
PAPER = tuple(name for name in TASKS if name != "arc_challenge")


def choose(names: Sequence[str]) -> list[Task]:
    """Tasks by name, in the order of the table; `paper` stands for those of the paper."""
    for name in names:
        if name not in (*TASKS, "paper"):
            raise UserError(f"unknown task {name!r}: {nearest(name, [*TASKS, 'paper'])}")
    wanted = {*names, *(PAPER if "paper" in names else ())}
    return [task for name, task in TASKS.items() if name in wanted]


def is_benchmarks(path: Path) -> bool:
    """True if a folder holds the data of any task."""
    return any((path / task.folder).is_dir() for task in TASKS.values())


def local_files(task: Task, data: Path) -> dict[str, dict[str, list[str]]]:
    """The local files of a task, by part (a subject of MMLU, otherwise the task) and by split."""
    folder = data / task.folder
    if not folder.is_dir():
        there = [name for name, other in TASKS.items() if (data / other.folder).is_dir()]
        advice = f"choose among {' '.join(there)} with --tasks" if there else "docs/evaluation.md shows the layout"
        raise UserError(f"{folder}: does not exist, so there is no data for {task.name}; {advice}")
    if task.name != "mmlu":
        return {task.name: {task.split: _split(folder, task.split)}}
    return {name: {split: _split(folder / name, split) for split in ("test", "dev")} for name in _subjects(task)}


def data_digest(task: Task, data: Path | None) -> str:
    """Digest of the contents of a task's files; `hub` if they come from the hub."""
    if data is None:
        return "hub"
    found = {
        part: {split: [hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in paths] for split, paths in of.items()}
        for part, of in local_files(task, data).items()
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def harness_version() -> str:
    return version("lm_eval")


def write_configs(task: Task, data: Path | None, folder: Path) -> None:
    """Write task files for the harness: each includes a built-in one and names the local data, if any.

    The harness reads only these, since searching all of its tasks takes longer than most evaluations.
    """
    configs = {task.name: _root() / task.config}
    if task.name == "mmlu":
        groups = sorted((_root() / task.config).parent.glob("_mmlu*.yaml"))
        configs = _subjects(task) | {path.stem: path for path in groups}
    files = {} if data is None else local_files(task, data)
    for name, include in configs.items():
        change = {} if name not in files else {
            # Explicit parquet files: `datasets` reads a folder differently depending on its other files.
            "dataset_path": "parquet",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files[name]},
            # The splits of few-shot examples need not exist.
            "training_split": None,
            "validation_split": "validation" if task.split == "validation" else None,
        }  # fmt: skip
        # JSON is valid YAML and needs no rules for quoting.
        (folder / f"{name}.yaml").write_text(json.dumps({"include": str(include), **change}), encoding="utf-8")


def _split(folder: Path, split: str) -> list[str]:
    paths = sorted(str(path.resolve()) for form in FORMS for path in folder.glob(form.format(split)))
    if not paths:
        raise UserError(f"{folder}: has no {split}.parquet; docs/evaluation.md shows the layout")
    return paths


def _root() -> Path:
    """The folder of the harness' tasks, found without importing the harness, which takes seconds."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
    return Path(spec.origin).parent / "tasks"


def _subjects(task: Task) -> dict[str, Path]:
    """The built-in files of MMLU's subjects, by the name of their data set."""
    found = {}
    for path in sorted((_root() / task.config).parent.glob("mmlu_*.yaml")):
        name = re.search(r'^"?dataset_name"?:\s*"?(\w+)"?', path.read_text(encoding="utf-8"), re.MULTILINE)
        assert name is not None, f"{path}: no dataset_name"
        found[name[1]] = path
    return found
