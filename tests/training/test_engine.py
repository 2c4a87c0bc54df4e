"""The fast path computes what the model says."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from angpt.config import OptimizerConfig
from angpt.data.loader import Batch
from angpt.fast.precision import low_precision
from angpt.float8 import E4M3, WEIGHT_SCALE, has_e4m3, to_e4m3
from angpt.models.float8 import float8_linears
from angpt.training.engine import Engine
from tests.optim.test_adam import batches, tiny

CONFIG = OptimizerConfig(weight_decay=0.0)


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_copies_follow_the_parameters_and_vectors_are_shared(architecture):
    model = tiny(architecture)
    engine = Engine(model, CONFIG, torch.bfloat16, compiled=False)
    for number, batch in enumerate(batches(3), start=1):
        engine.backward(batch, 4)
        engine.step(number, 1e-2)
    for (name, p), c in zip(model.named_parameters(), engine.compute.parameters(), strict=True):
        assert p.dtype == torch.float32
        if p.ndim == 2:
            assert c is not p
            torch.testing.assert_close(c, p.bfloat16(), rtol=0, atol=0)
        else:
            assert c is p, name


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_in_8_bits_the_optimizer_writes_the_matrices_that_are_bounded(architecture, optimizer):
    engine = Engine(tiny(architecture), replace(CONFIG, name=optimizer), E4M3, compiled=False)
    for number, batch in enumerate(batches(3), start=1):
        engine.backward(batch, 4 if number == 1 else 2)  # in one pass, and in two
        engine.step(number, 1e-2)
    parameters, found = dict(engine.model.named_parameters()), dict(float8_linears(engine.compute))
    assert len(found) == 8
    for name, part in found.items():
        if architecture == "gpt+":
            assert part.values is None
            torch.testing.assert_close(part.weight, parameters[f"{name}.weight"].bfloat16(), rtol=0, atol=0)
        else:
            expected = to_e4m3(parameters[f"{name}.weight"], WEIGHT_SCALE)
            torch.testing.assert_close(part.values.float(), expected.float(), rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_8_bits_train_as_bf16_does_and_bear_four_times_the_learning_rate(architecture):
    def losses(dtype, lr):
        engine = Engine(tiny(architecture), CONFIG, dtype, compiled=False)
        for number, batch in enumerate(batches(30), start=1):
            yield engine.backward(Batch(batch.inputs, batch.inputs, None), 4).item()
            engine.step(number, lr)

    bf16, fp8 = (list(losses(dtype, 1e-2)) for dtype in (torch.bfloat16, E4M3))
    assert bf16[9] < 0.9 * bf16[0]
    assert fp8[:10] == pytest.approx(bf16[:10], rel=0.02)
    assert fp8[-1] == pytest.approx(bf16[-1], abs=0.05)
    assert all(math.isfinite(loss) and loss < 1.2 * fp8[0] for loss in losses(E4M3, 4e-2))


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt", "gpt+/dyt", "gpt+/ln-scaling", "angpt/no-lerp"])
def test_the_residual_stream_of_a_copy_is_in_its_precision(architecture):
    for dtype in (torch.bfloat16, E4M3):
        compute = low_precision(tiny(architecture), dtype)
        assert compute.hidden_states(next(batches(1)).inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_bf16_trains_as_fp32_does(architecture):
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = Engine(tiny(architecture), CONFIG, dtype, compiled=False)
        for number, batch in enumerate(batches(40), start=1):
            loss = engine.backward(Batch(batch.inputs, batch.inputs, None), 4)  # something that can be learned
            engine.step(number, 1e-2)
        ends.append(loss.item())
    assert ends[0] < 2.5
    assert ends[1] == pytest.approx(ends[0], rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_passes_add_up_in_fp32(dtype):
    """The gradient of four passes is the mean of the four, not rounded in between."""
    batch = next(batches(1))
    engine = Engine(tiny("angpt"), CONFIG, dtype, compiled=False)
    parts = []
    for i in range(4):
        engine.backward(batch.rows(i, i + 1), 1)
        parts.append([g.float() for g in engine.optimizer.gradients()])
        engine.optimizer.zero_grad()
    engine.backward(batch, 1)
    for i, gradient in enumerate(engine.optimizer.gradients()):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, sum(p[i] for p in parts), rtol=1e-5, atol=1e-7)


def test_passes_cover_the_batch():
    engine = Engine(tiny("gpt+"), CONFIG, torch.float32, compiled=False)
    for micro_batch in (3, 8):
        with pytest.raises(ValueError, match="no multiple"):
            engine.backward(next(batches(1)), micro_batch)


def test_a_padded_batch_has_the_same_loss():
    batch = next(batches(1))
    engine = Engine(tiny("gpt+"), CONFIG, torch.float32, compiled=False)
    padded = batch.padded(7)
    assert padded.inputs.shape == (7, 16)
    assert engine.loss(padded).item() == pytest.approx(engine.loss(batch).item(), rel=1e-6)
    assert batch.padded(4) is batch


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_compiled_is_eager_in_8_bits(architecture):
    """Up to the rounding of bf16, which the compiler leaves out between operations that it fuses."""
    gradients = []
    for compiled in (False, True):
        torch.compiler.reset()
        engine = Engine(tiny(architecture), CONFIG, E4M3, compiled)
        engine.backward(next(batches(1)), 4)
        gradients.append(torch.cat([g.float().flatten() for g in engine.optimizer.gradients()]))
    assert (gradients[1] - gradients[0]).norm() < 0.04 * gradients[0].norm()
    assert gradients[1].unique().numel() > 0.5 * gradients[0].unique().numel()  # the compiler did not round to 8 bits


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt", "gpt+/ln-scaling"])
def test_compiled_is_eager(architecture, recompute):
    losses, before = [], counters["stats"]["unique_graphs"]
    for compiled in (False, True):
        torch.compiler.reset()
        engine = Engine(tiny(architecture), CONFIG, torch.float32, compiled, recompute=recompute)
        for number, batch in enumerate(batches(5), start=1):
            losses.append(engine.backward(batch, 4).item())
            engine.step(number, 1e-2)
        losses.append(engine.loss(batch).item())
    assert losses[6:] == pytest.approx(losses[:6], rel=1e-5)
    parts = 1 + ("gpt+" in architecture)  # a block for all, and GPT+'s last norm; for training and for evaluation
    assert counters["stats"]["unique_graphs"] - before == 2 * parts


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
in_both_precisions = pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "fp8"])


def on_gpu(architecture, dtype, passes=1):
    """An engine that has made a pass, so that nothing is left to be compiled; and batches."""
    if dtype == E4M3 and not has_e4m3(torch.device("cuda")):
        pytest.skip("the GPU has no products in 8 bits")
    engine = Engine(tiny(architecture).cuda(), CONFIG, dtype, compiled=True)
    steps = [batch.map(Tensor.cuda) for batch in batches(6)]
    engine.backward(steps[0], 4 // passes)
    engine.optimizer.zero_grad()
    return engine, steps


def trained(engine, steps, passes=1, between=lambda: None):
    """Loss and norm of the gradient in each step."""
    ends = []
    for number, batch in enumerate(steps, start=1):
        loss = engine.backward(batch, 4 // passes)
        norm = engine.step(number, 1e-2)
        ends.append((loss.item(), norm.item()))
        between()
    return torch.tensor(ends)


def close(found, expected, dtype):
    """Attention sums in any order. Where bf16 then rounds otherwise, e4m3 may, by up to 6 %: on the CPU, with attention
    off by one rounding in places, norms of gradients in fp8 were off by up to 12 times as much as in bf16."""
    torch.testing.assert_close(found, expected, rtol=2e-2 if dtype == E4M3 else 2e-3, atol=0)


@needs_gpu
@in_both_precisions
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_a_recorded_pass_trains_as_the_pass_does(architecture, passes, dtype, monkeypatch):
    expected = trained(*on_gpu(architecture, dtype, passes), passes)
    engine, steps = on_gpu(architecture, dtype, passes)
    engine.record(steps[0].rows(0, 4 // passes))
    assert engine.recorded is not None
    monkeypatch.setattr(engine.compute, "forward", None)  # from here on, the graph alone
    close(trained(engine, steps, passes), expected, dtype)


@needs_gpu
@in_both_precisions
@pytest.mark.parametrize("architecture", ["gpt+", "angpt"])
def test_what_is_computed_between_recorded_passes_does_not_disturb_them(architecture, dtype):
    expected = trained(*on_gpu(architecture, dtype))
    engine, steps = on_gpu(architecture, dtype)
    engine.record(steps[0])
    numbers = torch.arange(steps[0].inputs.shape[1], device="cuda").expand_as(steps[0].inputs) // 5
    masked = Batch(steps[0].inputs, steps[0].targets, numbers)

    def between():
        assert not engine.recorded.fits(masked)
        plain = low_precision(engine.model, dtype)
        for batch in (masked, steps[0].rows(0, 2)):  # of another kind, of another size
            assert engine.loss(batch).item() == pytest.approx(plain(*batch).item(), rel=1e-2)

    close(trained(engine, steps, between=between), expected, dtype)


@needs_gpu
@in_both_precisions
def test_training_goes_on_where_no_graph_can_be_made(dtype, monkeypatch):
    expected = trained(*on_gpu("angpt", dtype))
    engine, steps = on_gpu("angpt", dtype)
    forward = engine.compute.forward

    def waits(*args):
        torch.cuda.synchronize()  # which cannot be recorded
        return forward(*args)

    monkeypatch.setattr(engine.compute, "forward", waits)
    with pytest.warns(UserWarning, match="without a CUDA graph"):
        engine.record(steps[0])
    assert engine.recorded is None
    close(trained(engine, steps), expected, dtype)
