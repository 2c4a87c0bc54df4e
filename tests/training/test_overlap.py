"""Ranks with a copy of the model each send gradients while the backward pass still computes others."""

import sys

import pytest
import torch

from angpt.inference.source import open_source
from angpt.training.launch import start
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from tests.training.conftest import small
from tests.training.ranks import spread

RANKS, STEPS, PASSES = 2, 3, 2
SMALL_BUCKET = 4096
"""Bytes: one matrix of the test model has more, one vector fewer."""


def train_and_count(config, out, bucket_bytes):
    """Sizes (elements) of the asynchronous sums that were begun during each backward pass, and of those outside one."""
    import torch.distributed as dist

    if bucket_bytes is not None:
        holders = [m for name, m in sys.modules.items() if name.startswith("angpt.") and hasattr(m, "BUCKET_BYTES")]
        assert holders
        for module in holders:
            module.BUCKET_BYTES = bucket_bytes
    backward, all_reduce = torch.autograd.backward, dist.all_reduce
    passes, outside, current = [], [], []

    def counted_backward(*args, **options):
        current.append([])
        try:
            backward(*args, **options)
        finally:
            passes.append(current.pop())

    def counted_all_reduce(tensor, *args, **options):
        if options.get("async_op"):
            (current[-1] if current else outside).append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    torch.autograd.backward, dist.all_reduce = counted_backward, counted_all_reduce
    start(config, out, Quiet())
    return passes, outside


def train_records(out):
    return [(r["loss"], r["grad_norm"]) for r in Run.open(out).records() if r["kind"] == "train"]


@pytest.mark.parametrize("architecture", ["gpt+", "angpt"])
def test_buckets_are_sent_during_the_last_pass_of_a_step(data, tmp_path, architecture):
    settings = {"tokens": str(STEPS * 256), "micro_batch": 8 // RANKS // PASSES}
    start(small(data, architecture, **settings), tmp_path / "one", Quiet())
    expected = train_records(tmp_path / "one")
    weights = open_source(tmp_path / "one").decoder().state_dict()
    elements = sum(p.numel() for p in weights.values())

    # Of the default size one bucket holds the model, and is sent when the pass is over.
    for name, bucket_bytes, overlaps in (("large", None, False), ("small", SMALL_BUCKET, True)):
        out = tmp_path / name
        config = small(data, architecture, parallel="ddp", **settings)
        for passes, outside in spread(train_and_count, RANKS, config, out, bucket_bytes):
            assert len(passes) == STEPS * PASSES
            for first, last in zip(passes[::PASSES], passes[PASSES - 1 :: PASSES], strict=True):
                assert first == []  # the gradient is not whole before the last pass
                assert len(last) > 1 if overlaps else last == []
            assert sum(map(sum, passes)) + sum(outside) == STEPS * elements  # each gradient once
            if overlaps:
                assert sum(map(sum, passes)) > 0.9 * STEPS * elements

        found = train_records(out)
        assert len(found) == STEPS
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        for key, weight in open_source(out).decoder().state_dict().items():
            torch.testing.assert_close(weight, weights[key], rtol=0, atol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
