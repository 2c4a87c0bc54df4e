"""The same numbers as lm-evaluation-harness gives with its own `hf` backend."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer

from angpt.data.tokenizers import load_tokenizer
from angpt.evaluation.evaluate import Harness, Watch
from angpt.evaluation.requests import Scored, Scores
from angpt.evaluation.scoring import score
from angpt.evaluation.subjects import of_transformers, open_subject
from angpt.evaluation.tasks import PAPER, TASKS, write_configs

transformers = pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

CONTEXT = 72
"""So short that some requests are cut."""


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of transformers with random weights that are large enough to make a difference."""
    folder = tmp_path_factory.mktemp("export") / "neox"
    config = transformers.GPTNeoXConfig(
        vocab_size=259, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=CONTEXT, initializer_range=0.5, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    load_tokenizer("bytes").save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def hf(export: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    model = transformers.GPTNeoXForCausalLM.from_pretrained(export)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(export / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=CONTEXT, device="cpu")


def theirs(hf: Any, name: str, benchmarks: Path, folder: Path, limit: int | None) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    write_configs(TASKS[name], benchmarks, folder)
    manager = TaskManager(include_defaults=False, include_path=str(folder))
    found = lm_eval.simple_evaluate(hf, tasks=[name], task_manager=manager, limit=limit, bootstrap_iters=2)
    return {key.partition(",")[0]: value for key, value in found["results"][name].items() if "," in key}


def ours(export: Path, name: str, benchmarks: Path, limit: int | None) -> tuple[dict[str, float], Scores]:
    subject = open_subject(export)
    harness = Harness(benchmarks, limit, Watch(Console(quiet=True)))
    requests = harness.requests(TASKS[name], subject.tokenizer(None))
    answers = score(subject.load(torch.device("cpu"), torch.float32), requests.pairs, CONTEXT, 500)
    scored = Scored(subject.model.weights, requests.digest, "fp32", "cpu", 0.0, answers.cut, answers.windowed)
    scores = Scores(scored, answers.logprob, answers.greedy)
    return harness.build(TASKS[name]).metrics(scores), scores


@pytest.mark.filterwarnings("ignore")  # of the harness and of transformers
@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("limit", [None, 2])
def test_metrics_are_those_of_the_hf_backend(
    export: Path, hf: Any, benchmarks: Path, tmp_path: Path, name: str, limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    expected = theirs(hf, name, benchmarks, tmp_path, limit)
    found, _ = ours(export, name, benchmarks, limit)
    checked = 0
    for key, value in expected.items():
        if not isinstance(value, float | int) or (key.endswith("_stderr") and "perplexity" in key):
            continue  # a bootstrap of few draws
        assert found[key] == pytest.approx(value, rel=1e-5), key
        checked += 1
    assert checked >= 2
    assert found[TASKS[name].metric] == pytest.approx(expected[TASKS[name].metric], rel=1e-5)


def test_some_requests_were_longer_than_the_context(export: Path, benchmarks: Path) -> None:
    """Else the test above says nothing about them."""
    assert ours(export, "mmlu", benchmarks, None)[1].scored.cut > 0
    assert ours(export, "wikitext", benchmarks, None)[1].scored.windowed > 0


def test_the_model_is_asked_as_transformers_computes(export: Path) -> None:
    model = transformers.GPTNeoXForCausalLM.from_pretrained(export).eval()
    context, continuation = [3, 1, 4, 1, 5], [9, 2, 6]
    with torch.no_grad():
        table = model(torch.tensor([context + continuation])).logits[0].double().log_softmax(-1)
    expected = sum(table[4 + i, token].item() for i, token in enumerate(continuation))
    wrapped = of_transformers(model, torch.device("cpu"), torch.float32)
    assert score(wrapped, [(context, continuation)], CONTEXT, 100).logprob[0] == pytest.approx(expected, rel=1e-5)


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
    """Where the two are joined to one token, the cut is where the tokens of the context alone end."""
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
