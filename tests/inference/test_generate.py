import dataclasses
from pathlib import Path

import pytest
import torch

from angpt.config import ModelConfig, TrainConfig
from angpt.errors import UserError
from angpt.inference.generate import generate, load_model
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.run import Run

CONFIG = ModelConfig(architecture="angpt", d_model=16, n_layers=2, n_heads=2, vocab_size=31, context=8)


@pytest.fixture
def model() -> Decoder:
    return build(CONFIG, seed=3).eval()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(31, (3, 4), generator=torch.Generator().manual_seed(0))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def test_greedy_is_the_likeliest_token_step_by_step_beyond_the_context(model: Decoder, prompt: torch.Tensor) -> None:
    found = generate(model, prompt, 12, temperature=0)
    assert found.shape == (3, 16)
    assert torch.equal(found[:, :4], prompt)
    for row in found:
        for end in range(4, 16):
            seen = row[max(0, end - 8) : end]
            assert row[end] == model(seen[None])[0, -1].argmax()


@torch.no_grad()
def test_only_the_top_k_tokens_are_drawn(model: Decoder, prompt: torch.Tensor) -> None:
    allowed = model(prompt[:1])[0, -1].topk(3).indices.tolist()
    rows = prompt[:1].repeat(400, 1)
    drawn = generate(model, rows, 1, temperature=5.0, top_k=3, generator=seeded(0))[:, -1]
    assert set(drawn.tolist()) == set(allowed)
    everything = generate(model, rows, 1, temperature=5.0, top_k=None, generator=seeded(0))[:, -1]
    assert len(set(everything.tolist())) > 10
    one = generate(model, prompt, 5, temperature=1.0, top_k=1)
    assert torch.equal(one, generate(model, prompt, 5, temperature=0))


def test_a_seed_repeats_a_sample(model: Decoder, prompt: torch.Tensor) -> None:
    first = generate(model, prompt, 20, generator=seeded(7))
    assert torch.equal(first, generate(model, prompt, 20, generator=seeded(7)))
    assert not torch.equal(first, generate(model, prompt, 20, generator=seeded(8)))


@torch.no_grad()
def test_draws_follow_the_softmax_at_the_temperature(model: Decoder, prompt: torch.Tensor) -> None:
    rows = prompt[:1].repeat(20_000, 1)
    drawn = generate(model, rows, 1, temperature=0.5, top_k=None, generator=seeded(1))[:, -1]
    frequency = torch.bincount(drawn, minlength=31) / len(drawn)
    expected = torch.softmax(model(prompt[:1])[0, -1] / 0.5, dim=-1)
    torch.testing.assert_close(frequency, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [((2, 0), {}, "at least one token"), ((4,), {}, "shape"), ((1, 2), {"temperature": -1.0}, "temperature"),
     ((1, 2), {"top_k": 0}, "top_k")],
)  # fmt: skip
def test_impossible_requests_are_explained(
    model: Decoder, shape: tuple[int, ...], options: dict[str, float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(model, torch.zeros(shape, dtype=torch.long), 1, **options)  # type: ignore[arg-type]


def saved_run(path: Path, model: Decoder, config: ModelConfig = CONFIG) -> Run:
    run = Run.create(path, TrainConfig(model=config))
    state = checkpoint.State(5, config.architecture, 0, 1.0, None, "", None, {})
    checkpoint.save(run.checkpoints, model.state_dict(), {}, state, keep=2)
    return run


def test_the_newest_good_checkpoint_is_loaded(model: Decoder, prompt: torch.Tensor, tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", model)
    other = build(CONFIG, seed=4)
    state = checkpoint.State(9, "angpt", 0, 1.0, None, "", None, {})
    damaged = checkpoint.save(run.checkpoints, other.state_dict(), {}, state, keep=2)
    loaded = load_model(run.path)
    assert torch.equal(loaded(prompt), other(prompt))
    assert not loaded.training
    (damaged / checkpoint.MODEL).write_bytes(b"cut off")
    with pytest.warns(UserWarning, match="damaged"):
        loaded = load_model(run.path)
    assert torch.equal(loaded(prompt), model(prompt))


def test_a_run_without_a_fitting_checkpoint_is_explained(model: Decoder, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "empty", TrainConfig(model=CONFIG))
    with pytest.raises(UserError, match="no good checkpoint"):
        load_model(run.path)
    saved_run(tmp_path / "other", model, dataclasses.replace(CONFIG, d_model=32))
    with pytest.raises(UserError, match="does not fit"):
        load_model(tmp_path / "other")
