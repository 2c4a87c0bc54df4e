import re
from pathlib import Path

import pytest
import torch

from angpt.bench import footprint as scaling
from angpt.bench.footprint import HOP_BETWEEN, HOP_INSIDE, activation_bytes, matrix_counts, state_bytes, traffic
from angpt.config import ModelConfig, OptimizerConfig
from angpt.models.variants import build
from angpt.training.engine import Engine
from angpt.training.strategy import SingleProcess, choose_strategy
from tests.optim.test_adam import batches
from tests.training.ranks import spread

DOCS = Path(__file__).parents[2] / "docs"
TINY = ModelConfig(architecture="angpt", d_model=32, n_layers=2, n_heads=2, vocab_size=53, context=16)


def test_the_document_is_what_the_code_says_now():
    text = (DOCS / "scaling.md").read_text(encoding="utf-8")
    assert text == scaling.generate(text), "stale: run `make docs`"


@pytest.mark.parametrize(("size", "sequences"), [("0.5B", 8), ("0.5B", 32), ("32M", 32)])
def test_memory_is_near_what_was_measured(size, sequences):
    """docs/performance.md has GPT+, nGPT and anGPT under each heading, GiB in the last column."""
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    measured = re.search(rf"\| {size}, {sequences} sequences: GPT\+.*\n.*\n\| anGPT .*\| ([\d.]+) \|\n", text)
    cfg = ModelConfig.size(size)
    with_all = (state_bytes(cfg, None) + activation_bytes(cfg, sequences * 2048)) / 2**30
    without_gradients = (
        with_all - 2 * scaling.matrix_counts(cfg).matrices / 2**30
    )  # most come when activations have gone
    assert 0.99 * without_gradients < float(measured[1]) < 1.01 * with_all


def held(strategy):
    """Bytes of matrices with moments, copies and gradients after a backward pass."""
    engine = Engine(build(TINY), OptimizerConfig(weight_decay=0.0), torch.bfloat16, compiled=False, strategy=strategy)
    engine.backward(next(batches(1)), 4)
    pairs = zip(engine.optimizer.states, engine.optimizer.gradients(), strict=True)
    matrices = [(s, g) for s, g in pairs if s.parameter.ndim == 2]
    tensors = [t for s, g in matrices for t in (s.weight, s.copy, s.exp_avg, s.exp_avg_sq, g) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def held_on_rank(strategy):
    with choose_strategy(torch.device("cpu"), strategy, None, 300) as chosen:
        return held(chosen)


def test_what_one_process_holds():
    assert held(SingleProcess()) == state_bytes(TINY, None)


@pytest.mark.slow
def test_what_two_ranks_hold():
    assert spread(held_on_rank, 2, "ddp") == [state_bytes(TINY, "ddp")] * 2
    n = matrix_counts(TINY)
    assert sum(spread(held_on_rank, 2, "fsdp")) == n.matrices * 16
    gathered = (n.ends + 2 * n.blocks / 2 + n.ends + n.blocks / 2) * 2
    assert state_bytes(TINY, "fsdp", 2) == n.matrices * 16 / 2 + gathered


def ring(size, chunk):
    """Bytes that each of `size` ranks sends to sum their vectors of `size` chunks around a ring."""
    vectors = [[{rank} for _ in range(size)] for rank in range(size)]
    sent = [0] * size
    for phase, step in [(p, s) for p in ("scatter", "gather") for s in range(size - 1)]:
        first = 0 if phase == "scatter" else 1
        moves = [(r, (r + first - step) % size) for r in range(size)]
        parcels = [(r, i, set(vectors[r][i])) for r, i in moves]
        for rank, i, parcel in parcels:
            vectors[(rank + 1) % size][i] |= parcel
            sent[rank] += chunk
    assert all(len(part) == size for vector in vectors for part in vector)
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_sum_sends_what_a_ring_sends(ranks):
    expected = ring(ranks, chunk=matrix_counts(TINY).matrices * 2 / ranks)
    assert traffic(TINY, "ddp", ranks).inside == pytest.approx(expected[0])
    assert traffic(TINY, "ddp", ranks).between == 0


def test_hybrid_sharding_sends_a_part_between_machines():
    n = matrix_counts(TINY)
    hybrid = traffic(TINY, "fsdp", 16, shards=8)
    assert hybrid.between == ring(2, n.matrices * 2 / 8 / 2)[0]
    assert hybrid.inside == 7 / 8 * 2 * (2 * n.ends + 3 * n.blocks)
    whole = traffic(TINY, "fsdp", 16)
    assert whole.between == 15 / 16 * 2 * (2 * n.ends + 3 * n.blocks) / 8
    tree, ring_of_16 = 4 * HOP_BETWEEN, 14 * HOP_INSIDE + 2 * HOP_BETWEEN
    assert hybrid.latency == pytest.approx(2 * (3 * 7 * HOP_INSIDE + tree))  # two layers
    assert whole.latency == pytest.approx(2 * 3 * ring_of_16)
    assert traffic(TINY, "fsdp", 16, shards=16).between == whole.between
