"""Products in 8 bits, against the same in float64, and the bounds from which their scales are derived."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from angpt.config import ModelConfig
from angpt.constraints import Constraint
from angpt.fast.precision import low_precision
from angpt.float8 import E4M3, LARGEST, WEIGHT_SCALE, measured_scale, scale_of_bound, to_e4m3
from angpt.models.angpt import AnGPT, AnGPTBlock
from angpt.models.float8 import (
    ROUNDING,
    Float8Product,
    Scale,
    float8_linears,
    gradient_scale,
    input_scales,
    length_in_e4m3,
)
from angpt.models.primitives import LearnedScale, attend, lerp, norm, nu_lerp
from tests.models.conftest import TINY, some_tokens, tiny

# Sign, four bits of exponent with a bias of 7, three of mantissa; 0x7F is NaN.
NUMBERS = sorted({(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)})[:-1]


def nearest(x: float) -> float:
    """The number of e4m3 nearest to x; of two that are equally near the one with an even mantissa."""
    size = abs(x)
    best = min(range(len(NUMBERS)), key=lambda i: (abs(NUMBERS[i] - size), i % 2))
    return math.copysign(NUMBERS[best], x)


@given(st.lists(st.floats(-600, 600) | st.floats(-0.02, 0.02), min_size=1, max_size=50))
def test_conversion_rounds_to_the_nearest_and_saturates(values):
    assert NUMBERS[-1] == LARGEST
    x = torch.tensor(values)
    assert to_e4m3(x, 1.0).float().tolist() == [nearest(v) for v in x.tolist()]


def test_what_is_not_a_number_stays_that():
    assert to_e4m3(torch.tensor([math.nan]), 2.0).isnan().all()
    assert to_e4m3(torch.tensor([math.inf, -1e30]), 2.0).tolist() == [LARGEST, -LARGEST]


@given(st.floats(2**-20, 2**20))
@example(7.0)
@example(math.nextafter(7, 8))
def test_scales_use_the_range_and_do_not_exceed_it(bound):
    scale = scale_of_bound(bound)
    assert LARGEST / 2 < scale * bound <= LARGEST
    assert math.log2(scale).is_integer()


@given(st.floats(2**-20, 2**20, width=32))
@example(7.0)
@example(7.0 + 2**-21)
def test_measured_scales_do_so_up_to_the_rounding_of_fp32(bound):
    scale = measured_scale(torch.tensor([-bound, bound / 2])).item()
    assert LARGEST / 2 < scale * bound <= LARGEST * (1 + 2**-20)
    assert math.log2(scale).is_integer()


def in_e4m3(x, scale):
    """x as e4m3 has it, in float64."""
    return torch.tensor([nearest(v * scale) / scale for v in x.double().flatten().tolist()]).view(x.shape).double()


@pytest.mark.parametrize("stored", [True, False], ids=["matrix in e4m3", "matrix in bf16"])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "measured"])
def test_products_and_gradients_are_those_of_rounded_operands(constant, stored):
    rng = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(*s, generator=rng).bfloat16() for s in ((2, 6, 32), (48, 32), (2, 6, 48)))
    x, weight, dy = x / 8, weight / 8, dy / 64
    s_x, s_w, s_y = (64, 128, 8 * 16) if constant else (measured_scale(t).item() for t in (x, weight, dy))
    values = to_e4m3(weight, s_w) if stored else None
    leaf = torch.zeros((), dtype=torch.bfloat16).expand(48, 32) if stored else weight.clone()
    x.requires_grad_(), leaf.requires_grad_()
    scales = [torch.tensor(float(s)) for s in (s_x, s_w, s_y)]
    known = scales if constant else [None, scales[1] if stored else None, None]
    pairs = [t for s in known for t in ((None, None) if s is None else Scale.of(s))]
    y = Float8Product.apply(x, leaf, values, 1.7, *pairs)
    kept = {t.data_ptr() for t in y.grad_fn.saved_tensors}
    assert (values if stored else leaf).data_ptr() in kept  # no second copy of the matrix is kept for the backward pass
    y.backward(dy)

    x8, w8, dy8 = in_e4m3(x.detach(), s_x), in_e4m3(weight, s_w), in_e4m3(dy, s_y)
    close = {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(y.double(), x8 @ w8.T * 1.7, **close)
    torch.testing.assert_close(x.grad.double(), dy8 @ w8 * 1.7, **close)
    torch.testing.assert_close(leaf.grad.double(), dy8.flatten(0, 1).T @ x8.flatten(0, 1) * 1.7, **close)
    assert leaf.grad.dtype == torch.bfloat16


# Any real α, any unit vectors: |h_i| ≤ √(1 + number of updates), because (1−α)²ν² + α²ν² = 1.
alphas = st.floats(-50, 50)


@settings(deadline=None)
@given(st.lists(alphas, min_size=1, max_size=48), st.integers(0, 2**32), st.integers(1, 40), st.booleans())
def test_the_stream_of_angpt_is_bounded_by_the_number_of_updates(found, seed, width, aligned):
    """In the arithmetic of the model: bf16, with rounding after each norm and each update."""
    rng = torch.Generator().manual_seed(seed)
    axis = torch.zeros(width)
    axis[0] = 1
    draw = (lambda: axis) if aligned else (lambda: torch.randn(width, generator=rng) ** 5)
    h = norm(draw()).bfloat16()
    for count, alpha in enumerate(found, start=1):
        alpha = torch.full((width,), alpha)
        h = lerp(h, norm(draw().bfloat16()), alpha, nu_lerp(alpha))
        assert h.abs().max().item() <= math.sqrt(1 + count) * ROUNDING ** (1 + count)


def test_the_bound_of_the_stream_is_reached():
    """With blocks that all point to one dimension, and the α that lengthens it most."""
    h = torch.ones(1, dtype=torch.float64)
    for _ in range(48):
        alpha = 1 / (1 + h)  # (1−α) : α = h : 1
        h = lerp(h, torch.ones_like(h), alpha, nu_lerp(alpha))
    assert h.item() == pytest.approx(math.sqrt(49))


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(["angpt", "ngpt", "ngpt/bounded", "angpt/no-const"]), st.integers(0, 2**32), st.floats(-3, 3))
def test_no_input_with_a_proof_saturates(architecture, seed, alpha):
    """Weights at their bound, in directions that the tokens share, so that sums add up; any α."""
    model = tiny(architecture, n_layers=3).float()
    rng = torch.Generator().manual_seed(seed)
    constraints = model.constraints()
    with torch.no_grad():
        common = torch.randn(1, 4096, generator=rng)
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.copy_(common[:, : p.shape[1]] + 0.3 * torch.randn(p.shape, generator=rng) ** 3)
                p.div_(p.norm(dim=constraints[name].dim, keepdim=True))
            elif "alpha" in name:
                p.mul_(0).add_(alpha * 0.2)
    found = largest_inputs(model)
    assert max(found.values()) <= LARGEST, found


def largest_inputs(model):
    """The largest entry times scale of W_qkv, W_uz and W_p in a pass. That of W_d is not bounded."""
    compute, largest = low_precision(model, E4M3), {}

    def note(kind, scale, x, _):
        largest[kind] = max(largest.get(kind, 0.0), (x.abs().max() * scale).item())

    for name, part in float8_linears(compute):
        assert part.values.float().abs().max() <= WEIGHT_SCALE
        part.observer = partial(note, name.split(".")[-1], part.x_scale.value)
    with torch.no_grad():
        compute(some_tokens(2, 8))
    del largest["W_d"]
    assert len(largest) == 3
    return largest


@pytest.mark.parametrize("architecture", ["angpt", "ngpt", "ngpt/bounded", "angpt/no-const"])
def test_no_scale_with_a_proof_could_be_twice_as_large(architecture):
    """If tokens and blocks all point to one dimension, which every row reads, with the α that lengthen it most."""
    model = tiny(architecture, n_layers=3, n_heads=4).float()
    constraints = model.constraints()
    with torch.no_grad():
        for name, p in model.matrices().items():
            writes = name.endswith(("W_p.weight", "W_d.weight"))
            p.zero_()[(0,) if writes else (slice(None), 0)] = 1.0
            p.div_(p.norm(dim=constraints[name].dim, keepdim=True).clamp(min=1))
        for update, alpha in enumerate(a for block in model.blocks for a in (block.alpha_a, block.alpha_m)):
            alpha.stored.fill_(alpha.scale / alpha.init / (1 + math.sqrt(1 + update)))
    found = largest_inputs(model)
    assert max(found.values()) <= LARGEST, found
    assert min(found.values()) > LARGEST / 2, found


@settings(deadline=None)
@given(st.lists(st.floats(-20, 0), min_size=1, max_size=300), st.sampled_from([1.0, 32.0, 256.0]))
@example([-8 - 9.99] * 300, 256.0)
def test_the_length_of_a_vector_in_e4m3_is_bounded(powers, scale):
    x = torch.tensor(powers, dtype=torch.float64).exp2()
    rounded = to_e4m3(x.float(), scale).double() / scale
    assert rounded.norm() <= length_in_e4m3(x.norm().item(), scale, len(x)) * (1 + 1e-6)


@given(st.integers(0, 2**32), st.integers(2, 12), st.floats(0.1, 30))
@settings(deadline=None, max_examples=30)
def test_attention_averages(seed, length, gain):
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, length, 8, generator=rng).bfloat16() for _ in range(3))
    out = attend(norm(q), norm(k), v, None, gain)
    assert out.abs().max() <= v.abs().max() * ROUNDING**2


def test_scales_follow_from_what_a_design_declares():
    """24 layers of the 0.5B model: |h| ≤ 7, with rounding 8.5; ν_qkv = 4."""
    shape = {"d_model": 64, "n_heads": 16, "n_layers": 24}
    assert input_scales(tiny("angpt", **shape)) == {"W_qkv": 32, "W_p": 8, "W_uz": 32, "W_d": 256}
    assert input_scales(tiny("ngpt", **shape)) == {"W_qkv": 256, "W_p": 256, "W_uz": 256, "W_d": 8}
    assert input_scales(tiny("angpt/attention-factor", **shape))["W_p"] is None
    for name in (
        "gpt+",
        "gpt+/dyt",
        "angpt/no-lerp",
        "angpt/no-output-norm",
        "angpt/no-residual-factor",
        "angpt/all-x2",
    ):
        assert set(input_scales(tiny(name)).values()) == {None}, name


def test_a_design_that_breaks_a_premise_has_no_constant_scale():
    """anGPT with one change each: the stream is no longer bounded, or rows no longer are."""

    class ScaledEmbedding(AnGPT):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.embed_scale = LearnedScale(1, init=4.0, scale=4.0)

    class NormedInput(AnGPT):
        class Block(AnGPTBlock):
            computes = replace(AnGPTBlock.computes, input="rms")

    def without(matrix):
        def constraints(self):
            return {name: c for name, c in AnGPT.constraints(self).items() if matrix not in name}

        return type("Without", (AnGPT,), {"constraints": constraints})

    class Columns(AnGPT):
        def constraints(self):
            return {name: Constraint("bound", dim=0) for name in self.matrices()}

    cfg = ModelConfig(architecture="angpt", **TINY)
    assert None not in input_scales(AnGPT(cfg)).values()
    assert None not in input_scales(without("W_d")(cfg)).values()  # whose rows no bound needs
    for changed in (ScaledEmbedding, NormedInput, Columns, *map(without, ("W_e", "W_qkv", "blocks.1.W_uz"))):
        assert set(input_scales(changed(cfg)).values()) == {None}, changed


@given(st.floats(1e-3, 1e3), st.integers(1, 3000))
@example(3.0, 3)
def test_gradients_have_a_scale_from_that_of_the_logits(size, tokens):
    """256 · tokens / rms(s_z), rounded down to a power of two, once."""
    model = tiny("angpt").float()
    with torch.no_grad():
        model.s_z.stored.copy_(size * model.s_z.scale / model.s_z.init)
    scale = gradient_scale(model.s_z(), tokens).item()
    assert 128 * (1 - 2**-20) < scale * size / tokens <= 256 * (1 + 2**-20)
    assert math.log2(scale).is_integer()


def test_the_scale_of_gradients_follows_that_of_the_logits_in_every_pass():
    """And the tokens of the pass; also after parameters are loaded, as a run does that resumes."""
    model, other = tiny("angpt").float(), tiny("angpt", seed=5).float()
    compute = low_precision(model, E4M3)
    expected = []
    changes = (lambda: model.s_z.stored.mul_(10), lambda: model.s_z.stored.mul_(0.01), lambda: load(model, other))
    for rows, change in enumerate(changes, start=2):
        with torch.no_grad():
            change()
        tokens = some_tokens(rows, 8)
        exact = 256 * tokens.numel() / model.s_z().square().mean().sqrt().item()
        expected.append(2.0 ** math.floor(math.log2(exact)))
        compute(tokens=tokens, targets=tokens).backward()
        found = [(part.dy_scale.value.item(), part.dy_scale.inverse.item()) for _, part in float8_linears(compute)]
        assert found == [(expected[-1], 1 / expected[-1])] * 8
    assert len(set(expected)) == 3


def load(model, other):
    model.load_state_dict(other.state_dict())


def test_another_forward_pass_may_come_before_the_backward_pass():
    """Each backward pass then has the gradient of its own forward pass, at the scale of the later one."""
    compute = low_precision(tiny("angpt").float(), E4M3)
    first, second = some_tokens(2, 8), some_tokens(2, 8, seed=1)

    def gradient(loss):
        loss.backward()
        found = [p.grad.clone() for p in compute.parameters()]
        compute.zero_grad()
        return found

    expected = [gradient(compute(tokens, tokens)) for tokens in (first, second)]
    losses = [compute(tokens, tokens) for tokens in (first, second)]
    torch.testing.assert_close([gradient(loss) for loss in losses], expected, rtol=0, atol=0)


def test_a_matrix_in_e4m3_takes_a_byte_per_entry():
    for _, part in float8_linears(low_precision(tiny("angpt").float(), E4M3)):
        assert part.values.dtype == E4M3
        assert part.weight.untyped_storage().nbytes() == 2
