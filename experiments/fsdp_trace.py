"""FSDP on one rank against one process on a GPU: the same weights and batches, losses and gradients step by step.

    python experiments/fsdp_trace.py

Each line compares two runs of 20 steps: the difference of the first loss, the largest relative difference of a first
gradient, and the differences of the losses after 5, 10 and 20 steps. docs/scaling.md has the result."""

import os
from collections.abc import Iterator

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}

import torch
from torch import Tensor

from angpt.config import ModelConfig, OptimizerConfig
from angpt.data.loader import Batch
from angpt.models.variants import build
from angpt.operations import kernels
from angpt.training.engine import Engine
from angpt.training.strategy import FSDP, SingleProcess, Strategy

STEPS, ROWS, VOCABULARY, CONTEXT = 20, 16, 2048, 512
RATES = {"gpt+": 0.004, "ngpt": 0.008, "angpt": 0.008}
DEVICE = torch.device("cuda")


def batches() -> Iterator[Batch]:
    """Random tokens with the frequencies of words."""
    rng, frequencies = torch.Generator().manual_seed(0), 1 / torch.arange(1.0, VOCABULARY + 1)
    for _ in range(STEPS):
        drawn = torch.multinomial(frequencies, ROWS * (CONTEXT + 1), replacement=True, generator=rng)
        tokens = drawn.view(ROWS, CONTEXT + 1).to(DEVICE)
        yield Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)


def train(
    architecture: str, dtype: torch.dtype, compiled: bool, strategy: Strategy
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of all steps, and the gradients of the first."""
    torch.compiler.reset()
    cfg = ModelConfig(
        architecture=architecture, d_model=256, n_heads=4, n_layers=4, vocab_size=VOCABULARY, context=CONTEXT
    )
    decay = 0.1 if architecture == "gpt+" else 0.0
    engine = Engine(build(cfg, 0), OptimizerConfig(weight_decay=decay), dtype, compiled, strategy=strategy)
    losses, gradients = [], {}
    for number, batch in enumerate(batches(), start=1):
        losses.append(engine.backward(batch, ROWS))
        if number == 1:
            found = engine.optimizer.gradients()
            gradients = {name: g.float().clone() for name, g in zip(engine.parameters, found, strict=True)}
        engine.step(number, RATES[architecture])
    return torch.stack(losses).double().cpu(), gradients


def difference(one: tuple[Tensor, dict[str, Tensor]], two: tuple[Tensor, dict[str, Tensor]]) -> str:
    relative = {name: ((g - two[1][name]).norm() / g.norm()).item() for name, g in one[1].items()}
    worst, losses = max(relative, key=lambda name: relative[name]), (one[0] - two[0]).abs().tolist()
    return f"{losses[0]:.1e} {relative[worst]:.1e} ({worst}) | {losses[4]:.1e} {losses[9]:.1e} {losses[19]:.1e}"


def main() -> None:
    fsdp, single = FSDP(DEVICE, timeout=3600.0, shard_ranks=None), SingleProcess(DEVICE)
    for architecture in RATES:
        for dtype in (torch.float32, torch.bfloat16):
            runs = {}
            for compiled in (False, True):
                for mode in ("off", "auto"):
                    with kernels(mode):  # type: ignore[arg-type]
                        ours, theirs = (train(architecture, dtype, compiled, s) for s in (fsdp, single))
                    words = f"{architecture} {dtype} {'compiled' if compiled else 'eager'}, kernels {mode}"
                    print(f"{words}: fsdp and one process: {difference(ours, theirs)}", flush=True)
                    runs[compiled, mode] = theirs
            plain, fast = runs[False, "off"], runs[True, "auto"]
            print(f"{architecture} {dtype}: eager without kernels and compiled with: {difference(plain, fast)}")
    fsdp.watchdog.stop()


if __name__ == "__main__":
    main()
