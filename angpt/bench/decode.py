"""`angpt bench decode`: decoding and prefill with folded models, in turns, compared with the bytes that must be read
and the operations that must be computed, and with transformers' own `generate` on the same weights."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from angpt.bench.measure import median, orders, ratio, timed, within
from angpt.config import ModelConfig, Step, Weights
from angpt.errors import UserError
from angpt.inference.engine import Engine
from angpt.inference.fold import fold
from angpt.inference.generate import slots_for
from angpt.inference.quantize import quantize
from angpt.inference.sampling import GREEDY
from angpt.models.decoder import Decoder
from angpt.models.folded import Cache, Folded
from angpt.models.variants import build
from angpt.present.tables import Table
from angpt.stats import Interval
from angpt.training.hardware import bandwidth, peak_flops, synchronize

REFERENCE_TOKENS = 33
"""New tokens of transformers per turn; the first comes with the prefill."""


class Kind(NamedTuple):
    """What is measured: an architecture, the format of its matrices, and how its step is computed."""

    architecture: str
    weights: Weights
    step: Step


@dataclass(frozen=True)
class Result:
    """Measurements of one kind at one batch size and length of the prompt."""

    architecture: str
    weights: Weights
    step: Step
    size: str
    batch: int
    prompt: int
    new_tokens: int
    token_ms: Interval
    """Time of a decode step, which gives one token to each row."""
    tokens_per_s: float
    """Tokens per second of all rows together."""
    speed: Interval
    """Speed relative to the first architecture with the same weights and step."""
    over_full: Interval
    """Speed relative to the first format of the weights with the same architecture and step."""
    floor_ms: float
    """Lower bound: bytes of weights and cache that a step must read, divided by the measured bandwidth of a copy."""
    prefill_ms: Interval
    prefill_tokens_per_s: float
    prefill_floor_ms: float
    """Lower bound: operations of the prefill divided by the rate of a large matrix product, or bytes of the weights
    divided by the bandwidth of a copy, whichever is longer."""
    first_token_s: float
    """Seconds from building the engine to its second token, including capture and compilation."""
    transformers_ms: Interval | None
    """Time of a step of transformers' greedy `generate` with a static cache, on a GPU compiled by it."""
    transformers_prefill_ms: Interval | None
    """Time of transformers' `generate` of one token."""


class DecodingModel:
    """A folded model that reads the same prompts and decodes the same tokens in every turn."""

    def __init__(
        self, model: Folded, batch: int, step: Step, prompt: int, new_tokens: int, caches: Sequence[Cache] | None = None
    ) -> None:
        """`caches` may be shared with other models: a turn reads the prompts first."""
        self.model, self.new_tokens = model, new_tokens
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(model.cfg.vocab_size, (batch, prompt), generator=generator).tolist()
        synchronize(model.device)
        start = time.perf_counter()
        self.engine = Engine(model, batch, slots_for(prompt + new_tokens), new_tokens, GREEDY, step, caches)
        self.prefill()
        self.engine.advance()
        synchronize(model.device)
        self.first_token_s = time.perf_counter() - start

    def prefill(self) -> None:
        """Read the prompts and choose the first new token."""
        self.engine.start(self.prompts, seed=0)

    def decode(self) -> None:
        """Decode from the first new token to the last."""
        while self.engine.made < self.new_tokens:
            self.engine.advance()


def floor_bytes(model: Folded, batch: int, prompt: int, new_tokens: int) -> float:
    """Bytes that a step must read, on average over the new tokens: weights (one row of the embedding per token), and
    keys and values of the earlier tokens."""
    cfg = model.cfg
    cache = 2 * cfg.n_layers * batch * (prompt + new_tokens / 2) * cfg.d_model * model.dtype.itemsize
    return weight_bytes(model) + batch * cfg.d_model * model.W_e.element_size() + cache


def weight_bytes(model: Folded) -> int:
    """Bytes of all parameters except the embedding, of which a step reads single rows."""
    return sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("W_e"))


def prefill_flops(cfg: ModelConfig, batch: int, prompt: int) -> float:
    """Operations of reading prompts: two per matrix entry and token, causal attention at half, the head once a row."""
    layer = 4 * cfg.d_model**2 + 3 * cfg.d_model * cfg.d_mlp
    attention = 2 * batch * prompt**2 * cfg.d_model * cfg.n_layers
    return 2 * batch * (prompt * cfg.n_layers * layer + cfg.vocab_size * cfg.d_model) + attention


class Models:
    """The models of a benchmark, built once for all cases: random weights, which do not affect the time."""

    def __init__(
        self, size: str, kinds: Sequence[Kind], context: int, device: torch.device, dtype: torch.dtype, reference: bool
    ) -> None:
        """`reference`: also measure transformers with the last architecture, of which only one form is compiled."""
        self.size, self.kinds, self.device, self.dtype = size, kinds, device, dtype
        self.folded: dict[tuple[str, Weights], Folded] = {}
        self.trained: Decoder | None = None
        for name in dict.fromkeys(kind.architecture for kind in kinds):
            standard = ModelConfig.size(size, architecture=name)
            with device:
                trained = build(ModelConfig.size(size, architecture=name, context=max(context, standard.context)))
            full = fold(trained)
            for weights in dict.fromkeys(kind.weights for kind in kinds):
                self.folded[name, weights] = full if weights == "full" else quantize(full, weights)
            if reference and name == kinds[-1].architecture:
                self.trained = trained
        for model in self.folded.values():
            model.prepare(device, dtype)


def bench_decode(
    models: Models, batch: int, prompt: int, new_tokens: int, rounds: int, progress: Callable[[str], None]
) -> list[Result]:
    """Measure all kinds at one batch size and length of the prompt; the first architecture is the baseline."""
    device = models.device
    caches = next(iter(models.folded.values())).make_caches(batch, slots_for(prompt + new_tokens))
    subjects: dict[Kind, DecodingModel] = {}
    for kind in models.kinds:
        progress(f"first tokens of {' '.join(kind)}")
        model = models.folded[kind.architecture, kind.weights]
        subjects[kind] = DecodingModel(model, batch, kind.step, prompt, new_tokens, caches)
    turns: dict[Any, tuple[Callable[[], Any], Callable[[], Any]]] = {
        kind: (subject.prefill, subject.decode) for kind, subject in subjects.items()
    }
    if models.trained is not None:
        turns["transformers"] = reference_turn(models, next(iter(subjects.values())).prompts)
    progress("warming up")
    measure(turns, device, rounds=2)
    progress(f"{rounds} rounds")
    prefill, decode = measure(turns, device, rounds)
    found = [result(models, subjects[kind], kind, batch, prompt, prefill, decode) for kind in models.kinds]
    del turns, subjects, caches  # before the memory of the next case is allocated
    torch.compiler.reset()  # the next case has other shapes, for which transformers is to be compiled anew
    gc.collect()
    return found


def reference_turn(models: Models, prompts: Sequence[Sequence[int]]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """transformers' greedy `generate` of one token, and of several, with a static cache. On a GPU it then compiles the
    step itself, with CUDA graphs."""
    from angpt.inference.hf import as_transformers

    assert models.trained is not None
    tokens = torch.tensor(prompts, device=models.device)
    generate = partial(
        as_transformers(models.trained, models.device, models.dtype).generate, tokens,
        attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, eos_token_id=None,
        cache_implementation="static",
    )  # fmt: skip
    long, short = (partial(generate, min_new_tokens=n, max_new_tokens=n) for n in (REFERENCE_TOKENS, 1))
    long()  # the longer cache first: transformers keeps the largest length
    return short, long


def measure(
    turns: Mapping[Any, tuple[Callable[[], Any], Callable[[], Any]]], device: torch.device, rounds: int
) -> tuple[dict[Any, list[float]], dict[Any, list[float]]]:
    """Seconds of the prefill and of what follows, of each kind in each round, in changing order."""
    prefill: dict[Any, list[float]] = {name: [] for name in turns}
    decode: dict[Any, list[float]] = {name: [] for name in turns}
    for order in orders(list(turns), rounds):
        for name in order:
            first, rest = turns[name]
            with timed(device, prefill[name]):
                first()
            with timed(device, decode[name]):
                rest()
    return prefill, decode


def result(
    models: Models,
    subject: DecodingModel,
    kind: Kind,
    batch: int,
    prompt: int,
    prefill: Mapping[Any, Sequence[float]],
    decode: Mapping[Any, Sequence[float]],
) -> Result:
    model, steps, rate = subject.model, subject.new_tokens - 1, bandwidth(models.device)
    token = [s / steps for s in decode[kind]]
    base, full = (
        [s / steps for s in decode[other]]
        for other in (
            kind._replace(architecture=models.kinds[0].architecture),
            kind._replace(weights=models.kinds[0].weights),
        )
    )
    theirs = None
    if models.trained is not None:
        pairs = zip(decode["transformers"], prefill["transformers"], strict=True)
        theirs = [(long - short) / (REFERENCE_TOKENS - 1) for long, short in pairs]
    computed = prefill_flops(model.cfg, batch, prompt) / peak_flops(models.device, models.dtype)
    reading = median(prefill[kind])
    return Result(
        **kind._asdict(),
        size=models.size,
        batch=batch,
        prompt=prompt,
        new_tokens=subject.new_tokens,
        token_ms=median(token).times(1e3),
        tokens_per_s=batch / median(token).mean,
        speed=ratio(base, token),
        over_full=ratio(full, token),
        floor_ms=1e3 * floor_bytes(model, batch, prompt, subject.new_tokens) / rate,
        prefill_ms=reading.times(1e3),
        prefill_tokens_per_s=batch * prompt / reading.mean,
        prefill_floor_ms=1e3 * max(computed, weight_bytes(model) / rate),
        first_token_s=subject.first_token_s,
        transformers_ms=None if theirs is None else median(theirs).times(1e3),
        transformers_prefill_ms=None if theirs is None else median(prefill["transformers"]).times(1e3),
    )


def kinds_of(architectures: Sequence[str], weights: Sequence[Weights], steps: Sequence[Step]) -> list[Kind]:
    """All combinations, each once."""
    if len(set(weights)) > 1 and weights[0] != "full":
        raise UserError("--weights: name full first, to which the others are compared")
    return list(dict.fromkeys(Kind(a, w, s) for a in architectures for w in weights for s in steps))


def tables(results: Sequence[Result]) -> list[Table]:
    """One table of all cases. The time of transformers is that of the last architecture."""
    first, reference = results[0], results[-1].architecture
    columns = [
        "rows", "prompt", "model", "ms/token", "tokens/s", f"÷ {first.architecture}", "÷ full", "floor", "÷ floor",
        "transformers", "×", "prompt ms", "floor", "÷ floor", "transformers", "×",
    ]  # fmt: skip
    rows = []
    for r in results:
        theirs = ("", "", "", "")
        if r.transformers_ms is not None and r.transformers_prefill_ms is not None and r.architecture == reference:
            theirs = (
                f"{r.transformers_ms.mean:.3f}", f"{r.transformers_ms.mean / r.token_ms.mean:.1f}",
                f"{r.transformers_prefill_ms.mean:.2f}", f"{r.transformers_prefill_ms.mean / r.prefill_ms.mean:.1f}",
            )  # fmt: skip
        several = {x.step for x in results} != {"auto"}
        rows.append(
            (
                f"{r.batch:,}",
                f"{r.prompt:,}",
                " ".join([r.architecture, *([r.weights] if r.weights != "full" else []), *([r.step] * several)]),
                f"{r.token_ms.mean:.3f}",
                f"{r.tokens_per_s:,.0f}",
                "" if r.architecture == first.architecture else within(r.speed, ".3f"),
                "" if r.weights == first.weights else f"{r.over_full.mean:.2f}",
                f"{r.floor_ms:.3f}",
                f"{r.token_ms.mean / r.floor_ms:.2f}",
                *theirs[:2],
                f"{r.prefill_ms.mean:.2f}",
                f"{r.prefill_floor_ms:.2f}",
                f"{r.prefill_ms.mean / r.prefill_floor_ms:.2f}",
                *theirs[2:],
            )
        )
    note = "Floor of a token: bytes of weights and cache ÷ bandwidth; of a prompt: operations ÷ rate of a product."
    return [Table(columns, rows, f"{first.size}, {first.new_tokens} tokens after a prompt", note, left=(2,))]
