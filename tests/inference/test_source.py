import json
from pathlib import Path

import pytest
import torch

from angpt.config import TrainConfig
from angpt.data.tokenizers import end_token, load_tokenizer
from angpt.errors import UserError
from angpt.inference import store
from angpt.inference.fold import fold
from angpt.inference.source import digest, open_source
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.run import Run, Summary
from tests.inference.conftest import byte_model, write_run

TOKENS = torch.arange(20)[None]


def save_folded(run: Run, path: Path) -> Path:
    source = open_source(run.path)
    store.save(path, source.folded(), source.path, source.sha256(), source.training, source.tokenizer_path)
    return path


@torch.no_grad()
def test_the_newest_good_checkpoint_of_a_run_is_opened(run: Run) -> None:
    other = build(byte_model().cfg, seed=4)
    state = checkpoint.State(9, "angpt", 0, 1.0, None, "", None, {}, run.config())
    damaged = checkpoint.save(run.checkpoints, other.state_dict(), {}, state, keep=2)
    source = open_source(run.path)
    assert torch.equal(source.decoder()(TOKENS), other(TOKENS))
    assert not source.decoder().training
    assert source.training.step == 9
    assert source.training.tokens == 9 * 128
    (damaged / checkpoint.MODEL).write_bytes(b"cut off")
    with pytest.warns(UserWarning, match="damaged"):
        source = open_source(run.path)
    assert torch.equal(source.decoder()(TOKENS), byte_model()(TOKENS))


def test_a_run_that_diverged_is_told(run: Run) -> None:
    run.write_summary(Summary("diverged", 8, 9, 1024, None, 1.0, 0.0, None, None, 1, 1, None, {}))
    with pytest.warns(UserWarning, match=r"diverged after 8 steps; its model is the last good one, of step 7$"):
        open_source(run.path)
    (run.path / "summary.json").write_text("{")  # says nothing about the model
    assert open_source(run.path).training.step == 7


@torch.no_grad()
def test_a_folded_model_comes_back_as_it_was(run: Run, tmp_path: Path) -> None:
    path = save_folded(run, tmp_path / "folded")
    source = open_source(path)
    assert source.kind == "folded"
    assert source.sha256() == open_source(run.path).sha256() == digest(byte_model().state_dict())
    assert source.training == open_source(run.path).training
    assert torch.equal(source.folded()(TOKENS), fold(byte_model())(TOKENS))
    assert source.tokenizer().to_str() == load_tokenizer("bytes").to_str()
    with pytest.raises(UserError, match="cannot be undone"):
        source.decoder()


def test_a_folded_model_in_bf16_keeps_its_dtypes(run: Run, tmp_path: Path) -> None:
    model = open_source(run.path).folded().prepare("cpu", torch.bfloat16)
    store.save(tmp_path / "small", model, run.path, "", open_source(run.path).training, None)
    loaded = store.load(tmp_path / "small")
    assert [p.dtype for p in loaded.parameters()] == [p.dtype for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("damage", ["cut", "changed", "missing", "about", "format"])
def test_a_damaged_folded_model_is_refused(run: Run, tmp_path: Path, damage: str) -> None:
    path = save_folded(run, tmp_path / "folded")
    weights, about = path / store.WEIGHTS, path / store.ABOUT
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[:-8])
    elif damage == "changed":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        weights.unlink()
    elif damage == "about":
        about.write_text("{")
    else:
        about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="fold the model again"):
        open_source(path).folded()


def test_nothing_is_written_over_and_nothing_half_is_left(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_folded(run, tmp_path / "folded")
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(UserError, match="exists"):
        save_folded(run, path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(UserError, match="No space left"):
        save_folded(run, tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_weights_are_told_apart_by_name_and_value() -> None:
    a = {"x": torch.ones(2), "y": torch.zeros(2, 1)}
    assert digest(a) == digest({"y": torch.zeros(2, 1), "x": torch.ones(2)})
    for other in (
        {"x": torch.ones(2), "z": torch.zeros(2, 1)},
        {"x": torch.ones(2), "y": torch.zeros(1, 2)},
        {"x": torch.ones(2), "y": torch.zeros(2, 1).bfloat16()},
        {"x": torch.tensor([1.0, -1.0]), "y": torch.zeros(2, 1)},
    ):
        assert digest(a) != digest(other)


def test_what_is_no_model_is_explained(tmp_path: Path, run: Run) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no model in it"):
        open_source(tmp_path / "empty")
    with pytest.raises(UserError, match="no good checkpoint"):
        open_source(Run.create(tmp_path / "fresh", TrainConfig(model=byte_model().cfg)).path)
    study = tmp_path / "study"
    write_run(study / "runs" / "one", byte_model())
    with pytest.raises(UserError, match=r"several runs; give one of them: .*runs/one"):
        open_source(study)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="model_type is 'llama'"):
        open_source(tmp_path / "llama")


def test_a_checkpoint_of_another_model_is_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", byte_model())
    config = run.path / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("d_model = 32", "d_model = 64"))
    with pytest.raises(UserError, match=r"was trained with .model.d_model = 64, not 32"):
        open_source(run.path)
    config.write_text(text)
    state = checkpoint.State(9, "angpt", 0, 1.0, None, "", None, {}, run.config())
    checkpoint.save(run.checkpoints, byte_model(d_model=64).state_dict(), {}, state, keep=2)
    with pytest.raises(UserError, match="do not fit"):
        open_source(run.path).decoder()


def test_another_tokenizer_is_refused(run: Run) -> None:
    source = open_source(run.path)
    assert source.tokenizer_path is not None
    other = load_tokenizer("bpe:300", ["some text to learn from"] * 9)
    other.save(str(source.tokenizer_path))
    with pytest.raises(UserError, match="is not the tokenizer"):
        source.tokenizer()
    source.tokenizer_path.unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        open_source(run.path).tokenizer()


def test_the_end_token_where_there_is_one() -> None:
    from tokenizers import Tokenizer, models

    assert end_token(load_tokenizer("bytes")) == 256
    assert end_token(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
