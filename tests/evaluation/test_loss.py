import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from angpt.data.shards import TokenData
from angpt.data.tokenizers import load_tokenizer
from angpt.errors import UserError
from angpt.evaluation.loss import bits_per_byte, losses
from angpt.evaluation.subjects import of_decoder, open_subject
from angpt.inference import hf, store
from angpt.inference.source import open_source
from angpt.models.decoder import Decoder
from angpt.training.launch import start
from angpt.training.reporter import Quiet
from tests.evaluation.material import CONFIG, small_decoder, small_model
from tests.training.conftest import small

CONTEXT = CONFIG.context


@torch.no_grad()
def slow_losses(model: Decoder, tokens: list[int]) -> list[float]:
    """Token by token: −log p of each in windows that end where the next begins."""
    found = []
    model = model.double()
    for start_ in range(0, len(tokens) - 1 - (len(tokens) - 1) % CONTEXT, CONTEXT):
        for i in range(1, CONTEXT + 1):
            logits = model(torch.tensor([tokens[start_ : start_ + i]]))[0, -1]
            p = math.exp(logits[tokens[start_ + i]].item()) / sum(map(math.exp, logits.tolist()))
            found.append(-math.log(p))
    return found


def test_loss_perplexity_and_bits_per_byte_are_those_of_a_slow_restatement(prepared: Path) -> None:
    data = TokenData.open(prepared, "val")
    tokens = data.read(0, data.tokens).tolist()
    data = data.part(0, 4 * CONTEXT + 17)
    tokens = tokens[: data.tokens]
    found = losses(small_model(), data, CONTEXT, batch_tokens=3 * CONTEXT)
    expected = slow_losses(small_decoder(), tokens)
    assert (found.windows, found.tokens) == (4, len(expected))
    mean = sum(expected) / len(expected)
    assert found.loss == pytest.approx(mean, rel=1e-6)
    assert found.perplexity == pytest.approx(math.prod(math.exp(e / len(expected)) for e in expected), rel=1e-5)
    per_window = [sum(expected[i : i + CONTEXT]) / CONTEXT for i in range(0, len(expected), CONTEXT)]
    assert found.stderr == pytest.approx(np.std(per_window, ddof=1) / 2, rel=1e-3)


def test_bits_per_byte_counts_the_bytes_of_the_text(prepared: Path) -> None:
    """With bytes as tokens there is one token more for each document; the text is counted by reading it again."""
    data = TokenData.open(prepared, "val")
    tokens = data.read(0, data.tokens).tolist()
    texts = bytes(t for t in tokens if t < 256)
    assert bits_per_byte(math.log(2), data, None) == pytest.approx(len(tokens) / len(texts), rel=1e-12)
    assert len(texts) < len(tokens)


def test_bytes_are_counted_by_decoding_without_an_index(prepared: Path, tmp_path: Path) -> None:
    index = json.loads((prepared / "index.json").read_text())
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes((prepared / f"{split}-00000.bin").read_bytes())
    raw, data = TokenData.open(tmp_path, "val"), TokenData.open(prepared, "val")
    tokenizer = load_tokenizer(prepared)
    assert raw.text_bytes is None
    assert data.text_bytes == index["val"]["text_bytes"]
    assert bits_per_byte(2.0, raw, tokenizer) == bits_per_byte(2.0, data, None)
    assert bits_per_byte(2.0, raw, None) is None


def test_a_limit_takes_windows_from_all_over_the_split(prepared: Path) -> None:
    data = TokenData.open(prepared, "val")
    seen: list[tuple[int, int]] = []
    found = losses(small_model(), data, CONTEXT, 100, limit=3, progress=lambda done, total: seen.append((done, total)))
    assert found.windows == 3
    assert seen[-1] == (3, 3)
    whole = losses(small_model(), data, CONTEXT, 100)
    assert found.loss != whole.loss
    assert found.loss == pytest.approx(whole.loss, abs=5 * (found.stderr or 0))


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_one_that_training_reports(prepared: Path, tmp_path: Path, masked: bool) -> None:
    """Also that of a folded model, of an export without the configuration of its run, and of what was made of it."""
    config = small(prepared, model__vocab_size=261, tokens="512", data__mask_documents=masked, eval_tokens=10**9)
    summary = start(config, tmp_path / "run", Quiet())
    run, data = open_source(tmp_path / "run"), TokenData.open(prepared, "val")
    store.save(tmp_path / "folded", run.folded(), run.path, run.sha256(), run.training, None)
    hf.export(run, tmp_path / "hf")
    (tmp_path / "hf" / hf.RUN_CONFIG).unlink()
    hf.import_run(open_source(tmp_path / "hf"), tmp_path / "back")
    for name in ("run", "folded", "hf", "back"):
        subject = open_subject(tmp_path / name)
        assert subject.mask_documents == masked
        model = subject.load(torch.device("cpu"), torch.float32)
        found = losses(model, data, config.model.context, 512, mask_documents=subject.mask_documents)
        assert found.loss == pytest.approx(summary.val_loss, rel=1e-6)


def test_a_split_shorter_than_a_window_is_explained(prepared: Path) -> None:
    with pytest.raises(UserError, match="too few for one window"):
        losses(small_model(), TokenData.open(prepared, "val").part(0, CONTEXT), CONTEXT, 100)


def test_a_loss_without_a_perplexity_is_explained() -> None:
    from angpt.evaluation.loss import Losses

    with pytest.raises(UserError, match="has no perplexity"):
        _ = Losses(1, 10, 1e4, None).perplexity


def test_a_diverged_model_is_named_as_such(prepared: Path) -> None:
    model = small_decoder()
    with torch.no_grad():
        model.W_e.weight.fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        losses(of_decoder(model, torch.float32), TokenData.open(prepared, "val"), CONTEXT, 100)
