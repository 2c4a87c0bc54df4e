"""Generation from prompts: `generate` for tokens, `generate_text` for text, with stop strings and streaming."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Literal, cast

from tokenizers import Tokenizer
from torch import Tensor

from angpt.config import Step
from angpt.errors import UserError
from angpt.inference.engine import Engine
from angpt.inference.fold import fold
from angpt.inference.sampling import Sampling
from angpt.models.decoder import Decoder
from angpt.models.folded import Folded
from angpt.operations import kernels_enabled

Prompts = Sequence[Sequence[int]] | Tensor
Watch = Callable[[int, list[int]], bool]
"""Called with a row and its next tokens; returns True to end the row."""

READ_EVERY = 16
"""Tokens between two reads of the output of a GPU; a read waits for the device."""
MAX_CHARACTER_TOKENS = 8
"""More tokens than one character can have; no longer run of tokens is held back as incomplete."""
SLOTS = 64
"""The length of a cache is a multiple of this, or the context."""


def generate(
    model: Folded | Decoder,
    prompts: Prompts,
    new_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    end: int | None = None,
    sliding: bool = False,
    step: Step = "auto",
    watch: Watch | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to `new_tokens`, without the prompt. Prompts may differ in length.

    Args:
        model: A folded model, or a trained one, which is folded first.
        prompts: A list of token ids per row, or a tensor (B, T).
        new_tokens: Largest number of new tokens per row.
        sampling: Temperature and filters.
        seed: Seed of row 0; row b has seed + b, alone or in a batch.
        end: Token that ends a row, and is its last token.
        sliding: Let prompt and new tokens exceed the context: the last tokens of a prompt that fit are read, and each
            new token attends to as many before it as fit. If False, a text that does not fit is an error.
        step: How a decode step is computed; see `config.Step`.
        watch: Called with the new tokens of each row as they are generated; can end the row.
    """
    rows = checked(prompts, model.cfg.vocab_size)
    if new_tokens < 1:
        raise UserError(f"new_tokens must be at least one token, not {new_tokens}")
    folded = model if isinstance(model, Folded) else fold(model)
    rows, slots = fit(rows, new_tokens, folded.cfg.context, sliding)
    settings = (len(rows), slots, new_tokens, sampling or Sampling(), step)
    engine = folded.engine  # of the last call, with its captured graphs
    if not isinstance(engine, Engine) or engine.settings != (*settings, kernels_enabled()):
        # A model owns its engine, so the engine must not own the model: a cycle would keep both in memory.
        engine = folded.engine = Engine(cast(Folded, weakref.proxy(folded)), *settings)
    engine.start(rows, seed)
    return collect(engine, end, watch)


def collect(engine: Engine, end: int | None, watch: Watch | None) -> list[list[int]]:
    """Run a started engine until every row has ended or has all its tokens."""
    found: list[list[int]] = [[] for _ in engine.tokens]
    running = set(range(len(found)))
    every = READ_EVERY if engine.tokens.device.type == "cuda" else 1
    if end is None and watch is None:
        every = engine.new_tokens
    seen = 0
    while running and seen < engine.new_tokens:
        while engine.made < min(seen + every, engine.new_tokens):
            engine.advance()
        fresh = engine.read(seen)
        seen = engine.made
        for row in sorted(running):
            tokens = fresh[row]
            if end is not None and end in tokens:
                tokens = tokens[: tokens.index(end) + 1]
                running.discard(row)
            found[row] += tokens
            if watch is not None and watch(row, tokens):
                running.discard(row)
    return found


def checked(prompts: Prompts, vocab_size: int) -> list[list[int]]:
    """The prompts as lists; an error if one is empty or has a token outside the vocabulary."""
    if isinstance(prompts, Tensor) and (prompts.ndim != 2 or prompts.is_floating_point()):
        raise UserError(f"prompts must be token ids of shape (B, T), not {prompts.dtype} {tuple(prompts.shape)}")
    try:
        given = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        rows = [[index(token) for token in prompt] for prompt in given]
    except TypeError as error:
        raise UserError(f"prompts must be a list of token ids per row ({error}); generate_text takes text") from error
    if not rows or any(not row for row in rows):
        raise UserError("each prompt must have at least one token")
    for token in (min(map(min, rows)), max(map(max, rows))):
        if not 0 <= token < vocab_size:
            raise UserError(f"token {token} of a prompt is not in the model's vocabulary of {vocab_size:,}")
    return rows


def fit(rows: list[list[int]], new_tokens: int, context: int, sliding: bool) -> tuple[list[list[int]], int]:
    """The tokens of each prompt that are read, and the slots of the cache that they need."""
    longest = max(map(len, rows))
    if sliding:
        rows = [row[-context:] for row in rows]
    elif longest > context:
        raise UserError(
            f"a prompt of {longest:,} tokens is longer than the model's context of {context:,}; "
            "shorten it, or read its last tokens with sliding=True"
        )
    elif longest + new_tokens > context + 1:  # the last token is not read again
        raise UserError(
            f"a prompt of {longest:,} tokens and {new_tokens:,} new ones do not fit the model's context of "
            f"{context:,}; ask for at most {context + 1 - longest:,}, or exceed the context with sliding=True"
        )
    return rows, min(context, slots_for(max(map(len, rows)) + new_tokens))


def slots_for(tokens: int) -> int:
    """Slots of a cache for texts of up to this many tokens."""
    return -(-tokens // SLOTS) * SLOTS


@dataclass(frozen=True)
class Text:
    """The text that a model generated for a prompt."""

    text: str
    tokens: int
    """Number of tokens generated, including those of a stop string."""
    reason: Literal["end", "stop", "length"]
    """Why it ended: with an end-of-text token, a stop string (not part of the text), or all new tokens."""


def generate_text(
    model: Folded | Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    new_tokens: int,
    sampling: Sampling | None = None,
    *,
    seed: int = 0,
    end: int | None = None,
    stop: Sequence[str] = (),
    sliding: bool = False,
    step: Step = "auto",
    emit: Callable[[int, str], None] | None = None,
) -> list[Text]:
    """The text that follows each prompt. An empty prompt is the beginning of a document, which needs `end`. `emit` is
    called with a row and its next piece of text as it is generated."""
    if any(not s for s in stop):
        raise UserError("a stop string must not be empty")
    rows = [encode(tokenizer, prompt, end) for prompt in prompts]
    writers = [Writer(tokenizer, row, tuple(stop), end) for row in rows]

    def watch(row: int, tokens: list[int]) -> bool:
        piece = writers[row].add(tokens)
        if emit is not None and piece:
            emit(row, piece)
        return writers[row].stopped

    watching = watch if stop or emit is not None else None
    made = generate(model, rows, new_tokens, sampling, seed=seed, end=end, sliding=sliding, step=step, watch=watching)
    texts = []
    for row, (writer, tokens) in enumerate(zip(writers, made, strict=True)):
        if watching is None:
            writer.add(tokens)
        if (rest := writer.finish()) and emit is not None:
            emit(row, rest)
        ended = tokens[-1:] == [end]
        texts.append(Text(writer.text, writer.tokens, "stop" if writer.stopped else "end" if ended else "length"))
    return texts


def encode(tokenizer: Tokenizer, prompt: str, end: int | None) -> list[int]:
    """The tokens of a prompt. An empty one is the end-of-text token, after which a new document begins."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("a prompt is not valid Unicode (half of a surrogate pair); correct it") from error
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    if ids:
        return ids
    if end is None:
        raise UserError("an empty prompt needs an end-of-text token, which the tokenizer lacks; give a prompt")
    return [end]


def started(text: str, stop: str) -> int:
    """Number of characters at the end of the text that begin a stop string, which is not in the text."""
    if not text:
        return 0
    last, n = text[-1], min(len(stop), len(text) + 1)
    while n := stop.rfind(last, 0, n - 1) + 1:  # prefixes that end as the text does, the longest first
        if text.endswith(stop[:n]):
            break
    return n


@dataclass
class Writer:
    """Decodes the tokens of a row into text piece by piece, and finds stop strings in it."""

    tokenizer: Tokenizer
    before: list[int]
    """Tokens before `pending`, at first the prompt: a decoder may treat the first token of a text differently."""
    stop: tuple[str, ...]
    end: int | None
    text: str = ""
    tokens: int = 0
    """Number of tokens up to the end of the row or of a stop string."""
    stopped: bool = False
    returned: int = 0
    """Number of characters that have been returned."""
    pending: list[int] = field(default_factory=list)
    """Tokens that may end inside a character."""

    def __post_init__(self) -> None:
        if self.before == [self.end]:  # an empty prompt
            self.before = []

    def add(self, tokens: list[int]) -> str:
        """The next text, except what may be an incomplete character or the start of a stop string."""
        for token in tokens:
            if self.stopped:
                break
            self.tokens += 1
            if token == self.end:
                break
            self.pending.append(token)
            self._decode(at_end=False)
        held_back = max((started(self.text, s) for s in self.stop), default=0)
        return self._next_piece(0 if self.stopped else held_back)

    def finish(self) -> str:
        """The text that `add` has held back."""
        if not self.stopped:
            self._decode(at_end=True)
        return self._next_piece(0)

    def _decode(self, at_end: bool) -> None:
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        piece, kept = decode(self.before + self.pending)[len(decode(self.before)) :], 0
        if piece.endswith("\ufffd") and not at_end:
            if len(self.pending) < MAX_CHARACTER_TOKENS:
                return
            # Most of them are no character, but the last ones may begin one.
            texts = ((k, decode(self.before + self.pending[:-k])[len(decode(self.before)) :]) for k in (3, 2, 1))
            kept, piece = next(((k, text) for k, text in texts if text and piece.startswith(text)), (0, piece))
        longest = max(map(len, self.stop), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        # A piece of text is enough of what came before, and it begins with a whole character.
        done = self.pending[: len(self.pending) - kept]
        self.before, self.pending = (done if piece else self.before + done), self.pending[len(done) :]
        places = [place for s in self.stop if (place := self.text.find(s, start)) >= 0]
        if places:
            self.stopped = True
            self.text = self.text[: min(places)]

    def _next_piece(self, held_back: int) -> str:
        piece = self.text[self.returned : len(self.text) - held_back]
        self.returned += len(piece)
        return piece
