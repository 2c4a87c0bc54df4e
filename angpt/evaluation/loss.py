"""Loss, perplexity and bits per byte on prepared data, over the same windows as in training."""

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from angpt.data.loader import count_windows, document_numbers, end_of_text, validation_batches
from angpt.data.shards import TokenData
from angpt.errors import UserError
from angpt.evaluation.scoring import Model, Progress, log_probabilities

DECODED = 1 << 20
"""Tokens that are decoded at a time to count the bytes of their text."""


@dataclass(frozen=True)
class Losses:
    """Mean loss over windows, with its standard error."""

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
    """The mean loss over all windows of the split, or over `limit` windows spread over it."""
    windows = count_windows(data, context)
    total = min(windows, limit or windows)
    found: list[float] = []
    for batch in validation_batches(data, context, max(1, batch_tokens // context), limit):
        tokens = torch.from_numpy(batch).to(model.device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        documents = document_numbers(inputs, end_of_text(data)) if mask_documents else None
        states = model.states(inputs, documents)
        values, _ = log_probabilities(model, states.flatten(0, 1), targets.flatten())
        found += (-values.view(targets.shape).double().mean(dim=1)).tolist()
        progress(len(found), total)
    n, mean = len(found), math.fsum(found) / len(found)
    if not math.isfinite(mean):
        raise UserError("the model's logits are not finite; did its training diverge?")
    stderr = math.sqrt(math.fsum((value - mean) ** 2 for value in found) / (n - 1) / n) if n > 1 else None
    return Losses(n, n * context, mean, stderr)


def bits_per_byte(loss: float, data: TokenData, tokenizer: Tokenizer | None) -> float | None:
    """Bits per token (loss / ln 2) times the tokens per byte of the whole split; comparable between tokenizers.

    End-of-text tokens count in the loss and have no bytes. Without an index the tokens are decoded to count bytes; None
    if there is no tokenizer either.
    """
    size = data.text_bytes
    if size is None and tokenizer is not None:
        parts = (data.read(start, min(DECODED, data.tokens - start)) for start in range(0, data.tokens, DECODED))
        size = sum(len(tokenizer.decode(part.tolist(), skip_special_tokens=True).encode()) for part in parts)
    return None if not size else loss / math.log(2) * data.tokens / size
