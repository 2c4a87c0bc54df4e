"""Adam with clipping, decay and constraints in one pass, against its statement in other words."""

import re
import subprocess
import sys

import pytest
import torch

from angpt.config import ModelConfig, OptimizerConfig
from angpt.constraints import constrain, largest_violation
from angpt.data.loader import Batch
from angpt.models.variants import build
from angpt.operations import kernels
from angpt.optim.adam import adam_
from angpt.optim.optimizer import Optimizer, total_norm
from angpt.training.engine import Engine

ARCHITECTURES = ("gpt+", "ngpt", "angpt", "ngpt/bounded", "gpt+/dyt")


def tiny(architecture):
    return build(
        ModelConfig(architecture=architecture, d_model=32, n_layers=2, n_heads=2, vocab_size=53, context=16), seed=1
    )


def batches(count, rows=4):
    rng = torch.Generator().manual_seed(0)
    for _ in range(count):
        tokens = torch.randint(53, (rows, 17), generator=rng)
        yield Batch(tokens[:, :-1], tokens[:, 1:], None)


def adam(model, config):
    return Optimizer(dict(model.named_parameters()), model.constraints(), config)


def test_weight_decay_falls_on_matrices_only():
    states = adam(tiny("gpt+"), OptimizerConfig(weight_decay=0.1)).states
    assert {state.decay for state in states if state.weight.ndim == 2} == {0.1}
    assert {state.decay for state in states if state.weight.ndim != 2} == {0.0}
    assert {state.decay for state in adam(tiny("gpt+"), OptimizerConfig(weight_decay=0.0)).states} == {0.0}


def test_a_step_is_adam_as_written_in_the_paper_of_it():
    """One step by hand: clipped gradient, moments with bias correction, decay."""
    model = tiny("gpt+")
    engine = Engine(model, OptimizerConfig(weight_decay=0.1, clip=0.05), torch.float32, compiled=False)
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    engine.backward(next(batches(1)), 4)
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    norm = engine.step(1, lr=1e-2)
    total = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    assert norm.item() == pytest.approx(total.item(), rel=1e-5)
    for name, p in model.named_parameters():
        gradient = gradients[name] * 0.05 / total
        decay = 0.1 if p.ndim == 2 else 0.0
        expected = before[name] * (1 - 1e-2 * decay) - 1e-2 * gradient / (gradient.abs() + 1e-9)
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fifty_steps_give_the_losses_of_torch_and_a_projection(architecture):
    """The plain path: autograd on the whole batch, clip_grad_norm_, torch's AdamW, and the constraint as a hook."""
    config = OptimizerConfig(weight_decay=0.1, clip=0.5)
    ours, plain = tiny(architecture), tiny(architecture)
    engine = Engine(ours, config, torch.float32, compiled=False)
    groups = [
        {"params": list(plain.matrices().values()), "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(config.beta1, config.beta2), eps=config.eps)
    constrain(optimizer, plain, plain.constraints())
    for number, batch in enumerate(batches(50), start=1):
        loss = engine.backward(batch, micro_batch=2)
        norm = engine.step(number, lr=1e-2 / number)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / number
        expected = plain(*batch)
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert norm.item() == pytest.approx(expected_norm.item(), rel=1e-3)
    assert largest_violation(ours, ours.constraints()) < 1e-6


def test_the_norm_is_that_of_all_elements_together():
    tensors = [torch.randn(3, 5), torch.randn(7), torch.randn(1)]
    assert total_norm(tensors).item() == pytest.approx(torch.cat([x.flatten() for x in tensors]).norm().item())


def test_a_parameter_without_a_gradient_decays_towards_its_moments():
    model = tiny("gpt+")
    optimizer = adam(model, OptimizerConfig(weight_decay=0.1))
    before = model.W_h.weight.detach().clone()
    assert optimizer.step(1, lr=1e-2).item() == 0
    torch.testing.assert_close(model.W_h.weight.detach(), before * (1 - 1e-3))


def test_a_mixed_list_is_split_by_what_the_fast_form_takes(monkeypatch):
    """Matrices go to the fast form in one call, vectors to the plain one; the result is that of the plain form."""
    taken = []

    def fast(states, *args, **options):
        taken.append([state.weight.ndim for state in states])
        adam_.plain(states, *args, **options)

    monkeypatch.setattr(adam_, "fast", fast)
    monkeypatch.setattr(adam_, "applies", lambda states, *_, **__: all(s.weight.ndim == 2 for s in states))
    ours, plain = tiny("gpt+"), tiny("gpt+")
    for model, mode in ((ours, "auto"), (plain, "off")):
        optimizer = adam(model, OptimizerConfig(weight_decay=0.1))
        next(iter(model.parameters())).sum().backward()
        with kernels(mode):
            optimizer.step(1, lr=1e-2)
    assert taken == [[2] * len(ours.matrices())]
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_optimizer_knows_neither_models_nor_training():
    """Importing it loads nothing of them."""
    code = "import sys, angpt.optim.optimizer; print([m for m in sys.modules if m.startswith('angpt.')])"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not re.search(r"angpt\.(models|training|fast|data)", said), said
