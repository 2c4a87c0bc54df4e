"""`angpt bench decode`: decoding and prefill with folded models, in turns, compared with the bytes that must be read
and with transformers' own `generate` on the same weights."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from angpt.bench.measure import between, in_turns, median, ratio
from angpt.config import ModelConfig, Step
from angpt.errors import UserError
from angpt.inference.engine import Engine
from angpt.inference.fold import fold
from angpt.inference.sampling import GREEDY
from angpt.models.folded import Folded
from angpt.models.variants import build
from angpt.present.tables import Table
from angpt.present.words import plural
from angpt.stats import Interval
from angpt.training.hardware import bandwidth, synchronize

REFERENCE_TOKENS = 33
"""New tokens of transformers per turn; the first comes with the prefill."""


@dataclass(frozen=True)
class Result:
    """Measurements of one architecture at one batch size, with one kind of step."""

    architecture: str
    size: str
    batch: int
    step: Step
    prompt: int
    new_tokens: int
    token_ms: Interval
    """Time of a decode step, which gives one token to each row."""
    tokens_per_s: float
    """Tokens per second of all rows together."""
    speed: Interval
    """Speed relative to the baseline with the same kind of step."""
    floor_ms: float
    """Lower bound: bytes of weights and cache that a step must read, divided by the measured bandwidth of a copy."""
    prefill_ms: Interval
    prefill_tokens_per_s: float
    first_token_s: float
    """Seconds from building the engine to its second token, including capture and compilation."""
    transformers_ms: Interval | None
    """Time of a step of transformers' greedy `generate`, with its own cache."""
    over_transformers: Interval | None
    """Time of a step of transformers divided by ours."""


class DecodingModel:
    """A folded model after the prefill, which decodes the same tokens in every turn."""

    def __init__(self, model: Folded, batch: int, step: Step, prompt: int, new_tokens: int) -> None:
        self.model, self.new_tokens = model, new_tokens
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(model.cfg.vocab_size, (batch, prompt), generator=generator).to(model.device)
        self.lengths = torch.full((batch,), prompt, device=model.device)
        synchronize(model.device)
        start = time.perf_counter()
        self.engine = Engine(model, batch, -(-(prompt + new_tokens) // 64) * 64, new_tokens, GREEDY, step)
        self.engine.start(self.prompts.tolist(), seed=0)
        kept = (self.engine.tokens, self.engine.positions, self.engine.count)
        self.begun = [(tensor, tensor.clone()) for tensor in kept]
        self.engine.advance()
        synchronize(model.device)
        self.first_token_s = time.perf_counter() - start

    def decode(self) -> None:
        """Decode from the first new token to the last."""
        for tensor, value in self.begun:
            tensor.copy_(value)
        self.engine.made, self.engine.longest = 1, self.prompts.shape[1]
        for _ in range(self.new_tokens - 1):
            self.engine.advance()

    @torch.no_grad()
    def prefill(self) -> None:
        self.model.prefill(self.prompts, self.lengths, self.engine.caches)


def floor_bytes(model: Folded, batch: int, prompt: int, new_tokens: int) -> float:
    """Bytes that a step must read, on average over the new tokens: weights (one row of the embedding per token), and
    keys and values of the earlier tokens."""
    cfg = model.cfg
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= (model.W_e.shape[0] - batch) * cfg.d_model * model.W_e.element_size()
    return weights + 2 * cfg.n_layers * batch * (prompt + new_tokens / 2) * cfg.d_model * model.W_h.element_size()


def bench_decode(
    size: str,
    architectures: Sequence[str],
    batch: int,
    steps: Sequence[Step],
    prompt: int,
    new_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    reference: bool,
    progress: Callable[[str], None],
) -> list[Result]:
    """Measure all architectures at one batch size; the first is the baseline."""
    context = ModelConfig.size(size).context
    if prompt + new_tokens > context:
        raise UserError(f"a prompt of {prompt} and {new_tokens} new tokens do not fit the context of {context:,}")
    subjects: dict[tuple[str, Step], DecodingModel] = {}
    turns: dict[Any, Callable[[], Any]] = {}
    for name in architectures:
        progress(f"{name}: building and folding")
        with device:
            model = build(ModelConfig.size(size, architecture=name))
        folded = fold(model).prepare(device, dtype)
        for step in steps:
            progress(f"{name}: first tokens, {step}")
            subjects[name, step] = subject = DecodingModel(folded, batch, step, prompt, new_tokens)
            turns["decode", name, step] = subject.decode
            turns.setdefault(("prefill", name), subject.prefill)
        if reference:
            from angpt.inference.hf import as_transformers

            options = {"attention_mask": torch.ones_like(subject.prompts), "do_sample": False, "pad_token_id": 0}
            theirs = partial(
                as_transformers(model, device, dtype).generate, subject.prompts, eos_token_id=None, **options
            )
            for key, count in (("long", REFERENCE_TOKENS), ("short", 1)):
                turns[key, name] = partial(theirs, min_new_tokens=count, max_new_tokens=count)
    progress("warming up")
    in_turns(turns, device, rounds=1)
    progress(f"{rounds} rounds")
    seconds = in_turns(turns, device, rounds)
    rate = bandwidth(device)
    results = []
    for (name, step), subject in subjects.items():
        token = [s / (new_tokens - 1) for s in seconds["decode", name, step]]
        base = [s / (new_tokens - 1) for s in seconds["decode", architectures[0], step]]
        theirs_s = None
        if reference:
            pairs = zip(seconds["long", name], seconds["short", name], strict=True)
            theirs_s = [(long - short) / (REFERENCE_TOKENS - 1) for long, short in pairs]
        prefill = median(seconds["prefill", name])
        results.append(
            Result(
                architecture=name,
                size=size,
                batch=batch,
                step=step,
                prompt=prompt,
                new_tokens=new_tokens,
                token_ms=median(token).times(1e3),
                tokens_per_s=batch / median(token).mean,
                speed=ratio(base, token),
                floor_ms=1e3 * floor_bytes(subject.model, batch, prompt, new_tokens) / rate,
                prefill_ms=prefill.times(1e3),
                prefill_tokens_per_s=batch * prompt / prefill.mean,
                first_token_s=subject.first_token_s,
                transformers_ms=None if theirs_s is None else median(theirs_s).times(1e3),
                over_transformers=None if theirs_s is None else ratio(theirs_s, token),
            )
        )
    return results


def tables(results: Sequence[Result]) -> list[Table]:
    first = results[0]
    several = len({r.step for r in results}) > 1
    names = [f"{r.architecture} {r.step}" if several else r.architecture for r in results]
    decoding = Table(
        ("", "ms/token", "quartiles", "tokens/s", f"÷ {first.architecture}", "95 %", "÷ floor"),
        [
            (
                name,
                *between(r.token_ms, ".3f"),
                f"{r.tokens_per_s:,.0f}",
                *between(r.speed, ".3f", ends=r.architecture != first.architecture),
                f"{r.token_ms.mean / r.floor_ms:.2f}",
            )
            for name, r in zip(names, results, strict=True)
        ],
        f"{first.size}, {plural(first.batch, 'row')}, {first.new_tokens} tokens after {first.prompt}",
    )
    other = Table(
        ("", "floor ms", "prefill ms", "tokens/s", "first s", "transformers ms", "speed-up"),
        [
            (
                name,
                f"{r.floor_ms:.3f}",
                f"{r.prefill_ms.mean:.2f}",
                f"{r.prefill_tokens_per_s:,.0f}",
                f"{r.first_token_s:.1f}",
                "" if r.transformers_ms is None else f"{r.transformers_ms.mean:.2f}",
                "" if r.over_transformers is None else "× ".join(between(r.over_transformers, ".1f")),
            )
            for name, r in zip(names, results, strict=True)
        ],
        "Lower bound, prefill, time to the second token, transformers",
    )
    return [decoding, other]
