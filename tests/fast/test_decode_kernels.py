"""A decode step by the kernels against the same step by plain operations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from angpt.errors import UserError
from angpt.fast.decode import by_kernels, supports
from angpt.float8 import has_e4m3
from angpt.inference.engine import Engine, PromptReader, padded, reader_of, shown_slots
from angpt.inference.fold import fold
from angpt.inference.generate import generate
from angpt.inference.quantize import quantize
from angpt.inference.sampling import GREEDY
from angpt.models.folded import Cache, Folded, decode_step, read_prompts
from angpt.models.variants import ARCHITECTURES
from tests.models.conftest import some_tokens, tiny
from tests.triton_anywhere import DEVICE, DTYPE, ON_GPU, kernels_apply  # noqa: F401

NAMES = sorted(set(ARCHITECTURES) - {"gpt+/dyt"})
ROUNDING = 0.02 if ON_GPU else 1e-5
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


def folded(*names: str, **sizes: int) -> Folded:
    return fold(tiny(*names, **sizes).float()).prepare(DEVICE, DTYPE)


def step_both_ways(model: Folded, rows: list[int], capacity: int, shown: int, kernels: Any = None):
    """Logits and caches after one step, by plain operations and by a module of kernels: rows are the positions of the
    new tokens."""
    from angpt.fast import decode_kernels

    kernels = kernels or decode_kernels
    generator = torch.Generator().manual_seed(1)
    tokens = some_tokens(len(rows)).to(DEVICE)
    positions = torch.tensor(rows, device=DEVICE)
    found = []
    for decode in (model.decode, lambda *args: kernels.decode(model, *args)):
        generator.manual_seed(1)
        caches = model.make_caches(len(rows), capacity)
        for cache in caches:
            for part in cache:
                part.copy_(torch.randn(part.shape, generator=generator))
        views = [Cache(c.keys[:, :, :shown], c.values[:, :, :shown]) for c in caches]
        found.append((decode(tokens, positions, views, capacity), caches))
    return found


def agree(found) -> None:
    (expected, plain_caches), (logits, caches) = found
    assert (logits - expected).abs().max() <= ROUNDING * expected.abs().max()
    for a, b in zip(plain_caches, caches, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.float() - y.float()).abs().max() <= ROUNDING * x.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_are_the_plain_step(name: str) -> None:
    agree(step_both_ways(folded(name, d_model=32, context=128), [0, 70], 128, 128))


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "capacity", "shown"), [([5, 63, 64], 256, 128), ([127], 256, 128), ([129, 400, 0], 130, 130)]
)
def test_slots_that_are_not_seen_do_not_count(rows: list[int], capacity: int, shown: int) -> None:
    """The part that is shown ends behind the longest row; where the window slides, slots are taken again."""
    agree(step_both_ways(folded(d_model=48, n_heads=3), rows, capacity, shown))


@pytest.mark.parametrize("fraction", [1.0, 0.75, 0.0])
def test_angles_are_those_of_the_model(fraction: float) -> None:
    """Also far beyond the context, where the window slides: angles of the last in fp32 could be off by 0.06."""
    from angpt.fast.decode_kernels import Steps

    model = folded(d_model=32, n_heads=1, rotary_fraction=fraction)
    positions = torch.tensor([0, 1, 2000, 1_000_003], device=DEVICE)
    for found, expected in zip(Steps(model).angles(positions), model.angles(positions), strict=True):
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_width_that_is_no_power_of_two() -> None:
    agree(step_both_ways(folded(d_model=32, d_ff=80), [3], 64, 64))


def needs_e4m3(kind: str) -> None:
    """Skip a test of fp8 weights on a GPU whose kernels cannot read them."""
    if kind == "fp8" and not has_e4m3(torch.device(DEVICE)):
        pytest.skip("needs an Ada GPU or a later one")


def eight_bits(model: Folded, kind: str) -> Folded:
    """The model in 8 bits, its rows of very different lengths, so that a wrong scale shows."""
    needs_e4m3(kind)
    for p in model.parameters():
        if p.ndim == 2:
            p.mul_(torch.logspace(-0.5, 0.5, len(p), device=p.device)[torch.randperm(len(p)), None])
    return quantize(model, kind)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
def test_8_bit_weights_are_read_as_they_are(name: str, kind: str) -> None:
    agree(step_both_ways(eight_bits(folded(name, d_model=32, d_ff=80, context=128), kind), [0, 70, 5], 128, 128))


@torch.no_grad()
def writes_the_plain_tokens(model: Folded, decode: Callable[..., Tensor], count: int, rows: int = 1) -> None:
    """A form of the step against the plain one, along the greedy tokens of the plain one.

    In fp32 the tokens are the same. In bf16 the plain form rounds every product, the kernels do not: the logits agree
    up to rounding, and the tokens wherever the two largest logits differ by more than that.
    """
    prompts = torch.tensor([[1 + row, 2, 3] for row in range(rows)], device=DEVICE)
    lengths = torch.full((rows,), 3, device=DEVICE)
    caches = [model.make_caches(rows, 256) for _ in range(2)]
    logits, _ = (model.prefill(prompts, lengths, part) for part in caches)
    for position in range(3, count + 2):
        tokens, shown = logits.argmax(dim=-1), shown_slots(position, 256)
        args = tokens, torch.full((rows,), position, device=DEVICE)
        views = [[Cache(c.keys[:, :, :shown], c.values[:, :, :shown]) for c in part] for part in caches]
        logits, found = model.decode(*args, views[0], 256), decode(*args, views[1], 256)
        rounding = ROUNDING * logits.abs().max()
        # In bf16 each form reads its own rounded cache, and this is the largest of 10⁵ differences.
        assert (found - logits).abs().max() <= (2 if ON_GPU else 1) * rounding
        best, second = logits.topk(2).values.unbind(dim=-1)
        clear = best - second > rounding if model.dtype == torch.bfloat16 else torch.ones_like(best, dtype=torch.bool)
        assert torch.equal(found.argmax(dim=-1)[clear], logits.argmax(dim=-1)[clear])


FEW = [(name, kind, 200 if ON_GPU else 30) for name in ("gpt+", "ngpt", "angpt") for kind in ("full", "fp8", "int8")]
MANY = [pytest.param(name, "full", 200, marks=(pytest.mark.slow, pytest.mark.long)) for name in NAMES]


@pytest.mark.parametrize(("name", "kind", "count"), FEW + MANY)
def test_greedy_tokens_are_those_of_the_plain_step(name: str, kind: str, count: int) -> None:
    """The model is as small as can be: a step takes a tenth of a second in the interpreter."""
    from angpt.fast import decode_kernels as kernels

    needs_e4m3(kind)
    model = folded(name, n_layers=1, n_heads=1, d_ff=16, context=256)
    model = model if kind == "full" else quantize(model, kind)
    writes_the_plain_tokens(model, partial(kernels.decode, model), count)


def test_what_the_kernels_do_not_know_is_left_to_plain_operations() -> None:
    assert supports(fold(tiny(d_model=32)).prepare("cpu", torch.bfloat16))
    assert not supports(fold(tiny(d_model=32)))
    assert not supports(fold(tiny("gpt+/dyt", d_model=32)).prepare("cpu", torch.bfloat16))
    assert not supports(fold(tiny(d_model=24)).prepare("cpu", torch.bfloat16))
    with pytest.raises(UserError, match="kernels need a GPU"):
        Engine(fold(tiny()), 1, 16, 1, GREEDY, "kernels")


class OnGPU(list[int]):
    """Stands in for tokens on a GPU."""

    is_cuda = True


def default_form(model: Folded, rows: int) -> tuple[bool, bool]:
    """Whether a decode step of this many rows, and the reading of as many prompts, are by kernels by default."""
    return decode_step.applies(model, OnGPU([0] * rows), 0, [], 1), read_prompts.applies(
        model, OnGPU([0] * rows), 0, []
    )


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("capability", "known"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_weights_are_left_to_plain_operations_before_ada(
    kind: str, capability: tuple[int, int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantize(fold(tiny(d_model=32)).prepare("cpu", torch.bfloat16), kind)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports(model)
    monkeypatch.setattr(Folded, "device", torch.device("cuda"))
    assert supports(model) == (known or kind == "int8")


def test_kernels_are_the_default_on_a_gpu() -> None:
    full = fold(tiny(d_model=32)).prepare("cpu", torch.bfloat16)
    for model in (full, quantize(full, "int8"), quantize(full, "fp8")):
        assert [default_form(model, rows) for rows in (1, 5, 128)] == [(True, True)] * 3
    assert default_form(fold(tiny(d_model=32)), 1) == (False, False)  # in fp32
    assert not decode_step.applies(full, torch.tensor([0]), 0, [], 1)
    assert not read_prompts.applies(full, torch.tensor([[0]]), 0, [])


@pytest.mark.parametrize(("rows", "module"), [(2, "decode_kernels"), (3, "rows_kernels")])
def test_a_few_rows_and_many_have_their_own_kernels(rows: int, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from angpt.fast import decode_kernels, rows_kernels

    for kernels in (decode_kernels, rows_kernels):
        monkeypatch.setattr(kernels, "decode", lambda *args, name=kernels.__name__: name)
    assert by_kernels(folded(), OnGPU([0] * rows), 0, [], 1) == f"angpt.fast.{module}"


@needs_gpu
@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
@pytest.mark.parametrize("step", ["plain", "compiled"])
def test_a_captured_step_gives_the_tokens_of_the_cpu(name: str, step: str) -> None:
    model = fold(tiny(name, context=512).float())
    prompts = [[1, 2, 3], [4] * 30]
    expected = generate(model, prompts, 200, GREEDY)
    assert generate(model.prepare("cuda", torch.float32), prompts, 200, GREEDY, step=step) == expected


@needs_gpu
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
def test_captured_kernels_give_the_tokens_of_the_kernels(name: str, rows: int) -> None:
    model = fold(tiny(name, d_model=128, context=512).float()).prepare("cuda", torch.bfloat16)
    prompts = [[1 + row % 20, 2, 3] for row in range(rows)]
    captured = generate(model, prompts, 200, GREEDY, step="kernels")
    engine = Engine(model, rows, 256, 200, GREEDY, "kernels")
    engine.start(prompts, 0)
    with torch.no_grad():
        for _ in range(199):
            engine.step(engine.shown())
            engine.made += 1
            engine.longest += 1
    assert engine.read(0) == captured


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("step", ["plain", "kernels"])
def test_captured_prompts_leave_what_plain_operations_leave(step: str) -> None:
    """The second and third prompts of a length are read by a graph."""
    model = fold(tiny(d_model=128, context=512).float()).prepare("cuda", torch.bfloat16)
    reader = PromptReader(model.make_caches(2, 512), reader_of(model, step), recorded=True)
    for first, second in ((100, 7), (128, 1), (97, 128), (300, 40), (384, 385)):
        prompts = [[1 + i % 20 for i in range(first)], [2 + i % 19 for i in range(second)]]
        caches, lengths = model.make_caches(2, 512), torch.tensor([first, second], device="cuda")
        expected = model.prefill(padded(prompts, max(first, second)).cuda(), lengths, caches)
        agree([(expected, []), (reader(prompts), [])])
        for ours, theirs in zip(reader.caches, caches, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                for row, length in enumerate((first, second)):
                    x, y = a[row, :, :length].float(), b[row, :, :length].float()
                    assert (x - y).abs().max() <= ROUNDING * y.abs().max()
    assert reader.graphs.keys() == {128}
