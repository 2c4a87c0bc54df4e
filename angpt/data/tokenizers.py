"""Tokenizers: a file, a name on the Hugging Face hub, plain bytes, or a byte-level BPE trained on the spot."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from angpt.data.shards import TOKENIZER
from angpt.errors import UserError

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
TRAIN_BYTES = 50_000_000
"""Text from which a BPE is trained; more changes few merges and costs memory."""


def load_tokenizer(spec: str | Path, train_texts: Iterable[str] = ()) -> Tokenizer:
    """A tokenizer from what the user wrote: `bytes`, `bpe:N`, a file or folder, else a name on the hub.

    Its vocabulary is used as it is: text is never cut nor padded, and the name of a special token inside of a document
    is text as any other, so that an end-of-text token is always the end of a document.
    """
    tokenizer = _load(str(spec), train_texts)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a document."""
    for name in END_NAMES:
        if (token := tokenizer.token_to_id(name)) is not None:
            return token
    raise UserError(f"the tokenizer has no end-of-text token; add one of {' '.join(END_NAMES)} to its vocabulary")


def vocab_size(tokenizer: Tokenizer) -> int:
    """The largest id plus one, which is more than the number of entries where ids are left out."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _load(spec: str, train_texts: Iterable[str]) -> Tokenizer:
    if spec == "bytes":
        return _bytes()
    if spec.startswith("bpe:"):
        return _train_bpe(spec, train_texts)
    path = Path(spec)
    if path.exists() or path.suffix == ".json":
        return _from_file(path / TOKENIZER if path.is_dir() else path)
    try:
        return Tokenizer.from_pretrained(spec)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"tokenizer {spec!r}: cannot be downloaded ({str(error).strip()[:200]}); pass the path of a tokenizer.json"
        ) from error


def _from_file(path: Path) -> Tokenizer:
    if not path.exists():
        raise UserError(f"{path}: no such tokenizer file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path}: is not a file of the package tokenizers ({error})") from error


def _bytes() -> Tokenizer:
    """256 bytes, whose id is their value, and end-of-text."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    _make_byte_level(tokenizer)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def _byte_symbols() -> Iterator[str]:
    """The character by which byte-level tokenizers write each byte: itself if it can be seen, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = 256
    for byte in range(256):
        if byte in visible:
            yield chr(byte)
        else:
            yield chr(hidden)
            hidden += 1


def _train_bpe(spec: str, texts: Iterable[str]) -> Tokenizer:
    size = spec.removeprefix("bpe:")
    if not size.isdecimal() or int(size) < 257:
        raise UserError(f"tokenizer {spec!r}: write bpe:N with N of at least 257 (256 bytes and end-of-text)")
    tokenizer = Tokenizer(models.BPE())
    _make_byte_level(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAIN_BYTES), trainer)
    return tokenizer


def _make_byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()


def _first(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text
        limit -= len(text.encode())
        if limit <= 0:
            return
