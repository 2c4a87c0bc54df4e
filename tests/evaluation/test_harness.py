"""Equality with lm-evaluation-harness and its own `hf` backend, on an export, without angpt."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from angpt.data.tokenizers import load_tokenizer
from angpt.evaluation.evaluate import Display, Evaluator, Harness, Settings, evaluate_tasks
from angpt.evaluation.results import Results
from angpt.evaluation.subjects import open_subject
from angpt.evaluation.tasks import PAPER, TASKS, choose, write_configs
from angpt.inference import store
from angpt.inference.hf import export
from angpt.inference.source import open_source
from tests.evaluation.material import CONFIG, small_run

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

ARCHITECTURES = ("gpt+", "ngpt", "angpt")
CONTEXT = 72
"""Short enough that some requests are cut."""

HF_BACKEND = """
import json, sys
sys.modules["angpt"] = None  # an import of it is an error now
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

configs, tasks, *exports = sys.argv[1:]
manager = TaskManager(include_defaults=False, include_path=configs)
found = {}
for path in exports:
    model = HFLM(pretrained=path, trust_remote_code=True, dtype="float32", batch_size=3, device="cpu")
    results = simple_evaluate(model, tasks=tasks.split(","), task_manager=manager, bootstrap_iters=2)["results"]
    found[path] = {
        task: {k.partition(",")[0]: v for k, v in results[task].items() if "," in k and not isinstance(v, str)}
        for task in tasks.split(",")
    }
print("RESULTS " + json.dumps(found))
"""


@pytest.fixture(scope="module")
def runs(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    configs = {name: dataclasses.replace(CONFIG, architecture=name, context=CONTEXT) for name in ARCHITECTURES}
    return {name: small_run(folder / name.replace("+", "plus"), prepared, config=c) for name, c in configs.items()}


@pytest.fixture(scope="module")
def exports(runs: dict[str, Path]) -> dict[str, Path]:
    for path in runs.values():
        export(open_source(path), path.with_name(f"{path.name}-hf"))
    return {name: path.with_name(f"{path.name}-hf") for name, path in runs.items()}


@pytest.fixture(scope="module")
def theirs(
    exports: dict[str, Path], benchmarks: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics by architecture and task."""
    configs = tmp_path_factory.mktemp("configs")
    for task in choose(PAPER):
        write_configs(task, benchmarks, configs)
    quiet = {"HF_HOME": str(tmp_path_factory.mktemp("hf")), "DISABLE_MULTIPROC": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", HF_BACKEND, str(configs), ",".join(PAPER), *map(str, exports.values())]
    made = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | quiet)
    assert made.returncode == 0, made.stderr[-3000:]
    line = next(line for line in made.stdout.splitlines() if line.startswith("RESULTS "))
    found = json.loads(line.removeprefix("RESULTS "))
    return {name: found[str(path)] for name, path in exports.items()}


def evaluated(path: Path, benchmarks: Path) -> Results:
    display = Display(progress=False)
    subject = open_subject(path)
    evaluator = Evaluator(subject, Settings.choose("cpu", "fp32", 500, None), display)
    evaluate_tasks(evaluator, choose(PAPER), Harness(benchmarks, None, display), subject.tokenizer(None))
    return evaluator.results


@pytest.fixture(scope="module")
def ours(exports: dict[str, Path], benchmarks: Path) -> dict[str, Results]:
    return {name: evaluated(path, benchmarks) for name, path in exports.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("task", PAPER)
def test_metrics_are_those_of_the_hf_backend(
    theirs: dict[str, dict[str, dict[str, float]]], ours: dict[str, Results], name: str, task: str
) -> None:
    result = ours[name].task(task)
    assert result is not None
    checked = {
        key: value
        for key, value in theirs[name][task].items()
        if not (key.endswith("_stderr") and "perplexity" in key)  # a bootstrap of few draws
    }
    assert TASKS[task].metric in checked
    assert len(checked) >= 2
    for key, value in checked.items():
        assert result.metrics[key] == pytest.approx(value, rel=1e-5), key
    assert result.value == result.metrics[TASKS[task].metric]


def test_some_requests_were_longer_than_the_context(ours: dict[str, Results]) -> None:
    """Otherwise the test above would not cover them."""
    cut = {r.origin.task: (r.scored.cut, r.scored.windowed) for r in ours["angpt"].tasks}
    assert cut["mmlu"][0] > 0
    assert cut["wikitext"][1] > 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_run_its_export_and_its_folded_model_are_the_same(
    runs: dict[str, Path], ours: dict[str, Results], benchmarks: Path, name: str
) -> None:
    run = runs[name]
    source = open_source(run)
    folded = run.with_name(f"{run.name}-folded")
    store.save(folded, source.folded(), run, source.sha256(), source.training, source.tokenizer_path)
    exported = ours[name]
    for path, rel in ((run, 0.0), (folded, 1e-4)):
        results = evaluated(path, benchmarks)
        assert results.model.weights == exported.model.weights
        for one, other in zip(results.tasks, exported.tasks, strict=True):
            assert one.origin == other.origin
            assert one.value == pytest.approx(other.value, rel=rel, abs=0)


def byte_tokens(text: str) -> list[int]:
    return list(text.encode())


def test_white_space_at_the_end_of_a_context_belongs_to_the_continuation() -> None:
    from angpt.evaluation.harness import pairs, whole_texts

    tokenizer: Tokenizer = load_tokenizer("bytes")
    found = pairs(tokenizer, [("a b", " c"), ("a ", "c"), ("", "c"), (" ", "c")])
    assert found == [
        (byte_tokens("a b"), byte_tokens(" c")),
        (byte_tokens("a"), byte_tokens(" c")),
        ([256], byte_tokens("c")),
        ([256], byte_tokens(" c")),
    ]
    assert whole_texts(tokenizer, [("ab",)]) == [([256], byte_tokens("ab"))]


def test_a_continuation_is_what_the_tokens_of_the_whole_add_to_those_of_the_context() -> None:
    """If context and continuation join to one token, the split is where the tokens of the context alone end."""
    from angpt.evaluation.harness import pairs

    tokenizer = load_tokenizer("bpe:300", ["ab ab ab abc abc abc"])
    context, continuation = "ab a", "bc abc abc"
    ((before, after),) = pairs(tokenizer, [(context, continuation)])
    alone = tokenizer.encode(context, add_special_tokens=False).ids
    whole = tokenizer.encode(context + continuation, add_special_tokens=False).ids
    assert (before, after) == (alone, whole[len(alone) :])
    assert list(before) + list(after) != whole


@pytest.mark.parametrize(("metric", "weighted"), [("perplexity", False), ("word_perplexity", True), ("acc", False)])
def test_standard_errors_are_those_of_a_bootstrap(metric: str, weighted: bool) -> None:
    from angpt.evaluation.harness import standard_error

    rng = random.Random(0)
    n = 400
    if metric == "acc":
        samples: list[Any] = [float(rng.random() < 0.3) for _ in range(n)]
    else:
        words = [rng.randint(5, 20) if weighted else 1 for _ in range(n)]
        logprobs = [-sum(rng.expovariate(0.5) for _ in range(w)) for w in words]
        samples = list(zip(logprobs, words, strict=True)) if weighted else logprobs

    def value(chosen: list[Any]) -> float:
        if metric == "acc":
            return sum(chosen) / len(chosen)
        if not weighted:
            return math.exp(-sum(chosen) / len(chosen))
        return math.exp(-sum(a for a, _ in chosen) / sum(b for _, b in chosen))

    draws = [value(rng.choices(samples, k=n)) for _ in range(2000)]
    assert standard_error(metric, value(samples), samples) == pytest.approx(np.std(draws), rel=0.1)
