import json
from pathlib import Path

import pytest
import torch

from angpt.bench.decode import DecodingModel, bench_decode, floor_bytes, tables
from angpt.cli.main import main
from angpt.config import PRESETS, ModelConfig
from angpt.errors import UserError
from angpt.inference.fold import fold
from angpt.inference.generate import generate
from angpt.inference.hf import as_transformers
from angpt.inference.sampling import GREEDY
from angpt.models.variants import build
from tests.models.conftest import some_tokens, tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", {"model": {"d_model": 32, "n_layers": 2, "n_heads": 2}})


def test_the_floor_is_what_a_step_reads() -> None:
    model = fold(tiny("angpt", d_model=16, n_layers=2, vocab_size=23, d_ff=40)).prepare("cpu", torch.bfloat16)
    matrices = 23 * 16 + 2 * (3 * 16 * 16 + 16 * 16 + 2 * 40 * 16 + 40 * 16)
    vectors = 2 * (4 * 16 + 1)
    rows = 3 * 16  # of the embedding
    slots = 3 * (10 + 3)  # behind a prompt of 10, on average over 6 new tokens
    assert floor_bytes(model, 3, 10, 6) == 2 * (matrices + rows) + 4 * vectors + 2 * 2 * 2 * 16 * slots


def test_every_turn_writes_the_same_tokens() -> None:
    model = fold(build(ModelConfig.size("tiny")))
    subject = DecodingModel(model, 2, "auto", 5, 20)
    expected = generate(model, subject.prompts, 20, GREEDY)
    for _ in range(2):
        subject.decode()
        assert subject.engine.read(0) == expected


@torch.no_grad()
def test_the_reference_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    for name in ("gpt+", "ngpt", "angpt"):
        model = tiny(name).float()
        theirs = as_transformers(model, CPU, torch.float32)
        torch.testing.assert_close(theirs(some_tokens(2, 9)).logits, model(some_tokens(2, 9)), rtol=1e-4, atol=1e-5)
        low = as_transformers(model, CPU, torch.bfloat16)
        assert {p.dtype for p in low.parameters() if p.ndim == 1} == {torch.float32}


@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_results_of_all_architectures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "decode.json"
    main(["bench", "decode", "--size", "tiny", "--batches", "1", "2", "--prompt", "6", "--tokens", "5", "--rounds", "2",
          "--architectures", "gpt+", "angpt", "--device", "cpu", "--out", str(out)])  # fmt: skip
    printed = capsys.readouterr().out
    assert "tiny, 2 rows, 5 tokens after 6" in printed
    found = json.loads(out.read_text())["results"]
    assert [(r["architecture"], r["batch"]) for r in found] == [("gpt+", 1), ("angpt", 1), ("gpt+", 2), ("angpt", 2)]
    for r in found:
        assert r["tokens_per_s"] == pytest.approx(r["batch"] * 1e3 / r["token_ms"]["value"])
        assert r["prefill_tokens_per_s"] == pytest.approx(r["batch"] * 6e3 / r["prefill_ms"]["value"])
        assert r["floor_ms"] > 0
    assert found[0]["speed"]["value"] == 1.0
    assert found[1]["speed"]["value"] == pytest.approx(found[0]["token_ms"]["value"] / found[1]["token_ms"]["value"])


def test_without_transformers_and_with_several_kinds_of_step() -> None:
    results = bench_decode("tiny", ["angpt"], 1, ["auto", "plain"], 4, 4, CPU, torch.float32, 1, False, print)
    assert [r.step for r in results] == ["auto", "plain"]
    assert all(r.transformers_ms is None for r in results)
    assert len(tables(results)) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tokens", "1"), "at least 2"), (("--size", "33M"), "did you mean 32M"), (("--batches", "0"), "batches"),
        (("--size", "tiny", "--prompt", "2000", "--tokens", "100"), "do not fit the context"),
        (("--architectures", "angtp"), "did you mean angpt"),
    ],
)  # fmt: skip
def test_mistakes(args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "decode", "--device", "cpu", *args])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match="unknown size"):
        bench_decode("huge", ["angpt"], 1, ["auto"], 4, 4, CPU, torch.float32, 1, False, print)
