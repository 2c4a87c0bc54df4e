import json
from pathlib import Path

import pytest
import torch

from angpt.bench.decode import DecodingModel, Models, bench_decode, floor_bytes, kinds_of, prefill_flops, tables
from angpt.cli.main import main
from angpt.config import PRESETS, ModelConfig
from angpt.inference.fold import fold
from angpt.inference.generate import generate
from angpt.inference.hf import as_transformers
from angpt.inference.quantize import quantize
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
    scales = 23 + 2 * (3 * 16 + 16 + 2 * 40 + 16)
    eight = quantize(model, "int8")
    assert floor_bytes(eight, 3, 10, 6) == matrices + rows + 4 * (vectors + scales) + 2 * 2 * 2 * 16 * slots


def test_the_floor_of_a_prompt_is_counted_product_by_product() -> None:
    cfg = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=40, vocab_size=23)
    shapes = [(48, 16), (16, 16), (80, 16), (16, 40)] * 2
    products = sum(2 * 10 * rows * columns for rows, columns in shapes) + 2 * 23 * 16  # the head at the last position
    pairs = 10 * 10 / 2  # causal: half of the products with keys, and with values
    assert prefill_flops(cfg, 3, 10) == 3 * (products + 2 * (2 + 2) * pairs * 16)


def test_models_that_share_their_caches_write_the_same_tokens_in_every_turn() -> None:
    models = [fold(build(ModelConfig.size("tiny"), seed)) for seed in (0, 1)]
    caches = models[0].make_caches(2, 64)
    subjects = [DecodingModel(model, 2, "auto", 5, 20, caches) for model in models]
    expected = [generate(model, torch.tensor(subjects[0].prompts), 20, GREEDY) for model in models]
    assert expected[0] != expected[1]
    for _ in range(2):
        for subject, tokens in zip(subjects, expected, strict=True):
            subject.prefill()
            subject.decode()
            assert subject.engine.read(0) == tokens


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
def test_all_cases_are_one_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "decode.json"
    main(["bench", "decode", "--size", "tiny", "--batches", "1", "2", "--prompts", "6", "9", "--tokens", "5",
          "--architectures", "gpt+", "angpt", "--weights", "full", "int8", "--rounds", "1", "--device", "cpu",
          "--out", str(out)])  # fmt: skip
    printed = capsys.readouterr().out
    assert printed.count("tokens/s") == 1
    found = json.loads(out.read_text())["results"]
    names = [("gpt+", "full"), ("gpt+", "int8"), ("angpt", "full"), ("angpt", "int8")]
    assert [(r["prompt"], r["batch"], r["architecture"], r["weights"]) for r in found] == [
        (prompt, batch, *name) for prompt in (6, 9) for batch in (1, 2) for name in names
    ]
    for r in found:
        assert r["tokens_per_s"] == pytest.approx(r["batch"] * 1e3 / r["token_ms"]["value"])
        assert r["prefill_tokens_per_s"] == pytest.approx(r["batch"] * r["prompt"] * 1e3 / r["prefill_ms"]["value"])
        assert r["floor_ms"] > 0
        assert r["prefill_floor_ms"] > 0
        assert r["transformers_prefill_ms"]["value"] > 0
    for case in range(0, 16, 4):
        ms = [found[case + i]["token_ms"]["value"] for i in range(4)]
        speed, over_full = ([r[key]["value"] for r in found[case : case + 4]] for key in ("speed", "over_full"))
        assert speed == pytest.approx([1, 1, ms[0] / ms[2], ms[1] / ms[3]])
        assert over_full == pytest.approx([1, ms[0] / ms[1], 1, ms[2] / ms[3]])


def test_without_transformers_and_with_several_kinds_of_step() -> None:
    kinds = kinds_of(["angpt", "angpt"], ["full"], ["auto", "plain"])
    models = Models("tiny", kinds, 3000, CPU, torch.float32, reference=False)  # longer than its context
    results = bench_decode(models, 1, 4, 4, 1, print)
    assert [r.step for r in results] == ["auto", "plain"]
    assert all(r.transformers_ms is None for r in results)
    (table,) = tables(results)
    assert [row[2] for row in table.rows] == ["angpt auto", "angpt plain"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tokens", "1"), "at least 2"), (("--size", "33M"), "did you mean 32M"), (("--batches", "0"), "batches"),
        (("--prompts", "0"), "prompts"), (("--weights", "int8", "full"), "name full first"),
        (("--architectures", "angtp"), "did you mean angpt"),
    ],
)  # fmt: skip
def test_mistakes(args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "decode", "--device", "cpu", *args])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
