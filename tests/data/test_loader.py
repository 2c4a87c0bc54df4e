import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from angpt.data.loader import Loader, Prefetcher, document_numbers, permute, validation_batches
from angpt.data.shards import TokenData
from angpt.errors import UserError
from tests.data.corpora import prepare, write_jsonl, write_raw


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """1,000 tokens in three files, each its own position, so that a window says where it comes from."""
    folder = tmp_path_factory.mktemp("stream")
    for number, (start, end) in enumerate(((0, 333), (333, 340), (340, 1000))):
        write_raw(folder / f"x_train_{number}.bin", np.arange(start, end))
    return TokenData.open(folder, "train")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 97, 127, 128, 129, 1000, 4095, 4096, 4097, 65537])
def test_permutation_is_one_to_one(n):
    for seed, epoch in ((0, 0), (0, 1), (-1, 3)):
        assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_permutation_is_one_to_one_for_any_size(n, seed, epoch):
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


def test_permutation_works_far_beyond_memory():
    n = 10**15 + 3
    items = np.arange(n - 1000, n)
    image = permute(items, n, 0, 0)
    assert len(np.unique(image)) == 1000
    assert image.min() >= 0
    assert image.max() < n


def test_permutation_looks_random():
    n = 20_000
    orders = [permute(np.arange(n), n, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    bound = 4 / np.sqrt(n)  # four standard deviations of the correlation of independent values
    for order in orders:
        for lag in (1, 2, 141, 142):
            assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < bound
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < bound
        assert np.mean(np.diff(order) == 1) < 10 / n
    for i, first in enumerate(orders):
        for second in orders[i + 1 :]:
            assert abs(np.corrcoef(first, second)[0, 1]) < bound


def test_small_permutations_are_all_reached_about_equally():
    orders = [tuple(permute(np.arange(4), 4, seed, 0)) for seed in range(2400)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert min(counts) > 50
    assert max(counts) < 170


@given(context=st.integers(1, 60), batch=st.sampled_from([4, 8, 12]), seed=st.integers(0, 99), step=st.integers(0, 300))
@settings(max_examples=60)
def test_ranks_share_the_global_batch(stream, context, batch, seed, step):
    loader = Loader(stream, context, batch, seed)
    whole = loader.batch(step)
    assert whole.shape == (batch, context + 1)
    assert whole.dtype == np.int64
    for world in (1, 2, 4):
        parts = [loader.batch(step, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate(parts), whole)


@given(context=st.integers(1, 120), batch=st.integers(1, 20), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_each_epoch_visits_each_window_once(stream, context, batch, seed):
    loader = Loader(stream, context, batch, seed)
    n = loader.windows
    assert n == 999 // context
    rows = np.concatenate([loader.batch(step) for step in range(-(-2 * n // batch))])
    assert np.array_equal(rows, rows[:, :1] + np.arange(context + 1))
    for epoch in range(2):
        starts = rows[epoch * n : (epoch + 1) * n, 0]
        assert np.array_equal(np.sort(starts), np.arange(n) * context)


def test_epochs_and_seeds_have_orders_of_their_own(stream):
    first, second = Loader(stream, 1, 999, seed=0), Loader(stream, 1, 999, seed=1)
    assert not np.array_equal(first.batch(0), first.batch(1))
    assert not np.array_equal(first.batch(0), second.batch(0))
    assert np.array_equal(first.batch(1), Loader(stream, 1, 999, seed=0).batch(1))


def test_a_batch_may_hold_several_epochs(stream):
    loader = Loader(stream, 400, 10, seed=0)
    assert loader.windows == 2
    starts = loader.batch(3)[:, 0].reshape(5, 2)
    assert all(set(pair) == {0, 400} for pair in starts.tolist())


def test_a_batch_of_many_epochs_takes_as_long_as_its_windows(tmp_path, monkeypatch):
    """Not as long as its windows times its epochs. The order of windows takes most of the time, and is left out."""
    monkeypatch.setattr("angpt.data.loader.permute", lambda items, *_: items)
    write_raw(tmp_path / "x_train_0.bin", np.arange(1000))
    data = TokenData.open(tmp_path, "train")

    def taken(batch, steps):
        start = time.process_time()
        for step in range(steps):
            Loader(data, 8, batch, seed=0).batch(step)
        return time.process_time() - start

    few, many = (min(taken(*case) for _ in range(3)) for case in ((1 << 12, 128), (1 << 19, 1)))  # other load: slower
    assert many < 4 * few


def test_uneven_ranks_and_too_few_tokens_are_errors(stream):
    with pytest.raises(UserError, match="10 windows cannot be divided evenly among 4 ranks"):
        Loader(stream, 8, 10, 0).batch(0, 0, 4)
    assert Loader(stream, 999, 1, 0).windows == 1
    with pytest.raises(UserError, match=r"1,000 tokens in train are too few for one window of 1,000 \+ 1"):
        Loader(stream, 1000, 1, 0)


def test_validation_is_in_order(stream):
    batches = list(validation_batches(stream, 100, 4))
    assert [len(batch) for batch in batches] == [4, 4, 1]
    assert np.array_equal(np.concatenate(batches)[:, 0], np.arange(9) * 100)
    spread = list(validation_batches(stream, 100, 4, max_windows=5))
    assert [len(batch) for batch in spread] == [4, 1]
    assert np.concatenate(spread)[:, 0].tolist() == [0, 100, 300, 500, 700]


def test_prefetcher_gives_the_batches_of_the_loader(stream):
    loader = Loader(stream, 16, 4, seed=3)
    with Prefetcher(loader, start=5, rank=1, world=2) as batches:
        for step, batch in zip(range(5, 25), batches, strict=False):
            expected = torch.from_numpy(loader.batch(step, 1, 2))
            assert torch.equal(batch.inputs, expected[:, :-1])
            assert torch.equal(batch.targets, expected[:, 1:])
            assert batch.inputs.is_contiguous()
            assert batch.targets.is_contiguous()
            assert batch.documents is None
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]
    assert list(batches) == []


def test_prefetcher_raises_the_error_of_its_thread(stream):
    with (
        Prefetcher(Loader(stream, 16, 10, seed=0), start=0, world=4) as batches,
        pytest.raises(UserError, match="evenly"),
    ):
        next(batches)


def test_documents_are_numbered_by_the_ends_before(tmp_path, stream):
    inputs = torch.tensor([[5, 0, 7, 0, 0, 9], [0, 1, 2, 3, 4, 5]])
    assert document_numbers(inputs, 0).tolist() == [[0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1]]
    with pytest.raises(UserError, match="raw tokens do not say where documents end"):
        Prefetcher(Loader(stream, 16, 4, seed=0), start=0, documents=True)
    prepare((str(write_jsonl(tmp_path / "x.jsonl", 50)),), tmp_path / "out", tokenizer="bytes")
    data = TokenData.open(tmp_path / "out", "train")
    with Prefetcher(Loader(data, 512, 4, seed=0), start=0, documents=True) as batches:
        batch = next(batches)
    assert batch.documents is not None
    assert torch.equal(batch.documents, document_numbers(batch.inputs, 256))
    assert batch.documents.max() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetcher_copies_to_the_device(stream):
    loader = Loader(stream, 16, 4, seed=3)
    with Prefetcher(loader, start=0, device="cuda") as batches:
        for step, batch in zip(range(50), batches, strict=False):
            assert batch.inputs.is_cuda
            assert np.array_equal(batch.inputs.cpu().numpy(), loader.batch(step)[:, :-1])
            assert np.array_equal(batch.targets.cpu().numpy(), loader.batch(step)[:, 1:])
