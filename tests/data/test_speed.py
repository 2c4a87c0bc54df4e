"""Rates, which need a quiet machine. `pytest -m long -s tests/data/test_speed.py` prints what it measures."""

import itertools
import json
import lzma
import time

import numpy as np
import pytest
from rich.console import Console

from angpt.data.loader import Loader
from angpt.data.shards import TokenData
from angpt.data.tokenizers import load_tokenizer
from tests.data.corpora import NEOX, REAL, prepare, write_raw

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(("context", "batch"), [(2048, 64), (2048, 512), (256, 512)])
def test_the_loader_reads_100_million_tokens_a_second(tmp_path, context, batch):
    write_raw(tmp_path / "train.bin", np.random.default_rng(0).integers(0, 50_000, size=100_000_000))
    loader = Loader(TokenData.open(tmp_path, "train"), context, batch, seed=0)
    steps = max(10, 200_000_000 // (context * batch))
    loader.batch(0)
    start = time.perf_counter()
    for step in range(steps):
        loader.batch(step)
    rate = steps * context * batch / (time.perf_counter() - start)
    print(f"{context} × {batch}: {rate / 1e6:,.0f} million tokens/s")
    assert rate > 100e6


@pytest.mark.skipif(not NEOX.exists(), reason=f"no corpus at {REAL} (set ANGPT_CORPUS)")
def test_preparing_is_nearly_as_fast_as_tokenizing_alone(tmp_path):
    """Against `encode_batch` on texts that lie in memory, the better of three rounds each, in turn."""
    with lzma.open(REAL / "train.jsonl.xz", "rt", encoding="utf-8") as file:
        lines = list(itertools.islice(file, 6000))
    (tmp_path / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = [json.loads(line)["text"] for line in lines]
    tokenizer = load_tokenizer(str(NEOX))
    alone, whole = [], []
    for i in range(3):
        start = time.perf_counter()
        tokenizer.encode_batch(texts)
        alone.append(time.perf_counter() - start)
        start = time.perf_counter()
        prepare((str(tmp_path / "text.jsonl"),), tmp_path / str(i), tokenizer=str(NEOX), console=Console(quiet=True))
        whole.append(time.perf_counter() - start)
    print(f"encode_batch {min(alone):.2f} s, prepare {min(whole):.2f} s")
    assert min(whole) < 1.2 * min(alone)
