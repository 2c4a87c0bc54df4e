"""The commands `angpt data prepare` and `angpt data info`: call the library and print."""

from pathlib import Path
from typing import Annotated

import tyro

from angpt.errors import UserError


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: Path | None = None,
    tokenizer: str | None = None,
    column: str = "text",
    subset: str | None = None,
    hub_split: str | None = None,
    val_fraction: float | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> None:
    """Tokenize text into a folder to train from. A run that was interrupted goes on where it stopped.

    Args:
        sources: stdlib (the standard library of this Python), hf:NAME (a data set of the Hugging Face hub, streamed),
            or files and folders: .txt .md .py (a document per file), .jsonl .parquet (a document per row), also with
            .gz .xz .zst. Files named train and val, or folders of these names, are the data set's own splits.
        out: Folder to write; data/ and the name of the source unless given.
        tokenizer: A tokenizer.json (or a folder with one), bytes, bpe:N (trained on the text), or a name on the hub.
            EleutherAI/gpt-neox-20b unless given; bpe:2048 for stdlib.
        column: The column that holds the text, in .jsonl, .parquet and data sets of the hub.
        subset: Configuration of a data set of the hub.
        hub_split: Split of a data set of the hub to take documents from, in place of its train and validation splits.
        val_fraction: Part of the documents held out where the data has no validation split of its own; 0.01 unless
            given, 0.05 for stdlib.
        seed: Of the choice of the documents that are held out.
        workers: Threads that tokenize; one per core unless given. The result does not depend on it.
    """
    from rich.console import Console

    from angpt.data.prepare import prepare as prepare_folder

    folder = out or Path("data") / default_name(sources)
    index = prepare_folder(
        sources,
        folder,
        tokenizer=tokenizer,
        column=column,
        subset=subset,
        hub_split=hub_split,
        val_fraction=val_fraction,
        seed=seed,
        workers=workers,
    )
    console = Console()
    for name, split in (("train", index.train), ("val", index.val)):
        replaced = f", invalid UTF-8 replaced in {split.replaced:,} documents" if split.replaced else ""
        console.print(
            f"{folder}/{name}: {split.tokens:,} tokens, {split.documents:,} documents, "
            f"{split.text_bytes / 1e6:,.1f} MB of text{replaced}",
            highlight=False,
            soft_wrap=True,
        )


def info(path: Annotated[Path, tyro.conf.Positional], verify: bool = True, top: int = 10) -> None:
    """Counts, checksums, most frequent tokens and a sample of a folder of tokens.

    Args:
        path: A prepared folder, or a folder or file of nanoGPT or llm.c tokens.
        verify: Compare the checksums of all shards with the index.
        top: How many of the most frequent tokens to show.
    """
    from rich.console import Console

    from angpt.data.info import describe, render

    Console().print(render(describe(path, verify, top)))


def default_name(sources: tuple[str, ...]) -> str:
    """stdlib, the name of a folder, of a file without its suffixes, or of a data set of the hub without its owner."""
    if len(sources) != 1:
        raise UserError("name one source (stdlib, hf:NAME, a file, a folder), or several and the folder with --out")
    path = Path(sources[0].removeprefix("hf:")).resolve()
    return path.name.split(".")[0] if path.is_file() else path.name
