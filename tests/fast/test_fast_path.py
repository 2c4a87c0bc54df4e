"""In bf16 on a GPU, the engine with its kernels and copies ends where plain PyTorch does."""

import copy
import statistics

import pytest
import torch

from angpt.config import ModelConfig, OptimizerConfig
from angpt.constraints import constrain
from angpt.data.loader import Batch
from angpt.fast.precision import low_precision
from angpt.models.variants import build
from angpt.operations import kernels
from angpt.training.engine import Engine, attention_backends

STEPS, ROWS, LAST = 500, 32, 50
VOCABULARY, CONTEXT, NEXT = 4096, 512, 64
SEEDS = range(3)


def chain(device: str) -> torch.Tensor:
    """Tokens of which each has a few possible successors, some of them much more likely than others."""
    torch.manual_seed(0)
    successors = torch.randint(VOCABULARY, (VOCABULARY, NEXT), device=device)
    likely = 1 / torch.arange(1.0, NEXT + 1, device=device)
    tokens = [torch.randint(VOCABULARY, (STEPS * ROWS,), device=device)]
    for _ in range(CONTEXT):
        tokens.append(successors[tokens[-1], torch.multinomial(likely, STEPS * ROWS, replacement=True)])
    return torch.stack(tokens, dim=1).view(STEPS, ROWS, CONTEXT + 1)


def rate(step: int) -> float:
    """Up over 50 steps and down to zero."""
    return 4e-3 * min(1.0, step / 50, (STEPS - step) / 200)


def small(architecture: str, seed: int) -> torch.nn.Module:
    config = ModelConfig(
        architecture=architecture, d_model=256, n_layers=4, n_heads=4, vocab_size=VOCABULARY, context=CONTEXT
    )
    return build(config, seed=seed).cuda()


def fast(architecture: str, seed: int, data: torch.Tensor) -> list[float]:
    engine = Engine(small(architecture, seed), OptimizerConfig(weight_decay=0.1), torch.bfloat16, compiled=True)
    losses = []
    for step, tokens in enumerate(data, start=1):
        losses.append(engine.backward(Batch(tokens[:, :-1], tokens[:, 1:], None), ROWS))
        engine.step(step, rate(step))
    return torch.stack(losses).tolist()


def plain(architecture: str, seed: int, data: torch.Tensor) -> list[float]:
    """Autocast, fp32 residual stream, clip_grad_norm_, PyTorch's AdamW, and a projection after each step."""
    config, model = OptimizerConfig(weight_decay=0.1), small(architecture, seed)
    matrices = list(model.matrices().values())
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    constrain(optimizer, model, model.constraints())
    losses = []
    for step, tokens in enumerate(data, start=1):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bf16 kernels need a CUDA device")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_gradients_do_not_suffer_from_the_compiler(architecture: str, recompute: bool) -> None:
    """Some of its releases lose gradients of autograd functions, without a word, where tensors are aliases."""
    torch.manual_seed(0)
    model = small(architecture, 0)
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.ndim < 2):
            vector.mul_(1 + 0.3 * torch.rand_like(vector))
    exact, eager = copy.deepcopy(model).double(), low_precision(model, torch.bfloat16)
    compiled = Engine(model, OptimizerConfig(), torch.bfloat16, compiled=True, recompute=recompute).compute
    tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1), device="cuda")
    gradients = []
    for each in (exact, eager, compiled):
        each.zero_grad()  # vectors are the same in both
        with attention_backends():
            each(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        found = {name: p.grad.double().clone() for name, p in each.named_parameters()}
        # A single number is a sum with both signs, whose rounding error may exceed it: those of all layers together.
        numbers = [found.pop(name) for name, p in each.named_parameters() if p.numel() == 1]
        gradients.append(found | ({"numbers": torch.cat(numbers)} if numbers else {}))
    for name, truth in gradients[0].items():
        errors = [(x[name] - truth).norm() / truth.norm() for x in gradients[1:]]
        assert max(errors) < 0.3, name
        assert name == "numbers" or errors[1] <= 1.5 * errors[0], name


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bf16 kernels need a CUDA device")
@pytest.mark.parametrize("architecture", ["gpt+", "ngpt", "angpt"])
def test_the_final_loss_is_that_of_the_plain_path(architecture: str) -> None:
    data = chain("cuda")
    ours = [statistics.mean(fast(architecture, seed, data)[-LAST:]) for seed in SEEDS]
    with kernels("off"):
        theirs = [statistics.mean(plain(architecture, seed, data)[-LAST:]) for seed in SEEDS]
    print(f"{architecture}: fast {ours}, plain {theirs}")
    noise = max(statistics.stdev(ours), statistics.stdev(theirs))
    # The difference of two means of three; and neither may hide behind a seed that went astray.
    assert noise < 0.01
    assert abs(statistics.mean(ours) - statistics.mean(theirs)) < 2 * noise * (2 / len(SEEDS)) ** 0.5
