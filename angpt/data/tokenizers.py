"""Tokenizers: from a file, from the Hugging Face hub, plain bytes, or a byte-level BPE trained on the text."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from angpt.data.shards import TOKENIZER, TokenData
from angpt.errors import UserError
from angpt.serialization import shown

END_OF_TEXT = "<|endoftext|>"
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
TRAIN_BYTES = 50_000_000
"""Amount of text that a BPE is trained on; more changes few merges and costs memory."""
MOST_TOKENS = 1_000_000
"""Largest vocabulary of a BPE that is trained; the library reserves memory for all of it."""


def load_tokenizer(spec: str | Path, train_texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer that `spec` names: `bytes`, `bpe:N` (trained on `train_texts`), a file or folder, else a hub name.

    Text is never truncated or padded, and the name of a special token inside a document is ordinary text, so that an
    end-of-text token is always the end of a document.
    """
    tokenizer = _load(str(spec), train_texts)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of the tokenizer's file."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def with_fingerprint(tokenizer: Tokenizer, known: str | None) -> Tokenizer | None:
    """The tokenizer if it has this fingerprint, or has it without its post-processor; None if it is another one.

    Post-processors add special tokens, which nothing here asks for; transformers writes one into files without any.
    """
    if known not in (None, fingerprint(tokenizer)):
        tokenizer.post_processor = None
    return tokenizer if known in (None, fingerprint(tokenizer)) else None


def were_made_with(data: TokenData, known: str | None, file: Path | None) -> bool:
    """True if tokens were made with the tokenizer of this fingerprint, whose `file` may be there, or if one of the two
    is unknown. Post-processors may differ."""
    if known is None or data.tokenizer_fingerprint in (None, known):
        return True
    theirs = load_tokenizer(data.path)
    if with_fingerprint(theirs, known) is not None:
        return True
    ours = None if file is None else with_fingerprint(load_tokenizer(file), known)
    if ours is None:
        return False
    ours.post_processor = theirs.post_processor = None
    return fingerprint(ours) == fingerprint(theirs)


def end_token(tokenizer: Tokenizer) -> int | None:
    """Id of the end-of-text token; None if the tokenizer has none."""
    ids = map(tokenizer.token_to_id, END_NAMES)
    return next((token for token in ids if token is not None), None)


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of the end-of-text token; an error if the tokenizer has none."""
    if (token := end_token(tokenizer)) is None:
        raise UserError(f"the tokenizer has no end-of-text token; add one of {' '.join(END_NAMES)} to its vocabulary")
    return token


def vocab_size(tokenizer: Tokenizer) -> int:
    """The largest id plus one, which exceeds the number of entries if ids are skipped."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def check_usable(tokenizer: Tokenizer) -> None:
    """Raise an error unless the tokenizer has a vocabulary and an end-of-text token, and can encode any text."""
    if vocab_size(tokenizer) == 0:
        raise UserError("the tokenizer has no vocabulary; choose another one with --tokenizer")
    end_of_text_id(tokenizer)
    try:
        tokenizer.encode("\ue000\uffff")  # in no vocabulary
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"the tokenizer cannot encode every text ({error}); give it an unknown token") from error


def _load(spec: str, train_texts: Iterable[str]) -> Tokenizer:
    if spec == "bytes":
        return _byte_tokenizer()
    if spec.startswith("bpe:"):
        return _train_bpe(spec, train_texts)
    path = Path(spec, TOKENIZER) if Path(spec).is_dir() else Path(spec)
    local = path.exists() or path.suffix == ".json"
    if local and not path.exists():
        raise UserError(f"{path}: no such tokenizer file")
    try:
        return Tokenizer.from_buffer(path.read_bytes()) if local else Tokenizer.from_pretrained(spec)
    except Exception as error:  # the library raises nothing narrower
        reason = str(error).strip().partition(". ")[0][:200]
        if local:
            raise UserError(f"{path}: is not a tokenizer.json of the package tokenizers ({reason})") from error
        advice = "pass the path of a tokenizer.json, bytes, or bpe:2048 to train one of that size on the text"
        raise UserError(f"{spec!r}: cannot be downloaded ({reason}); {advice}") from error


def _byte_tokenizer() -> Tokenizer:
    """256 bytes, whose ids are their values, and end-of-text."""
    # Byte-level tokenizers write a printable byte as its character and the others as the characters from 256 on.
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = itertools.count(256)
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def _train_bpe(spec: str, texts: Iterable[str]) -> Tokenizer:
    size = spec.removeprefix("bpe:")
    if not re.fullmatch("[0-9]{3,7}", size) or not 257 <= int(size) <= MOST_TOKENS:
        raise UserError(f"tokenizer {shown(spec)}: write bpe:N with N from 257 (bytes, end-of-text) to {MOST_TOKENS:,}")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(texts, TRAIN_BYTES), trainer)
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _first(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The first texts, until they have `limit` bytes."""
    for text in texts:
        yield text
        limit -= len(text.encode())
        if limit <= 0:
            return
