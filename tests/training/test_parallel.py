"""Many ranks compute what one process does."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from angpt.config import ModelConfig, OptimizerConfig
from angpt.data.loader import Batch
from angpt.models.constraints import largest_violation
from angpt.models.variants import build
from angpt.training.engine import Engine
from angpt.training.parallel import connect
from tests.training.ranks import spread

ARCHITECTURES = ("gpt+", "ngpt", "angpt")
VOCAB, ROWS, STEPS = 53, 8, 30  # the vocabulary is a multiple of no number of ranks


@dataclass(frozen=True)
class Case:
    architecture: str = "angpt"
    strategy: str = "ddp"
    dtype: torch.dtype = torch.float32
    micro_batch: int = 8
    shard_ranks: int | None = None
    wide_reduce: bool = False
    recompute: bool = False
    d_ff: int = 42
    compiled: bool = False


def batches():
    rng = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs, others = torch.randint(VOCAB, (2, ROWS, 16), generator=rng)
        known = torch.rand(ROWS, 16, generator=rng) < 0.5  # half can be learned; the loss stays far from 0
        yield Batch(inputs, torch.where(known, inputs, others), None)


def losses_and_norms(case, ranks=None):
    """Thirty steps; losses, norms of gradients, the largest violation after each step, and the matrices at the end."""
    cfg = ModelConfig(
        architecture=case.architecture, d_model=20, n_layers=2, n_heads=1, d_ff=case.d_ff, vocab_size=VOCAB, context=16,
        rotary_fraction=0.2,
    )  # fmt: skip
    model = build(cfg, seed=1)
    config = OptimizerConfig(weight_decay=0.1, clip=0.3)
    options = {"recompute": case.recompute, "ranks": ranks, "wide_reduce": case.wide_reduce}
    engine = Engine(model, config, case.dtype, case.compiled, **options)
    rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
    share = ROWS // size
    losses, norms, violations = [], [], []
    for number, batch in enumerate(batches(), start=1):
        loss = engine.backward(batch.rows(rank * share, (rank + 1) * share), min(case.micro_batch, share))
        losses.append((ranks.sum(loss) / size if ranks else loss).item())
        norms.append(engine.step(number, lr=1e-2).item())
        whole = build(cfg)
        whole.load_state_dict({name: full(p) for name, p in model.state_dict().items()})
        violations.append(largest_violation(whole, whole.constraints()))
    return losses, norms, max(violations), {name: p.numpy() for name, p in whole.state_dict().items()}


def full(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def on_ranks(cases):
    with connect(torch.device("cpu"), cases[0].strategy, cases[0].shard_ranks, timeout=900) as ranks:
        return [losses_and_norms(case, ranks) for case in cases]


def compare(case, answers, rel=1e-5):
    losses, norms, _, parameters = losses_and_norms(replace(case, strategy="none", compiled=False, recompute=False))
    assert losses[-1] < 0.9 * losses[0]
    assert max(norms) > 0.3  # clipping takes part
    for ours in answers:
        assert ours[0] == pytest.approx(losses, rel=rel)
        assert ours[1] == pytest.approx(norms, rel=100 * rel)
        assert ours[2] < 1e-6
        for name, p in parameters.items() if rel < 1e-4 else ():
            np.testing.assert_allclose(ours[3][name], p, rtol=0, atol=1e-2, err_msg=name)


def check(size, cases, rel=1e-5):
    answers = spread(on_ranks, size, cases)
    for i, case in enumerate(cases):
        compare(case, [answer[i] for answer in answers], rel)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks(strategy):
    """All architectures on the same global batch; with passes of half a rank's rows, too."""
    cases = [Case(a, strategy, micro_batch=m) for a in ARCHITECTURES for m in (8, 2)]
    check(2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_and_four_ranks(strategy, size):
    check(size, [Case(a, strategy, micro_batch=m) for a in (*ARCHITECTURES, "ngpt/bounded") for m in (8, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_ranks_than_rows(architecture):
    """Six rows of W_uz are shared out as 2, 2, 2, 0."""
    check(4, [Case(architecture, "fsdp", d_ff=3)])


@pytest.mark.slow
def test_hybrid_sharding():
    """Two copies of the model, each shared out over two ranks."""
    check(4, [Case(a, "fsdp", shard_ranks=2, micro_batch=1) for a in ARCHITECTURES])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_blocks(strategy):
    check(2, [Case(a, strategy, recompute=True) for a in ARCHITECTURES])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("wide_reduce", [False, True])
def test_bf16(strategy, wide_reduce):
    """Products in bf16 on parameters in fp32; sums over ranks round in bf16, or not at all."""
    cases = [Case("angpt", strategy, torch.bfloat16, m, wide_reduce=wide_reduce) for m in (8, 2)]
    check(2, cases, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_blocks(strategy):
    check(2, [Case("angpt", strategy, micro_batch=2, compiled=True, recompute=r) for r in (False, True)])
