"""Many ranks compute what one process does."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed

from angpt.config import ModelConfig, OptimizerConfig
from angpt.constraints import largest_violation
from angpt.data.loader import Batch
from angpt.errors import UserError
from angpt.float8 import E4M3
from angpt.models.variants import build
from angpt.training import reducer
from angpt.training.engine import Engine
from angpt.training.plan import make_plan
from angpt.training.ranks import name_attempt
from angpt.training.strategy import SingleProcess, choose_strategy
from angpt.training.watchdog import Watchdog
from tests.training.conftest import small
from tests.training.ranks import environment, free_port, spread

ROOT = Path(__file__).parents[2]
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
    bucket_bytes: int = reducer.BUCKET_BYTES
    optimizer: str = "adam"


def batches():
    rng = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        inputs, others = torch.randint(VOCAB, (2, ROWS, 16), generator=rng)
        known = torch.rand(ROWS, 16, generator=rng) < 0.5  # half can be learned; the loss stays far from 0
        yield Batch(inputs, torch.where(known, inputs, others), None)


def losses_and_norms(case, strategy):
    """Thirty steps; losses, norms of gradients, the largest violation after each step, and the matrices at the end."""
    cfg = ModelConfig(
        architecture=case.architecture, d_model=20, n_layers=2, n_heads=1, d_ff=case.d_ff, vocab_size=VOCAB, context=16,
        rotary_fraction=0.2,
    )  # fmt: skip
    model = build(cfg, seed=1)
    config = OptimizerConfig(name=case.optimizer, weight_decay=0.1, clip=0.3)
    options = {"recompute": case.recompute, "strategy": strategy, "wide_reduce": case.wide_reduce}
    engine = Engine(model, config, case.dtype, case.compiled, **options)
    rank, share = strategy.rank, ROWS // strategy.size
    losses, norms, violations = [], [], []
    for number, batch in enumerate(batches(), start=1):
        loss = engine.backward(batch.rows(rank * share, (rank + 1) * share), min(case.micro_batch, share))
        losses.append((strategy.sum(loss) / strategy.size).item())
        norms.append(engine.step(number, lr=1e-2).item())
        whole = build(cfg)
        whole.load_state_dict({name: full(p) for name, p in model.state_dict().items()})
        violations.append(largest_violation(whole, whole.constraints()))
    return losses, norms, max(violations), {name: p.numpy() for name, p in whole.state_dict().items()}


def full(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def on_ranks(cases):
    reducer.BUCKET_BYTES = cases[0].bucket_bytes
    with choose_strategy(torch.device("cpu"), cases[0].strategy, cases[0].shard_ranks, timeout=900) as strategy:
        return [losses_and_norms(case, strategy) for case in cases]


def compare(case, answers, rel, norms_rel):
    alone = replace(case, compiled=False, recompute=False)
    losses, norms, _, parameters = losses_and_norms(alone, SingleProcess())
    assert losses[-1] < 0.9 * losses[0]
    assert max(norms) > 0.3  # clipping takes part
    for ours in answers:
        assert ours[0] == pytest.approx(losses, rel=rel)
        assert ours[1] == pytest.approx(norms, rel=norms_rel)
        assert ours[2] < 1e-6
        for name, p in parameters.items() if rel < 1e-4 else ():
            np.testing.assert_allclose(ours[3][name], p, rtol=0, atol=1e-2, err_msg=name)


def check(size, cases, rel=1e-5, norms_rel=1e-3):
    """`norms_rel`: tolerance of the norms of gradients, which depend on the parameters more than losses do."""
    answers = spread(on_ranks, size, cases)
    for i, case in enumerate(cases):
        compare(case, [answer[i] for answer in answers], rel, norms_rel)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks(strategy):
    """All architectures on the same global batch, in one pass and in two."""
    check(2, [Case("gpt+", strategy), Case("ngpt", strategy, micro_batch=2), Case("angpt", strategy, micro_batch=2)])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_with_muon(strategy):
    """Two matrices of each shape: each rank orthogonalizes one."""
    check(2, [Case(a, strategy, micro_batch=2, optimizer="muon") for a in ("ngpt", "angpt")])


def test_several_buckets():
    """The model has about 60 kB of gradients: some buckets are sent during the backward pass."""
    check(2, [Case(micro_batch=m, bucket_bytes=10_000) for m in (8, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_and_four_ranks(strategy, size):
    check(size, [Case(a, strategy, micro_batch=m) for a in (*ARCHITECTURES, "ngpt/bounded") for m in (8, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_and_four_ranks_with_muon(strategy, size):
    """Of four ranks, two have no matrix to work on."""
    check(size, [Case(a, strategy, optimizer="muon") for a in ARCHITECTURES])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_ranks_than_rows(architecture):
    """Six rows of W_uz are shared out as 2, 2, 2, 0."""
    check(4, [Case(architecture, "fsdp", d_ff=3, optimizer=optimizer) for optimizer in ("adam", "muon")])


@pytest.mark.slow
def test_hybrid_sharding():
    """Two copies of the model, each shared out over two ranks."""
    muon = [Case("ngpt", "fsdp", shard_ranks=2, micro_batch=1, optimizer="muon")]
    check(4, [Case(a, "fsdp", shard_ranks=2, micro_batch=1) for a in ARCHITECTURES] + muon)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_blocks(strategy):
    check(2, [Case(a, strategy, recompute=True) for a in ARCHITECTURES])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("wide_reduce", [False, True])
def test_bf16(strategy, wide_reduce):
    """Products in bf16 on parameters in fp32; sums over ranks round in bf16, or not at all.

    Tolerances are about five times what was seen: 0.1 % of losses, 0.5 % of norms.
    """
    cases = [Case("angpt", strategy, torch.bfloat16, m, wide_reduce=wide_reduce) for m in (8, 2)]
    check(2, cases, rel=0.005, norms_rel=0.025)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_8_bits(strategy):
    """With DDP the optimizer writes matrices in e4m3; with FSDP bounded ones are gathered in e4m3, those of GPT+ in
    bf16 and then converted. Tolerances are about twice what was seen: 0.4 % of losses, 1.9 % of norms."""
    cases = [Case(a, strategy, E4M3, m) for a, m in (("angpt", 8), ("angpt", 2), ("gpt+", 8), ("ngpt", 8))]
    cases += [Case("angpt", strategy, E4M3, recompute=True), Case("angpt", strategy, E4M3, optimizer="muon")]
    cases += [Case("angpt", strategy, E4M3, compiled=True)]
    check(2, cases, rel=0.008, norms_rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_blocks(strategy):
    check(2, [Case("angpt", strategy, micro_batch=2, compiled=True, recompute=r) for r in (False, True)])


def test_one_process_pays_nothing():
    """No group, no wrapper, and nothing of torch.distributed that torch itself does not load."""
    code = """
import sys, torch
before = {name for name in sys.modules if name.startswith("torch.distributed")}
import angpt.training.launch, angpt.cli
from tests.optim.test_adam import batches, tiny
from angpt.config import OptimizerConfig
from angpt.training.engine import Engine
from angpt.training.strategy import SingleProcess, choose_strategy
engine = Engine(tiny("ngpt"), OptimizerConfig(weight_decay=0.0), torch.float32, compiled=False)
engine.backward(next(batches(1)), 2)
engine.step(1, 1e-2)
with choose_strategy(torch.device("cpu"), "fsdp", None, 1.0) as strategy:
    assert type(strategy) is SingleProcess
heavy = ("fsdp", "checkpoint", "tensor", "device_mesh", "elastic")
print([name for name in sys.modules if name.startswith("torch.distributed") and name not in before
       and name.split(".")[2:3] and name.split(".")[2] in heavy])
print(type(engine.model).__name__, engine.compute is engine.model)
print(any(p._post_accumulate_grad_hooks for p in engine.model.parameters()))
"""
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == ["[]", "NGPT True", "False"]


def test_a_later_attempt_does_not_read_what_an_earlier_one_wrote():
    """Both talk to one store, as torchrun's restarted ranks do; an earlier rank 1 had asked and got no answer."""
    store = torch.distributed.HashStore()
    store.set("ask/1", "of-long-ago")
    names = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda rank: name_attempt(store, rank, 3, 20.0), range(3)))
        assert len(set(found)) == 1
        names += set(found)
    assert len(set(names)) == 3
    with pytest.raises(UserError, match="rank 1, 2 did not connect"):
        name_attempt(torch.distributed.HashStore(), 0, 3, 0.05)


@pytest.mark.parametrize(
    ("beats", "silent", "words"),
    [
        ((7, 6, 7), (), "rank 1 hangs: the others wait for it"),
        ((7, 7, 7), (2,), "rank 2 hangs: no sign of life for over 1 s"),
        ((7, None, 7), (), "rank 1 hangs: no sign of life"),
        ((7, 7, 7), (), "all ranks hang at the same point"),
    ],
)
def test_the_rank_that_hangs_is_found(beats, silent, words):
    watchdogs = [Watchdog.__new__(Watchdog) for _ in beats]
    store = torch.distributed.HashStore()
    for rank, (watchdog, count) in enumerate(zip(watchdogs, beats, strict=True)):
        watchdog.store, watchdog.rank, watchdog.size, watchdog.beats, watchdog.signs = store, rank, 3, count, 10 * rank
        if count is not None:
            watchdog._sign()
    before = watchdogs[0]._noted()
    for rank, (watchdog, count) in enumerate(zip(watchdogs, beats, strict=True)):
        if count is not None and rank not in silent:
            watchdog._sign()
    assert words in watchdogs[0]._verdict(before, 1.0)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE = '' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' is no number"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK = 'first' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK = 0 must be below WORLD_SIZE = 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 must be below WORLD_SIZE = 2"),
        ({"RANK": "0", "WORLD_SIZE": "²"}, "WORLD_SIZE = '²' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the other ranks were not found at None:None"),
    ],
)
def test_a_broken_environment_is_told(monkeypatch, environment, words):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(words)):
        choose_strategy(torch.device("cpu"), "ddp", None, 1.0)


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, "rank 0: the other ranks were not found at 127.0.0.1:.*waiting for clients"),
        (1, "rank 1: the other ranks were not found at 127.0.0.1:.*Connection refused"),
    ],
)
def test_a_rank_without_the_others_waits_as_long_as_it_is_told(monkeypatch, rank, words):
    for name, value in environment(rank, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    with pytest.raises(UserError, match=words):
        choose_strategy(torch.device("cpu"), "ddp", None, 1.0)
    assert 1 < time.monotonic() - start < 5


def connect_to_one_that_ends(moment):
    """What a rank says, and after how many seconds, if rank 1 ends while they connect."""
    if os.environ["RANK"] == "1":
        setattr(torch.distributed, moment, lambda *_, **__: 1 / 0)
    start = time.monotonic()
    try:
        choose_strategy(torch.device("cpu"), "ddp", None, 2.0)
    except (UserError, ZeroDivisionError) as error:
        return str(error), time.monotonic() - start


@pytest.mark.parametrize("moment", ["init_process_group", "new_group"])
def test_a_rank_does_not_wait_longer_for_one_that_ends_while_they_connect(moment):
    (said, seconds), _ = spread(connect_to_one_that_ends, 2, moment)
    assert said.startswith("rank 0: the other ranks were not found at 127.0.0.1:")
    assert seconds < 10


def test_several_ranks_need_a_batch_that_they_can_share(data):
    config = small(data, batch_tokens=384, micro_batch=4)  # 12 sequences
    assert [make_plan(config, ranks).micro_batch for ranks in (1, 2, 3, 4, 6, 12)] == [4, 3, 4, 3, 2, 1]
    assert [make_plan(config, ranks).micro_steps for ranks in (1, 2, 3, 4, 6, 12)] == [3, 2, 1, 1, 1, 1]
    with pytest.raises(UserError, match="12 sequences, which 5 processes cannot share evenly"):
        make_plan(config, 5)
    with pytest.raises(UserError, match="needs parallel = 'fsdp'"):
        small(data, shard_ranks=2)


def fail_at_the_end():
    """What a rank says if rank 0 fails after all have computed, such as on a full disk."""
    strategy = choose_strategy(torch.device("cpu"), "ddp", None, 20.0)
    try:
        with strategy:
            if strategy.main:
                raise OSError(28, "No space left on device")
    except (OSError, UserError) as error:
        return str(error)


def test_ranks_that_wait_for_one_that_failed_say_so():
    first, second = spread(fail_at_the_end, 2)
    assert "No space left" in first
    assert "rank 1 of 2: lost another rank" in second
