"""The decode loop: static buffers on the device, and on a GPU one CUDA graph for the whole step, choice included.

The step looks at as many slots of the cache as the longest row needs, rounded up to a power of two, with a graph for
each. Nothing in it depends on Python: between two tokens the host only launches the graph again.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from angpt.config import Step
from angpt.errors import UserError
from angpt.fast.decode import by_kernels, supports
from angpt.inference.sampling import Sampling, pick, uniforms
from angpt.models.folded import Cache, Folded, Layer, decode_step
from angpt.models.primitives import Context

FEWEST_SLOTS = 128
"""The shortest part of the cache that has a graph of its own."""
GRAPHS_WARMED = 3
"""Steps before a capture, in which libraries set themselves up."""


@cache
def compiled_layer() -> Any:
    """One layer of a decode step, compiled once for all layers. Products with a single row become plain reductions,
    which the compiler fuses with what stands before and behind them and tunes on the spot."""

    def layer(part: Layer, h: Tensor, ctx: Context, cache: Cache, slots: Tensor) -> Tensor:
        return part.forward(h, ctx, cache, slots, by_hand=True)

    return torch.compile(layer, fullgraph=True, dynamic=False, options={"coordinate_descent_tuning": True})


def decoder_of(model: Folded, step: Step) -> Callable[..., Tensor]:
    """The function that computes the logits behind one more token of each row."""
    match step:
        case "plain":
            return model.decode
        case "compiled":
            return partial(model.decode, layer=compiled_layer())
        case "kernels" if model.device.type != "cuda" or not supports(model):
            raise UserError("the kernels need a GPU, bf16 and one of the usual architectures; leave out --step")
        case "kernels":
            return partial(by_kernels, model)
        case "auto":
            return partial(decode_step, model)


class Engine:
    """Decodes batches of one size with one model. `start` takes new prompts, `advance` adds a token to every row."""

    def __init__(
        self, model: Folded, batch: int, slots: int, new_tokens: int, how: Sampling, step: Step = "auto"
    ) -> None:
        self.model, self.how, self.slots, self.new_tokens = model, how, slots, new_tokens
        self.kind, self.decode = step, decoder_of(model, step)
        self.caches = model.make_caches(batch, slots)
        device = model.device
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.positions = torch.zeros(batch, dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.out = torch.zeros(batch, new_tokens, dtype=torch.long, device=device)
        self.uniform = torch.zeros(batch, new_tokens, device=device)
        self.seen: Tensor | None = None
        if how.repetition_penalty != 1:
            self.seen = torch.zeros(batch, model.cfg.vocab_size, dtype=torch.bool, device=device)
        self.made, self.longest = 0, 0
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def serves(self, batch: int, slots: int, new_tokens: int, how: Sampling, step: Step) -> bool:
        """Whether this engine can do what one made with these arguments would."""
        mine = (len(self.tokens), self.slots, self.new_tokens, self.how, self.kind)
        return mine == (batch, slots, new_tokens, how, step)

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], seed: int) -> None:
        """Read the prompts and choose the first token of each row."""
        lengths = [len(p) for p in prompts]
        if len(prompts) != len(self.tokens) or not 0 < max(lengths) <= self.slots:
            raise UserError(f"{len(prompts)} prompts of up to {max(lengths)} tokens do not fit this engine")
        width = max(lengths)
        padded = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts], device=self.tokens.device)
        drawn = [list(islice(uniforms(seed + row), self.new_tokens)) for row in range(len(prompts))]
        self.uniform.copy_(torch.tensor(drawn))
        self.positions.copy_(torch.tensor(lengths))
        self.count.zero_()
        if self.seen is not None:
            self.seen.zero_()
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(prompt, device=self.tokens.device)] = True
        logits = self.model.prefill(padded, self.positions, self.caches)
        self.choose(logits)
        self.made, self.longest = 1, width

    @torch.no_grad()
    def advance(self) -> None:
        """One more token for every row."""
        shown = self.shown()
        if self.tokens.device.type == "cuda":
            if shown not in self.graphs:
                self.graphs[shown] = self.capture(shown)
            self.graphs[shown].replay()
        else:
            self.step(shown)
        self.made += 1
        self.longest += 1

    def shown(self) -> int:
        """How many slots the next step looks at."""
        shown = FEWEST_SLOTS
        while shown < self.longest + 1:
            shown *= 2
        return min(shown, self.slots)

    def step(self, shown: int) -> None:
        """The whole of a decode step, on tensors that stay where they are."""
        caches = [Cache(c.keys[:, :, :shown], c.values[:, :, :shown]) for c in self.caches]
        logits = self.decode(self.tokens, self.positions, caches, self.slots)
        self.positions.add_(1)
        self.choose(logits)

    def choose(self, logits: Tensor) -> None:
        token = pick(logits, self.how, self.uniform.index_select(1, self.count)[:, 0], self.seen)
        self.tokens.copy_(token)
        self.out.index_copy_(1, self.count, token[:, None])
        self.count.add_(1)
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)

    def capture(self, shown: int) -> torch.cuda.CUDAGraph:
        """The step as a graph. The steps before the capture write to the cache only what the graph will write again."""
        state = [t for t in (self.tokens, self.positions, self.count, self.out, self.seen) if t is not None]
        saved = [t.clone() for t in state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(GRAPHS_WARMED):
                self.step(shown)
                for tensor, value in zip(state, saved, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self.step(shown)
        return graph

    def read(self, start: int) -> list[list[int]]:
        """The tokens of every row from the start-th new one on. Waits for the device."""
        return self.out[:, start : self.made].tolist()
