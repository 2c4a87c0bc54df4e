"""Adam, the constraint and the copy in one kernel, against the plain step."""

import pytest
import torch

from angpt.constraints import Constraint
from angpt.float8 import E4M3, WEIGHT_SCALE, to_e4m3
from angpt.operations import kernels as kernels_set
from angpt.optim.adam import adam_
from angpt.optim.muon import descend_
from angpt.optim.optimizer import square_sum
from angpt.optim.states import ParameterState
from tests.triton_anywhere import DEVICE, ON_GPU, kernels_apply  # noqa: F401


@pytest.mark.parametrize(("width", "takes"), [(16_384, True), (16_385, False)])
def test_the_widest_rows_are_left_to_the_plain_step(width, takes, monkeypatch):
    """The kernels have a whole row in registers; the results do not depend on which form is taken."""
    monkeypatch.setattr("angpt.fast.optimizer._is_matrix_on_gpu", lambda x: x.ndim == 2)
    launched = []
    for operation in (adam_, descend_):
        fast = operation.fast
        monkeypatch.setattr(operation, "fast", lambda *a, f=fast, **k: (launched.append(1), f(*a, **k)))
    weight = torch.randn(3, width, device=DEVICE)
    gradient, moments = torch.randn_like(weight), (torch.rand_like(weight), torch.rand_like(weight))
    clip = torch.tensor(0.5, device=DEVICE)

    def after(kind):
        state = ParameterState(weight, weight.clone(), None, *(m.clone() for m in moments), 0.1, Constraint("bound", 1))
        with kernels_set(kind):
            adam_([state], [gradient.clone()], clip, lr=0.1, betas=(0.9, 0.95), eps=1e-9, step=3)
            descend_([state], [gradient], 0.1, 2.0)
        return state.weight

    plain, chosen = after("off"), after("auto")
    assert len(launched) == 2 * takes
    torch.testing.assert_close(chosen, plain, rtol=1e-5, atol=1e-7)
    assert chosen.norm(dim=1).tolist() == pytest.approx([1, 1, 1], rel=1e-5)


@pytest.mark.parametrize(("dtype", "takes"), [(torch.float32, True), (torch.bfloat16, True), (torch.float64, False)])
def test_precisions_that_the_kernels_cannot_read_are_left_to_the_plain_step(dtype, takes, monkeypatch):
    monkeypatch.setattr("angpt.fast.optimizer._is_matrix_on_gpu", lambda x: x.ndim == 2)
    weight = torch.randn(16, 16, device=DEVICE)
    state = ParameterState(weight, weight, None, weight.clone(), weight.clone(), 0.1, None)
    assert adam_.applies([state], [weight.to(dtype)]) == takes
    assert descend_.applies([state], [weight.to(dtype)], 0.1, 2.0) == takes
    assert square_sum.applies([weight.to(dtype)]) == takes


@pytest.mark.parametrize("shape", [(300, 100), (64, 256), (77, 33), (70, 1040)])
@pytest.mark.parametrize(
    "constraint", [None, *(Constraint(kind, dim) for kind in ("bound", "unit") for dim in (0, 1))], ids=str
)
def test_the_kernel_does_what_the_plain_step_does(shape, constraint):
    from angpt.fast import optimizer_kernels as kernels

    # Several matrices in one launch, of different lengths; another gradient and no copy for the last.
    weights = [torch.randn(rows, shape[1], device=DEVICE) / shape[1] ** 0.5 for rows in (shape[0], 60, shape[0])]
    moments = [(torch.randn_like(w) * 0.01, torch.rand_like(w) * 1e-4) for w in weights]
    gradients = [torch.randn_like(w) * 0.01 for w in weights]
    gradients[:2] = [g.bfloat16() for g in gradients[:2]]
    plain, fast = (
        [
            ParameterState(w, w.clone(), w.bfloat16() if i < 2 else None, m.clone(), v.clone(), 0.1, constraint)
            for i, (w, (m, v)) in enumerate(zip(weights, moments, strict=True))
        ]
        for _ in range(2)
    )
    clip = torch.tensor(0.5, device=DEVICE)
    numbers = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-9, "step": 3}
    adam_.plain(plain, [g.clone() for g in gradients], clip, **numbers)
    kernels.adam_(fast, gradients, clip, **numbers)
    for one, other in zip(fast, plain, strict=True):
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=2e-6, atol=1e-7)
        if one.copy is not None:
            # The interpreter cuts numbers off where the GPU rounds them.
            torch.testing.assert_close(one.copy, one.weight.bfloat16(), rtol=0 if ON_GPU else 2**-7, atol=0)
    w, m = weights[0], moments[0][0]
    for dtype in (torch.float32, torch.bfloat16):
        a, b = w.to(dtype), m.to(dtype)
        expected = torch.cat([a, b]).double().square().sum().item()
        assert kernels.square_sum([a, b]).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("constraint", [Constraint("bound", 1), Constraint("unit", 0)], ids=str)
def test_copies_in_e4m3_are_written_with_their_scale(constraint):
    rng = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(64, 48, generator=rng).to(DEVICE) for _ in range(2))
    moments = (torch.rand(64, 48, generator=rng).to(DEVICE) for _ in range(2))
    state = ParameterState(weight, weight, torch.zeros_like(weight, dtype=E4M3), *moments, 0.1, constraint)
    from angpt.fast import optimizer_kernels

    optimizer_kernels.adam_(
        [state], [gradient], torch.tensor(0.5, device=DEVICE), lr=0.1, betas=(0.9, 0.95), eps=1e-9, step=3
    )
    expected, scaled = to_e4m3(state.weight, WEIGHT_SCALE).float(), state.weight.float() * WEIGHT_SCALE
    exponent = torch.log2(expected.abs())
    carried = (exponent == exponent.round()) & (scaled.abs() < expected.abs())  # the interpreter halves these
    compared = torch.ones_like(carried) if ON_GPU else ~carried
    assert compared.float().mean() > 0.9
    torch.testing.assert_close(state.copy.float()[compared], expected[compared], rtol=0, atol=0)
