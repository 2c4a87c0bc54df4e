"""Resolves a configuration: budget, batch, learning rate, device. Writes nothing; `auto` depends on the machine."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from angpt.config import MUON_SETTINGS, ModelConfig, Recipe, TrainConfig, parse_budget
from angpt.errors import UserError
from angpt.fast.precision import stream_dtype
from angpt.float8 import E4M3
from angpt.models.variants import build
from angpt.serialization import from_dict, toml_values
from angpt.training.hardware import choose_device

T = TypeVar("T")
ANCHOR, ANCHOR_TOKENS = 32e6, 100e6
"""Number of parameters and of training tokens at which the rules state their learning rate and batch size."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": E4M3}
"""The dtype of matrices by the setting `precision`."""
MICRO_TOKENS = {"cuda": 32_768, "cpu": 4_096}
"""Tokens of one forward pass unless configured: enough to fill the device, few enough to fit on it."""
MOST_BATCH_TOKENS = 1 << 27
"""Largest accepted tokens per step; a larger number is taken for a typing mistake, before tokens fill the memory."""


@dataclass(frozen=True)
class Rule:
    """The training defaults of a recipe. Its power laws are not clamped to the range in which they were measured."""

    lr: float
    lr_exponents: tuple[float, float]
    """Exponents below and above the anchor."""
    batch_tokens: int
    batch_exponent: float
    weight_decay: float
    warmup: float
    lr_tokens_exponent: float = 0.0
    """Exponent of the learning rate over the number of training tokens."""
    lr_batch_exponent: float = 0.0
    """Exponent of the learning rate over the tokens per step."""
    batch_tokens_exponent: float = 0.0
    adam_lr: float | None = None
    """Beside Muon: the learning rate of Adam, for all sizes and batches."""
    adam_lr_tokens_exponent: float = 0.0

    def lr_at(self, parameters: int, budget: int, batch_tokens: int) -> float:
        """Peak learning rate for a number of training tokens and a batch, rounded to two digits."""
        of_size = (parameters / ANCHOR) ** self.lr_exponents[parameters > ANCHOR]
        of_tokens = (budget / ANCHOR_TOKENS) ** self.lr_tokens_exponent
        return rounded(self.lr * of_size * of_tokens * (batch_tokens / self.batch_tokens) ** self.lr_batch_exponent)

    def adam_lr_at(self, budget: int) -> float | None:
        """Peak learning rate of Adam beside Muon."""
        if self.adam_lr is None:
            return None
        return rounded(self.adam_lr * (budget / ANCHOR_TOKENS) ** self.adam_lr_tokens_exponent)

    def batch_at(self, parameters: int, budget: int, context: int) -> int:
        """Tokens per step for a number of training tokens, rounded to a power of two sequences."""
        factor = (parameters / ANCHOR) ** self.batch_exponent * (budget / ANCHOR_TOKENS) ** self.batch_tokens_exponent
        return context * 2 ** max(0, round(math.log2(self.batch_tokens * factor / context)))


def rounded(lr: float) -> float:
    return float(f"{lr:.2g}")


@cache
def read_rules() -> dict[str, Rule]:
    """The rules of `rules.toml` by recipe."""
    tables = toml_values(Path(__file__).with_name("rules.toml"))
    return {name: from_dict(Rule, values, name) for name, values in tables.items()}


def rule_for(recipe: Recipe) -> Rule:
    """The rule of a recipe; for a variant that of its base."""
    architecture, colon, optimizer = recipe.partition(":")
    return read_rules()[architecture.partition("/")[0] + colon + optimizer]


@dataclass(frozen=True)
class Plan:
    """A resolved configuration, and what follows from it on a number of processes."""

    config: TrainConfig
    """Configuration without open settings; it gives the same plan again."""
    ranks: int
    """Number of processes."""

    @property
    def parameters(self) -> int:
        return count(self.config.model)[0]

    @property
    def flops_per_token(self) -> int:
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
        return given(self.config.optimizer.lr)

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.device)

    @property
    def matrix_dtype(self) -> torch.dtype:
        """Precision of the matrices of blocks."""
        return DTYPES[self.config.precision]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the residual stream, the embedding and the head; `matrix_dtype` is that of blocks."""
        return stream_dtype(self.matrix_dtype)

    @property
    def compile(self) -> bool:
        """True if blocks are compiled."""
        return self.config.compile == "on"

    def due(self, every: int | None, step: int) -> bool:
        """True if `step` is a multiple of `every` or the last step; never if `every` is 0."""
        return given(every) > 0 and (step == self.steps or step % given(every) == 0)

    def lr(self, step: int) -> float:
        """Learning rate of a step (from 0): linear warm-up, then a cosine from the peak to `final_lr` · peak in the
        last step, if there are two steps for it."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps)
        final, cosine = self.config.optimizer.final_lr, (1 + math.cos(math.pi * progress)) / 2
        return self.peak_lr * (final + (1 - final) * cosine)


def given(value: T | None) -> T:
    """A setting of a resolved configuration, where it is not None."""
    assert value is not None
    return value


@cache
def count(cfg: ModelConfig) -> tuple[int, int]:
    """Number of parameters of a model, and its training FLOPs per token."""
    with torch.device("meta"):
        model = build(cfg)
    return model.parameter_count(), model.flops_per_token()


def make_plan(cfg: TrainConfig, ranks: int = 1) -> Plan:
    """Resolve the settings that are open, for a run on a number of processes."""
    device, (parameters, _), context = choose_device(cfg.device), count(cfg.model), cfg.model.context
    for name in cfg.optimizer.given_for_muon if cfg.optimizer.name == "adam" else ():
        raise UserError(
            f"optimizer.{name} needs optimizer.name = 'muon'; for Adam alone, set optimizer.{MUON_SETTINGS[name]}"
        )
    rule, budget = rule_for(cfg.recipe), parse_budget(cfg.tokens, parameters)
    batch_tokens = cfg.batch_tokens or rule.batch_at(parameters, budget, context)
    if batch_tokens > MOST_BATCH_TOKENS:
        raise UserError(f"batch_tokens = {batch_tokens:,}: at most {MOST_BATCH_TOKENS:,} tokens are possible")
    if batch_tokens % context:
        raise UserError(f"batch_tokens = {batch_tokens:,} is no multiple of model.context = {context:,}")
    sequences = batch_tokens // context
    if sequences % ranks:
        raise UserError(
            f"batch_tokens = {batch_tokens:,} are {sequences} sequences, which {ranks} processes cannot share evenly; "
            f"set batch_tokens to a multiple of {ranks * context:,}, or start another number of processes"
        )
    share = sequences // ranks
    micro_batch = cfg.micro_batch or max(1, MICRO_TOKENS[device.type] // context)
    if ranks > 1 or not cfg.micro_batch:
        micro_batch = max(d for d in range(1, min(share, micro_batch) + 1) if share % d == 0)
    if share % micro_batch:
        raise UserError(f"micro_batch = {micro_batch} does not divide the {sequences} sequences of a step")
    steps = max(1, round(budget / batch_tokens))
    on_gpu, tenth = device.type == "cuda", math.ceil(steps / 10)
    rates = {"lr": rule.lr_at(parameters, budget, batch_tokens), "adam_lr": rule.adam_lr_at(budget)}
    optimizer = _filled(cfg.optimizer, **rates, weight_decay=rule.weight_decay, warmup=rule.warmup)
    resolved = _filled(
        dataclasses.replace(
            cfg, model=cfg.model.resolved(), optimizer=optimizer, tokens=str(budget), micro_batch=micro_batch
        ),
        batch_tokens=batch_tokens,
        device=device.type,
        precision="bf16" if on_gpu else "fp32",
        compile="on" if on_gpu else "off",
        eval_every=tenth,
        layers_every=math.ceil(steps / 50),
        checkpoint_every=tenth,
    )
    return Plan(resolved, ranks)


def _filled(config: T, **defaults: Any) -> T:
    """The configuration with these values for settings that are None or "auto"."""
    opened = {name: value for name, value in defaults.items() if getattr(config, name) in (None, "auto")}
    return dataclasses.replace(config, **opened)  # type: ignore[type-var]
