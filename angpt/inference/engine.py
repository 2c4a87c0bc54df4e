"""The decode loop: static buffers on the device, and on a GPU one CUDA graph for the whole step, sampling included.

A step attends to as many slots of the cache as the longest row needs, rounded up to a power of two, with one graph per
length. Between two tokens the host only launches the graph. Prompts are read by graphs, too, padded to a few lengths,
with a graph for each that occurs more than once.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from angpt.config import Step
from angpt.errors import UserError, nearest
from angpt.fast import tuning
from angpt.fast.decode import by_kernels, prompts_by_kernels, supports
from angpt.fast.models import HEAD_SIZES
from angpt.inference.sampling import Sampling, pick, uniforms
from angpt.models.folded import Cache, Folded, Layer, decode_step, read_prompts
from angpt.models.primitives import Context
from angpt.operations import kernels_enabled

FEWEST_SLOTS = 128
"""Smallest number of slots that a step attends to."""
WARMUP_STEPS = 3
"""Steps before a graph is captured, in which libraries initialise themselves."""
MOST_SHAPES = 4096
"""Largest number of shapes for which a layer of a decode step is compiled."""


@cache
def compiled_layer() -> Any:
    """One layer of a decode step, compiled once for all layers. Matrix products with a single row become reductions,
    which the compiler fuses with their neighbours and autotunes."""

    def layer(part: Layer, h: Tensor, ctx: Context, cache: Cache, slots: Tensor) -> Tensor:
        return part.forward(h, ctx, cache, slots, by_hand=True)

    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True})

    def call(*args: Any) -> Tensor:
        # One for each number of rows and of slots, of which PyTorch allows eight in a process.
        with torch._dynamo.config.patch(recompile_limit=MOST_SHAPES, accumulated_recompile_limit=MOST_SHAPES):
            return compiled(*args)

    return call


@cache
def compiled_prompt_layer() -> Any:
    """One layer for whole prompts, compiled once for all layers and lengths."""
    return torch.compile(Layer.forward, fullgraph=True, dynamic=True)


def reader_of(model: Folded, step: Step) -> Callable[..., Tensor]:
    """The function that reads prompts into caches, and returns the logits after them."""
    match step:
        case "plain":
            return partial(Folded.prefill, model)
        case "compiled":
            return partial(Folded.prefill, model, layer=compiled_prompt_layer())
        case "kernels":
            return partial(prompts_by_kernels, model)
        case _:
            return partial(read_prompts, model)


def decoder_of(model: Folded, step: Step) -> Callable[..., Tensor]:
    """The function that computes the logits after one more token of each row."""
    match step:
        case "plain":
            return partial(Folded.decode, model)
        case "compiled":
            return partial(Folded.decode, model, layer=compiled_layer())
        case "kernels" if not kernels_enabled():
            raise UserError("the kernels are turned off (ANGPT_KERNELS=off); use step='auto'")
        case "kernels" if model.device.type != "cuda" or not supports(model):
            raise UserError(
                "the kernels need a GPU (for fp8 weights Ada or later), bf16 or fp16, any architecture but gpt+/dyt, "
                f"and heads of {', '.join(map(str, HEAD_SIZES))} dimensions; use step='auto'"
            )
        case "kernels":
            return partial(by_kernels, model)
        case "auto":
            return partial(decode_step, model)
        case _:
            raise UserError(f"unknown step {step!r}: {nearest(step, get_args(Step))}")


def shown_slots(longest: int, slots: int) -> int:
    """Number of slots that a step attends to if the longest row has this many tokens: a power of two, or all."""
    return min(max(FEWEST_SLOTS, 1 << longest.bit_length()), slots)


def graphs_apply(device: torch.device) -> bool:
    """True if steps on this device are CUDA graphs: on a GPU, unless the switch for fast forms is off."""
    return kernels_enabled() and device.type == "cuda"


def record(
    run: Callable[[], None],
    warm_up: Callable[[], None],
    others: Iterable[torch.cuda.CUDAGraph],
    device: torch.device,
) -> torch.cuda.CUDAGraph:
    """A function as a CUDA graph of a device, which shares the memory of other graphs that never run at the same time.

    Streams and graphs belong to the current device, which need not be that of the model; work on another device would
    not be captured.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                warm_up()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in others), None)
        # Without a stream, one that PyTorch made for the first capture of the process, perhaps on another device;
        # thread_local, because other threads may allocate pinned memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph


def prompt_length(longest: int, slots: int) -> int:
    """Length to which prompts are padded for a graph: 2ⁿ or 1.5 · 2ⁿ, from 12 on, or all. From 9 tokens on, at most a
    third is padding."""
    power = 1 << max(4, (longest - 1).bit_length())
    return min(power * 3 // 4 if longest <= power * 3 // 4 else power, slots)


class PromptReader:
    """Reads prompts, always the same number of them, into the same caches, with CUDA graphs if `recorded`."""

    def __init__(self, caches: Sequence[Cache], read: Callable[..., Tensor], recorded: bool) -> None:
        self.caches, self.read, self.recorded = caches, read, recorded
        self.rows, _, self.slots, _ = caches[0].keys.shape
        self.device = caches[0].keys.device
        self.lengths = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self.tokens: dict[int, Tensor] = {}
        """Tokens (B, T) of the last prompts, by the length to which they are padded."""
        self.logits: dict[int, Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits (B, V) after the last token of each prompt, valid until the next call."""
        longest = max(map(len, prompts))
        length = prompt_length(longest, self.slots)
        self.lengths.copy_(torch.tensor([len(p) for p in prompts]))
        if not self.recorded or self.rows * length > tuning.PROMPT_GRAPH_TOKENS:
            return self.run(padded(prompts, longest).to(self.device))
        tokens = padded(prompts, length)
        if length not in self.tokens:  # perhaps the only prompts of this length: capturing takes longer than reading
            self.tokens[length] = tokens.to(self.device)
            return self.run(self.tokens[length][:, :longest])
        self.tokens[length].copy_(tokens)
        if length not in self.graphs:
            self.graphs[length] = self.capture(length)
        self.graphs[length].replay()
        return self.logits[length]

    def run(self, tokens: Tensor) -> Tensor:
        return self.read(tokens, self.lengths, self.caches)

    def capture(self, length: int) -> torch.cuda.CUDAGraph:
        """Reading prompts of a length as a CUDA graph. Reading them several times writes the same."""

        def run() -> None:
            self.logits[length] = self.run(self.tokens[length])

        return record(run, run, self.graphs.values(), self.device)


def padded(prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    """Prompts as a tensor (B, T), with zeros after the shorter ones. NumPy reads lists faster than PyTorch."""
    tokens = np.zeros((len(prompts), length), np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return torch.from_numpy(tokens)


class Engine:
    """Decodes batches of one size with one model: `start` reads prompts, `advance` adds a token to every row."""

    def __init__(
        self,
        model: Folded,
        batch: int,
        slots: int,
        new_tokens: int,
        sampling: Sampling,
        step: Step = "auto",
        caches: Sequence[Cache] | None = None,
    ) -> None:
        """`caches` are made unless given; engines that share them take turns, each from `start` to its last token."""
        self.sampling, self.slots, self.new_tokens = sampling, slots, new_tokens
        self.recorded = graphs_apply(model.device)
        self.settings = (batch, slots, new_tokens, sampling, step, kernels_enabled())
        self.decode = decoder_of(model, step)
        self.caches = model.make_caches(batch, slots) if caches is None else caches
        zeros = partial(torch.zeros, dtype=torch.long, device=model.device)
        self.tokens, self.positions, self.count = zeros(batch), zeros(batch), zeros(1)
        self.out = zeros(batch, new_tokens)
        self.uniform = zeros(batch, new_tokens, dtype=torch.float32)
        penalised = sampling.repetition_penalty != 1
        self.seen = zeros(batch, model.cfg.vocab_size, dtype=torch.bool) if penalised else None
        self.reader = PromptReader(self.caches, reader_of(model, step), self.recorded)
        self.made, self.longest = 0, 0
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], seed: int) -> None:
        """Read the prompts and choose the first token of each row."""
        lengths = [len(p) for p in prompts]
        if len(prompts) != len(self.tokens) or not 0 < max(lengths) <= self.slots:
            raise UserError(f"{len(prompts)} prompts of up to {max(lengths)} tokens do not fit this engine")
        if not self.sampling.greedy:
            drawn = [list(islice(uniforms(seed + row), self.new_tokens)) for row in range(len(prompts))]
            self.uniform.copy_(torch.tensor(drawn))
        if self.seen is not None:
            self.seen.zero_()
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(prompt, device=self.tokens.device)] = True
        logits = self.reader(prompts)
        # Copies from the host would wait until a GPU has read the prompts; the launches below go on meanwhile.
        self.positions.copy_(self.reader.lengths)
        self.count.zero_()
        self.sample(logits)
        self.made, self.longest = 1, max(lengths)

    @torch.no_grad()
    def advance(self) -> None:
        """Add one token to every row."""
        shown = self.shown()
        if self.recorded:
            if shown not in self.graphs:
                self.graphs[shown] = self.capture(shown)
            self.graphs[shown].replay()
        else:
            self.step(shown)
        self.made += 1
        self.longest += 1

    def shown(self) -> int:
        """Number of slots that the next step attends to."""
        return shown_slots(self.longest, self.slots)

    def step(self, shown: int) -> None:
        """A whole decode step, on tensors with fixed addresses."""
        caches = [Cache(c.keys[:, :, :shown], c.values[:, :, :shown]) for c in self.caches]
        logits = self.decode(self.tokens, self.positions, caches, self.slots)
        self.positions.add_(1)
        self.sample(logits)

    def sample(self, logits: Tensor) -> None:
        """Choose the next token of each row."""
        uniform = None if self.sampling.greedy else self.uniform.index_select(1, self.count)[:, 0]
        token = pick(logits, self.sampling, uniform, self.seen)
        self.tokens.copy_(token)
        self.out.index_copy_(1, self.count, token[:, None])
        self.count.add_(1)
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)

    def capture(self, shown: int) -> torch.cuda.CUDAGraph:
        """The step as a CUDA graph. Warm-up steps write to the cache only what the graph will write again."""
        state = [t for t in (self.tokens, self.positions, self.count, self.out, self.seen) if t is not None]
        saved = [t.clone() for t in state]

        def warm_up() -> None:
            self.step(shown)
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        return record(partial(self.step, shown), warm_up, self.graphs.values(), self.tokens.device)

    def read(self, start: int) -> list[list[int]]:
        """The new tokens of every row from number `start` on. Waits for the device."""
        return self.out[:, start : self.made].tolist()
