"""8-bit weights of folded models: rounding, folder and commands."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from angpt.config import Weights
from angpt.errors import UserError
from angpt.evaluation.subjects import open_subject
from angpt.inference import store
from angpt.inference.fold import fold
from angpt.inference.generate import generate
from angpt.inference.quantize import quantize, quantize_rows
from angpt.inference.sampling import GREEDY
from angpt.inference.source import open_source
from angpt.models.folded import EIGHT_BITS, Folded
from angpt.models.variants import ARCHITECTURES
from angpt.system import file_sha256
from angpt.training.run import Run
from tests.command import call
from tests.inference.conftest import byte_model
from tests.models.conftest import some_tokens, tiny

KINDS: list[Weights] = ["fp8", "int8"]
TOKENS = torch.arange(20)[None]


def numbers(kind: Weights) -> Tensor:
    """All numbers of a format: fp8 has a sign, four bits of exponent with bias 7, and three of mantissa."""
    if kind == "int8":
        return torch.arange(-127, 128).double()
    positive = [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e, m in itertools.product(range(16), range(8))
        if (e, m) != (15, 7)  # not a number
    ]
    return torch.tensor(sorted({sign * x for sign in (-1, 1) for x in positive}), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_becomes_the_nearest_number_of_its_row(kind: Weights) -> None:
    """Against a search through all numbers of the format, in float64."""
    rng = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 40, generator=rng) * torch.logspace(-6, 3, 7)[:, None]
    matrix[3] = 0
    matrix[4, 1:] = 0
    stored, scale = quantize_rows(matrix, EIGHT_BITS[kind])
    assert (stored.dtype, scale.dtype) == (EIGHT_BITS[kind], torch.float32)
    for row, values, s in zip(matrix.double(), stored.double(), scale.double(), strict=True):
        top = row.abs().max()
        assert s == pytest.approx(float(top / numbers(kind).max()) if top else 1.0, rel=1e-6)
        for w, value in zip(row, values, strict=True):
            nearest = (numbers(kind) * s - w).abs().min()
            assert (value * s - w).abs() <= nearest + 1e-6 * s  # a tie to either side
            assert value in numbers(kind)


def test_what_8_bits_cannot_hold_is_refused() -> None:
    for bad in (torch.inf, torch.nan):
        with pytest.raises(UserError, match="8 bits cannot hold it"):
            quantize_rows(torch.tensor([[1.0, bad]]), torch.int8)
    model = fold(tiny())
    with pytest.raises(UserError, match="weights must be fp8 or int8, not 'full'"):
        quantize(model, "full")
    with pytest.raises(UserError, match="has int8 weights already"):
        quantize(quantize(model, "int8"), "fp8")
    with pytest.raises(UserError, match="may overflow in fp16; use bf16 or fp32"):
        quantize(model, "fp8").prepare("cpu", torch.float16)


def restated(model: Folded) -> Folded:
    """The same model in float64 with matrices of full precision that hold s · w_q."""
    full = Folded(model.cfg, model.design).prepare("cpu", torch.float64)
    values = {name: p.double() for name, p in model.state_dict().items()}
    for name in [name for name in values if name.endswith("_scale")]:
        scale = values.pop(name)
        values[name.removesuffix("_scale")] *= scale[:, None]
    full.load_state_dict(values)
    return full


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt+", "gpt+/dyt", "ngpt", "angpt"])
def test_the_model_computes_with_its_scaled_rows(name: str, kind: Weights) -> None:
    tokens, model = some_tokens(3, 16), quantize(fold(tiny(name)), kind)
    exact = restated(model)(tokens)
    torch.testing.assert_close(model(tokens), exact, rtol=1e-12, atol=1e-12)
    low = model.prepare("cpu", torch.bfloat16)(tokens).double()
    assert (low - exact).abs().max() < 0.05 * exact.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_it_stays_close_to_the_model(name: str, kind: Weights) -> None:
    tokens, model = some_tokens(3, 16), fold(tiny(name, d_model=32).float())
    before = {n: p.clone() for n, p in model.named_parameters()}
    found, expected = quantize(model, kind)(tokens), model(tokens)
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < {"int8": 0.05, "fp8": 0.15}[kind]
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_half_of_that_in_bf16(kind: Weights) -> None:
    def size(model: Folded) -> int:
        return sum(p.nbytes for p in model.parameters() if p.ndim == 2)

    model = fold(byte_model())
    eight = quantize(model, kind).prepare("cpu", torch.bfloat16)
    assert size(eight) == size(model.prepare("cpu", torch.bfloat16)) / 2
    rows = sum(p.shape[0] for p in model.parameters() if p.ndim == 2)
    assert sum(p.nbytes for n, p in eight.named_parameters() if n.endswith("_scale")) == 4 * rows
    assert eight.dtype == eight.make_caches(1, 4)[0].keys.dtype == torch.bfloat16


def folded_command(capsys: pytest.CaptureFixture[str], run: Run, kind: Weights) -> Path:
    code, out, err = call(capsys, "fold", run.path, "--weights", kind)
    assert (code, err) == (0, "")
    assert f"run-{kind}: folded" in out
    return run.path.with_name(f"run-{kind}")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_holds_the_model_in_8_bits(run: Run, kind: Weights, capsys: pytest.CaptureFixture[str]) -> None:
    path, expected = folded_command(capsys, run, kind), quantize(fold(byte_model()), kind)
    found = open_source(path).folded()
    for (name, a), (other, b) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert (name, a.dtype) == (other, b.dtype)
        assert torch.equal(a.float(), b.float())
    assert (found.weights, found.dtype) == (kind, torch.float32)
    parameters = byte_model().parameter_count()
    assert (path / store.WEIGHTS).stat().st_size < 1.5 * parameters  # scales are many in so small a model
    assert open_source(path).training == open_source(run.path).training


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_opens_it(run: Run, kind: Weights, capsys: pytest.CaptureFixture[str]) -> None:
    path = folded_command(capsys, run, kind)
    tokens = generate(open_source(path).folded(), [[120]], 9, GREEDY)[0]
    for precision in ("fp32", "bf16"):
        options = ("--tokens", 9, "--temperature", 0, "--precision", precision)
        code, out, _ = call(capsys, "generate", path, "x", *options)
        assert code == 0
        if precision == "fp32":
            assert out == "x" + open_source(path).tokenizer().decode(tokens, skip_special_tokens=False) + "\n"
    subject = open_subject(path)
    model = subject.load(torch.device("cpu"), torch.float32)
    assert torch.equal(model.states(TOKENS, None), open_source(path).folded().stream(TOKENS))
    assert subject.model.weights == file_sha256(path / store.WEIGHTS)  # results of other weights are not its results
    assert subject.model.weights != open_source(run.path).sha256()


@pytest.mark.parametrize("kind", KINDS)
def test_another_format_in_the_file_is_refused(run: Run, kind: Weights, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of the other format with its own checksum, as `folded.json` does not describe it."""
    path = folded_command(capsys, run, kind)
    tensors = {name: t if t.ndim != 2 else t.float() for name, t in load_file(path / store.WEIGHTS).items()}
    save_file(tensors, path / store.WEIGHTS)
    about = store.read_about(path)
    text = (path / store.ABOUT).read_text()
    assert f'"weights": "{kind}"' in text
    with pytest.raises(UserError, match="wrong checksum"):
        open_source(path).folded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "file_sha256", lambda _: about.sha256)
        with pytest.raises(UserError, match=rf"its matrices are torch\.float32, not {kind}\); fold"):
            open_source(path).folded()


def test_mistakes_of_the_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "fold", run.path, "--weights", "int4")
    assert code == 2
    assert "int4" in err
    path = folded_command(capsys, run, "int8")
    code, _, err = call(capsys, "fold", path, "--weights", "fp8")
    assert code == 2
    assert "is folded, which cannot be undone; give the run that it was made from" in err
    code, _, err = call(capsys, "export", "hf", path)
    assert code == 2
    assert "cannot be undone" in err
