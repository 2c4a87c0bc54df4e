"""Train a small ViT and its converted form on the digits of scikit-learn, and print a table for docs/convert.md.

python experiments/digits.py

Both are trained with the same batches. The learning rate of each is the best of a grid on a validation split, which
grows while the best value is at its edge. The original has what it is usually trained with, warm-up and weight decay;
the converted one has neither.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

import angpt
from angpt.models.convert import FAMILIES

TRAINING, VALIDATION = 1000, 297  # images; the remaining 500 are the test split
EPOCHS, BATCH, WARMUP = (10, 30), 50, 0.1
TUNING_SEED, SEEDS = 100, (0, 1, 2)
RATES = (1e-3, 2e-3, 4e-3)
WIDTH, LAYERS, HEADS = 64, 4, 4


def splits() -> list[tuple[Tensor, Tensor]]:
    """Images and labels for training, validation and test."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = ((images - images.mean()) / images.std())[order, None], labels[order]
    ends = (0, TRAINING, TRAINING + VALIDATION, len(labels))
    return [(images[a:b], labels[a:b]) for a, b in pairwise(ends)]


def vit(**options: float) -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
            image_size=8, patch_size=2, num_channels=1, num_labels=10, **options,
        )
    )  # fmt: skip


def original() -> tuple[ViTForImageClassification, dict[str, float], float]:
    """The model, the options of its optimizer, and its warm-up."""
    return vit(), {"weight_decay": 0.1}, WARMUP


def wider_start() -> tuple[ViTForImageClassification, dict[str, float], float]:
    """The original with an initial deviation that suits its width; transformers' 0.02 suits a width of 2,500."""
    return vit(initializer_range=WIDTH**-0.5), {"weight_decay": 0.1}, WARMUP


def converted() -> tuple[ViTForImageClassification, dict[str, float], float]:
    model = vit()
    angpt.convert(model)
    return model, {"weight_decay": 0.0}, 0.0


def with_small_inputs() -> tuple[ViTForImageClassification, dict[str, float], float]:
    """The converted model with the factor that the paper has for gated MLPs."""
    model = vit()
    angpt.convert(model, replace(FAMILIES["vit"], gated=True))
    return model, {"weight_decay": 0.0}, 0.0


def train(make: Callable, lr: float, epochs: int, seed: int, held_out: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Loss on held-out images, and the share of them that is recognised."""
    torch.manual_seed(seed)
    model, options, warmup = make()
    images, labels = splits()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), **options)
    if warmup == 0:
        angpt.constrain(optimizer, model)
    steps = epochs * TRAINING // BATCH
    begin = max(1, round(warmup * steps))

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / begin) * (0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(TRAINING, generator=order).split(BATCH):
            loss = F.cross_entropy(model(images[batch]).logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    if warmup == 0:
        assert angpt.largest_violation(model) < 1e-5
    with torch.no_grad():
        logits = model.eval()(held_out[0]).logits
    found = F.cross_entropy(logits, held_out[1]), (logits.argmax(-1) == held_out[1]).float().mean()
    return float(found[0]), float(found[1])


def best_rate(make: Callable, epochs: int, validation: tuple[Tensor, Tensor]) -> tuple[float, int]:
    """The learning rate with the lowest validation loss, and the number of rates tried."""
    losses: dict[float, float] = {}
    rates = list(RATES)
    while rates:
        for lr in rates:
            losses[lr] = train(make, lr, epochs, TUNING_SEED, validation)[0]
        best = min(losses, key=losses.__getitem__)
        rates = [best / 2] if best == min(losses) else [best * 2] if best == max(losses) else []
    return best, len(losses)


MODELS = {
    "ViT": original,
    "ViT, initial deviation 1/√d": wider_start,
    "converted": converted,
    "converted, ν of gated MLPs": with_small_inputs,
}


def main() -> None:
    _, validation, test = splits()
    print("| epochs | model | learning rate (tried) | test loss, seeds 0, 1, 2 | mean | accuracy | mean |")
    print("|---|---|---|---|---|---|---|")
    for epochs, (name, make) in product(EPOCHS, MODELS.items()):
        lr, tried = best_rate(make, epochs, validation)
        losses, shares = zip(*(train(make, lr, epochs, seed, test) for seed in SEEDS), strict=True)
        values = [", ".join(f"{x:.3f}" for x in losses), f"{sum(losses) / len(losses):.3f}"]
        values += [", ".join(f"{100 * x:.1f} %" for x in shares), f"{100 * sum(shares) / len(shares):.1f} %"]
        print(f"| {epochs} | {name} | {lr:g} ({tried}) | {' | '.join(values)} |", flush=True)


if __name__ == "__main__":
    main()
