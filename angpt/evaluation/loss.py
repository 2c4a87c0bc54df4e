"""Loss, perplexity and bits per byte on prepared data, over the windows that training evaluates."""

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from angpt.data.loader import count_windows, document_numbers, end_of_text, validation_batches
from angpt.data.shards import TokenData
from angpt.errors import UserError
from angpt.evaluation.scoring import Model, Progress, log_probabilities

DECODED = 1 << 20
"""Tokens that are turned into text at a time, to count its bytes."""


@dataclass(frozen=True)
class Losses:
    windows: int
    tokens: int
    loss: float
    stderr: float | None

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError as error:
            raise UserError(f"a loss of {self.loss:g} has no perplexity; did the training diverge?") from error


@torch.no_grad()
def losses(
    model: Model,
    data: TokenData,
    context: int,
    batch_tokens: int,
    limit: int | None = None,
    mask_documents: bool = False,
    progress: Progress = lambda done, total: None,
) -> Losses:
    """The mean over all windows of the split, or over `limit` of them that are spread over it."""
    total = count_windows(data, context)
    total = total if limit is None else min(total, limit)
    found: list[float] = []
    for batch in validation_batches(data, context, max(1, batch_tokens // context), limit):
        tokens = torch.from_numpy(batch).to(model.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        documents = document_numbers(inputs, end_of_text(data)) if mask_documents else None
        states = model.states(inputs, documents)
        values, _ = log_probabilities(model, states.flatten(0, 1), targets.flatten())
        found += (-values.view(targets.shape).double().mean(dim=1)).tolist()
        progress(len(found), total)
    mean = math.fsum(found) / len(found)
    if not math.isfinite(mean):
        raise UserError("the model's logits are not finite; did its training diverge?")
    spread = math.fsum((value - mean) ** 2 for value in found)
    stderr = math.sqrt(spread / (len(found) - 1) / len(found)) if len(found) > 1 else None
    return Losses(len(found), len(found) * context, mean, stderr)


def bits_per_byte(loss: float, data: TokenData, tokenizer: Tokenizer | None) -> float | None:
    """loss / ln 2 bits per token, times the tokens per byte of the whole split: what tokenizers can be compared by.

    The end of a document is a token of no bytes: it costs, and adds no text. Without an index the text is decoded;
    None where that cannot be done either.
    """
    size = data.text_bytes
    if size is None and tokenizer is not None:
        size = decoded_bytes(data, tokenizer)
    return None if not size else loss / math.log(2) * data.tokens / size


def decoded_bytes(data: TokenData, tokenizer: Tokenizer) -> int:
    """Bytes of the text that tokens stand for."""
    parts = (data.read(start, min(DECODED, data.tokens - start)) for start in range(0, data.tokens, DECODED))
    return sum(len(tokenizer.decode(part.tolist(), skip_special_tokens=True).encode()) for part in parts)
