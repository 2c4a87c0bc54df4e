"""Small corpora and token folders for the tests."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from angpt.config import PrepareConfig
from angpt.data.prepare import SHARD_BYTES
from angpt.data.prepare import prepare as prepare_folder
from angpt.data.shards import LLMC_HEADER_BYTES, LLMC_MAGIC, LLMC_VERSION, Index

REAL = Path(os.environ.get("ANGPT_CORPUS", Path(__file__).parents[3] / "shared" / "corpus"))
NEOX = REAL / "gpt-neox-20b-tokenizer.json"


def prepare(
    names: tuple[str, ...],
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    console: Console | None = None,
    **settings: Any,
) -> Index:
    return prepare_folder(names, out, PrepareConfig(**settings), shard_bytes=shard_bytes, console=console)


def write_jsonl(path: Path, documents: int, seed: int = 0, words: int = 40) -> Path:
    """Documents of random words, some of them not ASCII."""
    rng = random.Random(seed)
    vocabulary = ["the", "a", "naïve", "tree", "漢字", "runs", "🙂", "of", "<|endoftext|>", "\n"]
    lines = [json.dumps({"text": " ".join(rng.choices(vocabulary, k=words))}) for _ in range(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_raw(path: Path, tokens: np.ndarray) -> Path:
    tokens.astype("<u2").tofile(path)
    return path


def write_llmc(path: Path, tokens: np.ndarray, claimed: int | None = None, version: int = LLMC_VERSION) -> Path:
    header = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
    header[:3] = LLMC_MAGIC, version, len(tokens) if claimed is None else claimed
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without those that say which process or which copy of the files it was."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*"))}
