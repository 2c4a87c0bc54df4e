"""From a configuration with gaps to one without: budget, batch, learning rate, device. All pure functions."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from angpt.config import ModelConfig, TrainConfig, from_dict, parse_budget
from angpt.errors import UserError
from angpt.models.variants import build
from angpt.training.hardware import choose_device

ANCHOR = 32e6
"""Number of parameters at which the rules state their learning rate and batch size."""

# Tokens of one forward pass unless the user says otherwise: enough to fill the device, little enough to fit on it.
MICRO_TOKENS = {"cuda": 32_768, "cpu": 4_096}


@dataclass(frozen=True)
class Rule:
    """The training defaults of an architecture."""

    lr: float
    lr_exponents: tuple[float, ...]
    """Below and above the anchor."""
    batch_tokens: int
    batch_exponent: float
    weight_decay: float
    warmup: float

    def lr_at(self, parameters: int) -> float:
        """Rounded to two digits: more would pretend to know more."""
        exponent = self.lr_exponents[parameters > ANCHOR]
        return float(f"{self.lr * (parameters / ANCHOR) ** exponent:.2g}")

    def batch_at(self, parameters: int, context: int) -> int:
        """Rounded to a power of two sequences."""
        tokens = self.batch_tokens * (parameters / ANCHOR) ** self.batch_exponent
        return context * 2 ** max(0, round(math.log2(tokens / context)))


@cache
def rules() -> dict[str, Rule]:
    """The rules of `rules.toml` by architecture."""
    tables = tomllib.loads((Path(__file__).parent / "rules.toml").read_text(encoding="utf-8"))
    return {name: from_dict(Rule, values, name) for name, values in tables.items()}


def rule_for(name: str) -> Rule:
    """The rule of an architecture, or of the one that it is a variant of."""
    return rules()[name.partition("/")[0]]


@dataclass(frozen=True)
class Plan:
    """A run without open questions. `config` can be written down and gives the same plan again."""

    config: TrainConfig
    parameters: int
    flops_per_token: int
    steps: int
    batch_tokens: int
    sequences: int
    """Windows per step, over all devices."""
    micro_batch: int
    micro_steps: int
    """Forward passes per step on each device."""
    peak_lr: float
    warmup_steps: int
    eval_every: int
    layers_every: int
    checkpoint_every: int
    device: torch.device
    dtype: torch.dtype
    """Of matrix products."""
    compile: bool

    def lr(self, step: int) -> float:
        """Learning rate of a step (from 0): linear warm-up, then a cosine that ends at `final_lr` in the last step."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        final = self.config.optimizer.final_lr
        return self.peak_lr * (final + (1 - final) * cosine)


@cache
def count(cfg: ModelConfig) -> tuple[int, int]:
    """Parameters of a model, and its FLOPs for each token of training."""
    with torch.device("meta"):
        model = build(cfg)
    return model.parameter_count(), model.flops_per_token()


def make_plan(cfg: TrainConfig, ranks: int = 1) -> Plan:
    """Fill in what the configuration leaves open, for a run on so many devices."""
    device = choose_device(cfg.device)
    parameters, flops_per_token = count(cfg.model)
    rule, optimizer, context = rule_for(cfg.model.architecture), cfg.optimizer, cfg.model.context
    batch_tokens = cfg.batch_tokens or rule.batch_at(parameters, context)
    if batch_tokens % context:
        raise UserError(f"batch_tokens = {batch_tokens:,} is no multiple of model.context = {context:,}")
    sequences = batch_tokens // context
    if sequences % ranks:
        raise UserError(
            f"batch_tokens = {batch_tokens:,} are {sequences} sequences, which {ranks} processes cannot share evenly; "
            f"set batch_tokens to a multiple of {ranks * context:,}, or start another number of processes"
        )
    share = sequences // ranks
    micro_batch = cfg.micro_batch or _largest_divisor(share, at_most=max(1, MICRO_TOKENS[device.type] // context))
    if ranks > 1:
        micro_batch = _largest_divisor(share, at_most=micro_batch)
    if share % micro_batch:
        raise UserError(f"micro_batch = {micro_batch} does not divide the {sequences} sequences of a step")
    budget = parse_budget(cfg.tokens, parameters)
    steps = max(1, round(budget / batch_tokens))
    lr = optimizer.lr or rule.lr_at(parameters)
    warmup = rule.warmup if optimizer.warmup is None else optimizer.warmup
    decay = rule.weight_decay if optimizer.weight_decay is None else optimizer.weight_decay
    eval_every = cfg.eval_every or math.ceil(steps / 10)
    layers_every = math.ceil(steps / 50) if cfg.layers_every is None else cfg.layers_every
    checkpoint_every = cfg.checkpoint_every or math.ceil(steps / 10)
    resolved = dataclasses.replace(
        cfg,
        optimizer=dataclasses.replace(optimizer, lr=lr, weight_decay=decay, warmup=warmup),
        tokens=str(budget),
        batch_tokens=batch_tokens,
        micro_batch=micro_batch,
        device="cuda" if device.type == "cuda" else "cpu",
        precision=_auto(cfg.precision, device, "bf16", "fp32"),
        compile=_auto(cfg.compile, device, "on", "off"),
        eval_every=eval_every,
        layers_every=layers_every,
        checkpoint_every=checkpoint_every,
    )
    return Plan(
        config=resolved,
        parameters=parameters,
        flops_per_token=flops_per_token,
        steps=steps,
        batch_tokens=batch_tokens,
        sequences=sequences,
        micro_batch=micro_batch,
        micro_steps=share // micro_batch,
        peak_lr=lr,
        warmup_steps=round(warmup * steps),
        eval_every=eval_every,
        layers_every=layers_every,
        checkpoint_every=checkpoint_every,
        device=device,
        dtype=torch.bfloat16 if resolved.precision == "bf16" else torch.float32,
        compile=resolved.compile == "on",
    )


def _auto(choice: str, device: torch.device, on_gpu: str, on_cpu: str) -> Any:
    return choice if choice != "auto" else on_gpu if device.type == "cuda" else on_cpu


def _largest_divisor(n: int, at_most: int) -> int:
    return max(d for d in range(1, min(n, at_most) + 1) if n % d == 0)
