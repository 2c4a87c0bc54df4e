"""Samples and the page from real runs: data prepared, models trained, both by the package itself."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from angpt.config import DataConfig, ModelConfig, TrainConfig
from angpt.data.shards import TokenData
from angpt.data.tokenizers import load_tokenizer
from angpt.reports import samples, write_report
from angpt.reports.records import Material, ReportedRun
from angpt.training.launch import start
from angpt.training.record import RunRecord
from angpt.training.reporter import PlainReporter
from tests.data.corpora import prepare
from tests.reports.synthetic import make_result, run_result

SILENT = Console(quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = [f"document {i} is about the number {i * i}" for i in range(200)] + ["short"] * 40
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare((str(folder / "text.jsonl"),), folder / "tokens", tokenizer="bytes", val_fraction=0.2, workers=1,
            console=SILENT)  # fmt: skip
    return folder / "tokens"


def test_prompts_are_the_beginnings_of_the_first_long_documents(data: Path) -> None:
    val = TokenData.open(data, "val")
    prompts = samples.first_documents(val)
    text = load_tokenizer(data).decode(val.read(0, val.tokens).tolist(), skip_special_tokens=False)
    long = [document for document in text.split("<|endoftext|>") if len(document) >= samples.PROMPT_TOKENS]
    assert [bytes(row).decode() for row in prompts.tolist()] == [
        document[: samples.PROMPT_TOKENS] for document in long[:3]
    ]


@pytest.mark.parametrize(("largest", "device"), [(19_999, "auto"), (20_000, "cpu")])
def test_a_sample_stops_where_the_model_ends_the_document(
    monkeypatch: pytest.MonkeyPatch, data: Path, largest: int, device: str
) -> None:
    """And a large model is folded and run on the GPU where there is one."""
    asked: list[str] = []
    monkeypatch.setattr(samples, "LARGEST", largest)
    monkeypatch.setattr(samples, "choose_device", asked.append)
    eot = TokenData.open(data, "val").eot

    def generate(model: object, prompts: torch.Tensor, new_tokens: int, *_: object, **__: object) -> list[list[int]]:
        return [[ord("x")] * 4 + [eot]] + [[ord("x")] * new_tokens for _ in prompts[1:]]

    monkeypatch.setattr(samples, "generate", generate)
    monkeypatch.setattr(samples, "fold", lambda model: None)
    source: Any = SimpleNamespace(decoder=lambda: SimpleNamespace(to=lambda device: None))
    result = run_result("run", "angpt", 1000, 0, 2.0, 1.0)
    record = RunRecord(Path("run"), TrainConfig(data=DataConfig(path=str(data))), None)
    material = Material(make_result([result]), (ReportedRun(result, record),))
    found = samples.make_samples(material, {"run": source}).samples
    assert [(s.continuations[0].text, s.continuations[0].ended) for s in found] == [
        ("xxxx", True), ("x" * 60, False), ("x" * 60, False)
    ]  # fmt: skip
    assert asked == [device]


def test_a_report_of_trained_models(data: Path, tmp_path: Path) -> None:
    """What the trainer writes is what the report reads."""
    results, folders = [], []
    for architecture in ("gpt+", "angpt"):
        model = ModelConfig(architecture=architecture, d_model=16, n_layers=2, n_heads=2, vocab_size=257, context=16)
        config = TrainConfig(
            model=model, data=DataConfig(path=str(data)), tokens="2560", batch_tokens=128, device="cpu"
        )
        folders.append(tmp_path / "runs" / architecture.strip("+"))
        summary = start(config, folders[-1], PlainReporter(SILENT))
        results.append(run_result(folders[-1].name, architecture, 2560, 0, summary.val_loss or 0.0, summary.seconds))
    page = write_report(tmp_path, folders, make_result(results), tmp_path / "out")
    html = page.read_text()
    assert (
        html.count("<svg ") == 8 + 9 + 3
    )  # figures, those of the inside (one each is narrow, too), and the architectures
    assert html.count("<pre><span") == 6
    assert torch.__version__ in html
    losses = (tmp_path / "out" / "figures" / "loss.csv").read_text().splitlines()
    last = [line for line in losses if line.startswith("gpt,")][-1]
    assert last.endswith(str(results[0].val_loss))
