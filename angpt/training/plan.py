"""From a configuration with gaps to one without: budget, batch, learning rate, device. All pure functions."""

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from angpt.config import ModelConfig, TrainConfig, from_dict, parse_budget
from angpt.errors import UserError
from angpt.models.variants import build
from angpt.training.hardware import choose_device

T = TypeVar("T")
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
    """A run without open questions: a configuration without gaps, and what follows from it on so many processes."""

    config: TrainConfig
    """Can be written down and gives the same plan again."""
    ranks: int

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return count(self.config.model)[0]

    @property
    def flops_per_token(self) -> int:
        """FLOPs of training for each token."""
        return count(self.config.model)[1]

    @property
    def batch_tokens(self) -> int:
        """Tokens per step, over all devices."""
        return given(self.config.batch_tokens)

    @property
    def sequences(self) -> int:
        """Windows per step, over all devices."""
        return self.batch_tokens // self.config.model.context

    @property
    def micro_batch(self) -> int:
        """Windows per forward pass on each device."""
        return given(self.config.micro_batch)

    @property
    def micro_steps(self) -> int:
        """Forward passes per step on each device."""
        return self.sequences // self.ranks // self.micro_batch

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return max(1, round(int(self.config.tokens) / self.batch_tokens))

    @cached_property
    def warmup_steps(self) -> int:
        """Steps with a rising learning rate."""
        return round(given(self.config.optimizer.warmup) * self.steps)

    @property
    def peak_lr(self) -> float:
        """The largest learning rate."""
        return given(self.config.optimizer.lr)

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        return torch.device(self.config.device)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of matrix products."""
        return torch.bfloat16 if self.config.precision == "bf16" else torch.float32

    @property
    def compile(self) -> bool:
        """True if blocks are compiled."""
        return self.config.compile == "on"

    def due(self, every: int | None, step: int) -> bool:
        """True if something that happens every so many steps (0: never), and after the last, is due after `step`."""
        return given(every) > 0 and (step == self.steps or step % given(every) == 0)

    def lr(self, step: int) -> float:
        """Learning rate of a step (from 0): linear warm-up, then a cosine that ends at `final_lr` in the last step."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        final = self.config.optimizer.final_lr
        return self.peak_lr * (final + (1 - final) * cosine)


def given(value: T | None) -> T:
    """A setting of a configuration without gaps."""
    assert value is not None
    return value


@cache
def count(cfg: ModelConfig) -> tuple[int, int]:
    """Parameters of a model, and its FLOPs for each token of training."""
    with torch.device("meta"):
        model = build(cfg)
    return model.parameter_count(), model.flops_per_token()


def make_plan(cfg: TrainConfig, ranks: int = 1) -> Plan:
    """Fill in what the configuration leaves open, for a run on so many devices."""
    device = choose_device(cfg.device)
    parameters, _ = count(cfg.model)
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
    resolved = dataclasses.replace(
        cfg,
        optimizer=dataclasses.replace(
            optimizer,
            lr=optimizer.lr or rule.lr_at(parameters),
            weight_decay=rule.weight_decay if optimizer.weight_decay is None else optimizer.weight_decay,
            warmup=rule.warmup if optimizer.warmup is None else optimizer.warmup,
        ),
        tokens=str(budget),
        batch_tokens=batch_tokens,
        micro_batch=micro_batch,
        device="cuda" if device.type == "cuda" else "cpu",
        precision=_auto(cfg.precision, device, "bf16", "fp32"),
        compile=_auto(cfg.compile, device, "on", "off"),
        eval_every=cfg.eval_every or math.ceil(steps / 10),
        layers_every=math.ceil(steps / 50) if cfg.layers_every is None else cfg.layers_every,
        checkpoint_every=cfg.checkpoint_every or math.ceil(steps / 10),
    )
    return Plan(resolved, ranks)


def _auto(choice: str, device: torch.device, on_gpu: str, on_cpu: str) -> Any:
    return choice if choice != "auto" else on_gpu if device.type == "cuda" else on_cpu


def _largest_divisor(n: int, at_most: int) -> int:
    return max(d for d in range(1, min(n, at_most) + 1) if n % d == 0)
