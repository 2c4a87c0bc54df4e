"""The commands `angpt data prepare` and `angpt data info`: call the library and print."""

from pathlib import Path
from typing import Annotated

import tyro

from angpt.config import PrepareConfig
from angpt.present.terminal import terminal
from angpt.present.words import plural


def prepare(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: Path | None = None,
    config: Annotated[PrepareConfig, tyro.conf.arg(name="")] = PrepareConfig(),  # noqa: B008
) -> None:
    """Tokenize text into a folder to train from. An interrupted run continues where it stopped.

    Args:
        sources: stdlib (the standard library of this Python), hf:NAME (a data set of the Hugging Face hub, streamed),
            or files and folders: .txt .md .py (a document per file), .jsonl .parquet (a document per row), also with
            .gz .xz .zst. Files or folders named train and val are the data set's own splits.
        out: Folder to write; data/ and the name of the source unless given.
        config: How text is prepared.
    """
    from angpt import api
    from angpt.data.prepare import default_name

    folder = out or Path("data") / default_name(sources)
    index = api.prepare(sources, folder, config, progress=True)
    for name, split in (("train", index.train), ("val", index.val)):
        documents, changed = plural(split.documents, "document"), plural(split.replaced, "document")
        replaced = f", invalid UTF-8 replaced in {changed}" if split.replaced else ""
        counts = f"{split.tokens:,} tokens, {documents}, {split.text_bytes / 1e6:,.1f} MB of text"
        terminal().print(f"{folder}/{name}: {counts}{replaced}")


def info(path: Annotated[Path, tyro.conf.Positional], verify: bool = True, top: int = 10) -> None:
    """Counts, checksums, most frequent tokens and a sample of a folder of tokens.

    Args:
        path: A prepared folder, or a folder or file of nanoGPT or llm.c tokens.
        verify: Read all shards again; otherwise only those that have changed since their checksums were compared.
        top: Number of most frequent tokens to show.
    """

    from angpt.data.info import describe, render

    terminal().print(render(describe(path, verify, top)), soft_wrap=False)
