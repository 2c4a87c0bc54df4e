"""A decode step of many rows by the kernels, against the same step by plain operations."""

from functools import partial

import pytest
import torch

from angpt.fast import tuning
from angpt.models.folded import Folded
from tests.fast.test_decode_kernels import NAMES, agree, eight_bits, folded, step_both_ways, writes_the_plain_tokens
from tests.triton_anywhere import DEVICE, ON_GPU, kernels_apply  # noqa: F401

ROWS = [0, 70, 5, 33, 127]
SMALL = {16: (32, 16, 4, 2), 32: (32, 16, 4, 2)}
SMALL_SWIGLU = {rows: (16, *rest) for rows, (_, *rest) in SMALL.items()}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that products of tiny models have several parts, tiles and iterations."""
    monkeypatch.setattr(tuning, "DECODE_TILES", SMALL)
    monkeypatch.setattr(tuning, "DECODE_SWIGLU_TILES", SMALL_SWIGLU)
    monkeypatch.setattr(tuning, "DECODE_LEAST_DEPTH", 16)


def compare(model: Folded, rows: list[int], capacity: int, shown: int) -> None:
    from angpt.fast import rows_kernels

    agree(step_both_ways(model, rows, capacity, shown, rows_kernels))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_are_the_plain_step(name: str) -> None:
    compare(folded(name, d_model=32, n_layers=1 if "/" in name else 2, context=128), ROWS, 128, 128)


@pytest.fixture(params=["splits", "short tiles", "long tiles"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in splits of the slots, or to all of them in tiles as for a few slots or for many."""
    if request.param != "splits":
        monkeypatch.setattr(tuning, "DECODE_PROGRAMS", 1)
        monkeypatch.setattr(tuning, "DECODE_SHORT", 256 if request.param == "short tiles" else 0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
def test_attention_in_splits_and_in_tiles(name: str, attention: None) -> None:
    compare(folded(name, d_model=32, n_layers=1, context=128), ROWS, 128, 128)


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "capacity", "shown"), [([5, 63, 64, 2, 99], 256, 128), ([129, 400, 0, 1, 7], 130, 130)]
)
def test_slots_that_are_not_seen_do_not_count(rows: list[int], capacity: int, shown: int, attention: None) -> None:
    compare(folded(d_model=48, n_heads=3, d_ff=80, n_layers=1), rows, capacity, shown)


@torch.no_grad()
def test_columns_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns of a part in one iteration, and the first of several."""
    monkeypatch.setattr(tuning, "DECODE_TILES", dict.fromkeys(SMALL, (32, 32, 4, 2)))
    compare(folded(d_model=48, n_heads=3, d_ff=80, n_layers=1, context=128), ROWS, 128, 128)
    monkeypatch.setattr(tuning, "DECODE_HELD_ROWS", 0)
    compare(folded(d_model=48, n_heads=3, d_ff=80, n_layers=1, context=128), ROWS, 128, 128)


@torch.no_grad()
def test_more_rows_than_a_tile_has() -> None:
    compare(folded(n_layers=1, n_heads=1, d_ff=16, context=64), [row % 60 for row in range(37)], 64, 64)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_8_bit_weights_are_read_as_they_are(kind: str) -> None:
    compare(eight_bits(folded(d_model=32, d_ff=80, context=128), kind), ROWS, 128, 128)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt+", (0.01, 0.23, 1.0, 1e4, 1.5e7)),
        ("angpt", (1e-4, 0.01, 1.0)),
        ("ngpt", (1e-3, 1.0, 1e4)),
        ("angpt/no-output-norm", (1e-4, 0.01, 1.0)),
    ],
)
def test_matrices_in_e4m3_are_multiplied_in_fp16(name: str, sizes: tuple[float, ...]) -> None:
    """So that they are converted fast: exact to half a step of bf16 for inputs of the sizes that an architecture has.
    At the start of training u · SiLU(z) has an rms of 1e-4 in the 0.5B anGPT, 0.02 in nGPT and 0.2 in GPT+, whose
    outliers are not bounded."""
    from angpt.fast import rows_kernels

    model = eight_bits(folded(name, d_model=32, d_ff=80), "fp8").prepare(DEVICE, torch.bfloat16)
    x = (
        (torch.randn(len(sizes), 80, device=DEVICE) * torch.tensor(sizes, device=DEVICE)[:, None])
        .clamp(-1.6e7, 1.6e7)
        .to(torch.bfloat16)
    )
    layer = model.layers[0]
    y = rows_kernels.ManySteps(model, len(sizes)).product(x, layer.W_d, layer.W_d_scale, whole=True)
    expected = x.double() @ layer.W_d.double().T * layer.W_d_scale
    assert (y - expected).norm(dim=1).le(2**-9 * expected.norm(dim=1)).all()


FEW = [(name, 200 if ON_GPU else 20) for name in ("gpt+", "ngpt", "angpt")]
MANY = [pytest.param(name, 200, marks=(pytest.mark.slow, pytest.mark.long)) for name in NAMES]


@pytest.mark.parametrize(("name", "count"), FEW + MANY)
def test_greedy_tokens_are_those_of_the_plain_step(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from angpt.fast import rows_kernels

    # Attention that is not split; test_decode_kernels.py has the other.
    monkeypatch.setattr(tuning, "DECODE_PROGRAMS", 1)
    model = folded(name, n_layers=1, n_heads=1, d_ff=16, context=256)
    writes_the_plain_tokens(model, partial(rows_kernels.decode, model), count, rows=5)


@pytest.mark.parametrize(
    ("n", "k", "rows", "parts"),
    [(3072, 1024, 32, 2), (1024, 1024, 32, 4), (1024, 4096, 32, 8), (50_304, 1024, 32, 1), (3840, 1280, 32, 2)],
)
def test_products_have_enough_programs(n: int, k: int, rows: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices of the 0.5B model, and one of the 1B model."""
    from angpt.fast import rows_kernels

    monkeypatch.setattr(tuning, "DECODE_LEAST_DEPTH", 256)
    assert rows_kernels.parts_of(n, k, rows) == parts


def test_tiles_hold_the_batch_or_are_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    from angpt.fast import rows_kernels

    monkeypatch.setattr(tuning, "DECODE_TILES", dict.fromkeys((16, 32, 64, 128), (0, 0, 0, 0)))
    assert [rows_kernels.tile_rows(batch) for batch in (5, 16, 17, 64, 100, 500)] == [16, 16, 32, 64, 128, 128]
