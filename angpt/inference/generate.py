"""Sampling from a model, plain: each new token is one forward pass over the whole context."""

from pathlib import Path

import torch
from torch import Tensor

from angpt.errors import UserError
from angpt.models.decoder import Decoder
from angpt.models.variants import build
from angpt.training import checkpoint
from angpt.training.run import Run


def load_model(run: Path) -> Decoder:
    """The newest good checkpoint of a run folder as a model on the CPU, ready for inference."""
    folder = Run.open(run)
    newest = checkpoint.newest(folder.checkpoints)
    if newest is None:
        raise UserError(f"{run}: no good checkpoint in {folder.checkpoints}; train the run, or go on with --resume")
    model = build(folder.config().model)
    try:
        model.load_state_dict(checkpoint.load_model(newest))
    except RuntimeError as error:
        raise UserError(f"{newest}: the checkpoint does not fit the model of config.toml") from error
    return model.eval()


@torch.no_grad()
def generate(
    model: Decoder,
    tokens: Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`tokens` (B, T) with `new_tokens` more behind each row: sampled from the `top_k` likeliest, or at temperature 0
    the likeliest. What lies further back than the model's context is not seen."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise UserError(f"a prompt must have the shape (B, T) with at least one token, not {tuple(tokens.shape)}")
    if temperature < 0:
        raise UserError(f"temperature must not be negative, not {temperature:g}; 0 takes the likeliest token")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k must be at least 1, not {top_k}")
    for _ in range(new_tokens):
        logits = model(tokens[:, -model.cfg.context :])[:, -1].float()
        tokens = torch.cat([tokens, _pick(logits, temperature, top_k, generator)], dim=1)
    return tokens


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits (B, V), as (B, 1)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    # Exactly k candidates, even where several share the k-th logit.
    best, ids = logits.topk(logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1]), dim=-1)
    drawn = torch.multinomial(torch.softmax(best / temperature, dim=-1), 1, generator=generator)
    return ids.gather(-1, drawn)
