"""Tokens from prompts: cached, batched, with an end; and text from text, with stop strings, as it comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer
from torch import Tensor

from angpt.config import Step
from angpt.errors import UserError
from angpt.inference.engine import Engine
from angpt.inference.fold import fold
from angpt.inference.sampling import Sampling
from angpt.models.decoder import Decoder
from angpt.models.folded import Folded

Prompts = Sequence[Sequence[int]] | Tensor
Watch = Callable[[int, list[int]], bool]
"""Called with a row and its next tokens; true ends the row."""

LOOK_EVERY = 16
"""Tokens between two looks of the host at what a GPU has written: a look waits for the device."""
UNSETTLED = 8
"""More tokens than any character is made of: longer than this nothing waits for its last byte."""
SLOTS = 64
"""Caches are made in multiples of this."""


def generate(
    model: Folded | Decoder,
    prompts: Prompts,
    new_tokens: int,
    how: Sampling | None = None,
    *,
    seed: int = 0,
    end: int | None = None,
    sliding: bool = False,
    step: Step = "auto",
    watch: Watch | None = None,
) -> list[list[int]]:
    """Up to `new_tokens` tokens behind each prompt, which may be of different length; the prompts are not repeated.

    Args:
        model: Folded for inference, or any model that can be.
        prompts: A list of token ids per row, or (B, T).
        new_tokens: How many at most.
        how: Temperature and filters.
        seed: Of row 0; row b has seed + b, alone or in a batch.
        end: A row ends with this token, which is its last.
        sliding: Let prompt and new tokens be longer than the context: of a prompt its last tokens are read, and each
            new token attends to as many before it as fit. Without it, this is an error.
        step: How a decode step is computed; see `config.Step`.
        watch: Sees the tokens of each row as they come and can end it.
    """
    rows = checked(prompts, model.cfg.vocab_size)
    if new_tokens < 1:
        raise UserError(f"at least one token must be asked for, not {new_tokens}")
    folded = model if isinstance(model, Folded) else fold(model)
    rows, slots = fit(rows, new_tokens, folded.cfg.context, sliding)
    engine = engine_for(folded, len(rows), slots, new_tokens, how or Sampling(), step)
    engine.start(rows, seed)
    return collect(engine, end, watch)


def engine_for(model: Folded, batch: int, slots: int, new_tokens: int, how: Sampling, step: Step) -> Engine:
    """The engine of the last call where it serves this one too: its graphs are captured already."""
    kept = model.engine
    if isinstance(kept, Engine) and kept.serves(batch, slots, new_tokens, how, step):
        return kept
    model.engine = Engine(model, batch, slots, new_tokens, how, step)
    return model.engine


def collect(engine: Engine, end: int | None, watch: Watch | None) -> list[list[int]]:
    """Run a started engine until every row has ended or has all its tokens."""
    found: list[list[int]] = [[] for _ in engine.tokens]
    running = set(range(len(found)))
    every = LOOK_EVERY if engine.tokens.device.type == "cuda" else 1
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
            ended = end is not None and end in tokens
            if ended and end is not None:
                tokens = tokens[: tokens.index(end) + 1]
            found[row] += tokens
            stopped = watch is not None and watch(row, tokens)
            if ended or stopped:
                running.discard(row)
    return found


def checked(prompts: Prompts, vocab_size: int) -> list[list[int]]:
    """The prompts as lists, each with at least one token of the vocabulary."""
    if isinstance(prompts, Tensor) and (prompts.ndim != 2 or prompts.is_floating_point()):
        raise UserError(f"prompts must be token ids of shape (B, T), not {prompts.dtype} {tuple(prompts.shape)}")
    rows: list[list[int]] = prompts.tolist() if isinstance(prompts, Tensor) else [list(p) for p in prompts]
    if not rows or any(not row for row in rows):
        raise UserError("each prompt must have at least one token")
    worst = max((t for row in rows for t in row), key=lambda t: abs(t - vocab_size / 2))
    if not 0 <= worst < vocab_size:
        raise UserError(f"token {worst} of a prompt is not in the model's vocabulary of {vocab_size:,}")
    return rows


def fit(rows: list[list[int]], new_tokens: int, context: int, sliding: bool) -> tuple[list[list[int]], int]:
    """The rows that are read, and the slots that their caches need."""
    longest = max(map(len, rows))
    if sliding:
        rows = [row[-context:] for row in rows]
    elif longest > context:
        raise UserError(
            f"a prompt of {longest:,} tokens is longer than the model's context of {context:,}; "
            "shorten it, or let the window slide over it with --sliding"
        )
    elif longest + new_tokens > context + 1:  # the last token is not read again
        raise UserError(
            f"a prompt of {longest:,} tokens and {new_tokens:,} new ones do not fit the model's context of "
            f"{context:,}; ask for at most {context + 1 - longest:,}, or let the window slide with --sliding"
        )
    needed = max(map(len, rows)) + new_tokens
    return rows, min(context, -(-needed // SLOTS) * SLOTS)


@dataclass(frozen=True)
class Text:
    """What a model wrote behind a prompt."""

    text: str
    tokens: int
    """How many it was asked to choose for that."""
    reason: Literal["end", "stop", "length"]
    """It ended the document, wrote a stop string (which is not in the text), or had written enough."""


def generate_text(
    model: Folded | Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    new_tokens: int,
    how: Sampling | None = None,
    *,
    seed: int = 0,
    end: int | None = None,
    stop: Sequence[str] = (),
    sliding: bool = False,
    step: Step = "auto",
    emit: Callable[[int, str], None] | None = None,
) -> list[Text]:
    """Text behind each prompt. An empty prompt is the beginning of a document, which needs `end`. `emit` is called with
    a row and its next piece of text as it comes."""
    if any(not s for s in stop):
        raise UserError("a stop string must not be empty")
    rows = [encode(tokenizer, prompt, end) for prompt in prompts]
    writers = [Writer(tokenizer, tuple(stop), end) for _ in rows]

    def watch(row: int, tokens: list[int]) -> bool:
        piece = writers[row].add(tokens)
        if emit is not None and piece:
            emit(row, piece)
        return writers[row].stopped

    watching = watch if stop or emit is not None else None
    made = generate(model, rows, new_tokens, how, seed=seed, end=end, sliding=sliding, step=step, watch=watching)
    texts = []
    for row, tokens in enumerate(made):
        writer = writers[row]
        if watching is None:
            writer.add(tokens)
        rest = writer.finish()
        if emit is not None and rest:
            emit(row, rest)
        ended = end is not None and tokens[-1:] == [end]
        texts.append(Text(writer.text, len(tokens), "stop" if writer.stopped else "end" if ended else "length"))
    return texts


def encode(tokenizer: Tokenizer, prompt: str, end: int | None) -> list[int]:
    """The tokens of a prompt; a document begins where the one before it ended."""
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    if ids:
        return ids
    if end is None:
        raise UserError(
            "an empty prompt needs the token that ends a document, and the tokenizer has none; give a prompt"
        )
    return [end]


@dataclass
class Writer:
    """Turns the tokens of a row into text piece by piece, and finds stop strings in it."""

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    end: int | None
    text: str = ""
    stopped: bool = False
    given: int = 0
    """Characters that have been given out."""
    pending: list[int] = field(default_factory=list)
    """Tokens that may end inside of a character."""
    before: list[int] = field(default_factory=list)
    """The last tokens before those: a decoder may treat the first token of a text in its own way."""

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens make certain: less what may be part of a character or of a stop string."""
        for token in tokens:
            if self.stopped or token == self.end:
                break
            self.pending.append(token)
            self._decode(at_end=False)
        starts = (n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n]))
        return self._give(0 if self.stopped else max(starts, default=0))

    def finish(self) -> str:
        """What has been held back."""
        if not self.stopped:
            self._decode(at_end=True)
        return self._give(0)

    def _decode(self, at_end: bool) -> None:
        known = self._text_of(self.before)
        piece = self._text_of(self.before + self.pending)[len(known) :]
        if piece.endswith("\ufffd") and len(self.pending) < UNSETTLED and not at_end:
            return
        longest = max(map(len, self.stop), default=1)
        start = max(0, len(self.text) - longest + 1)
        self.text += piece
        self.before, self.pending = (self.before + self.pending)[-UNSETTLED:], []
        places = [place for s in self.stop if (place := self.text.find(s, start)) >= 0]
        if places:
            self.stopped = True
            self.text = self.text[: min(places)]

    def _give(self, held: int) -> str:
        piece = self.text[self.given : len(self.text) - held]
        self.given += len(piece)
        return piece

    def _text_of(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
