"""Continuous batching: rows that are decoded together, each of which joins and leaves between two steps.

The rows in use are always the first ones of the cache: when a row leaves, the last one takes its place. The host knows
the newest token and the position of every row and copies them to the device before each step; on a GPU the step is a
CUDA graph, one for each power of two of rows and of slots. A graph writes to fixed addresses, so prompts are read into
a cache of one row, and copied to their place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from angpt.inference.engine import PromptReader, graphs_apply, record, shown_slots
from angpt.inference.sampling import Sampling, pick, uniforms
from angpt.models.folded import Cache, Folded, decode_step, read_prompts


@dataclass(eq=False)
class Row:
    """A text in progress."""

    sampling: Sampling
    uniforms: Iterator[float]
    seen: Tensor | None
    """Mask (V) of the tokens that have occurred, for a repetition penalty."""
    position: int
    """Number of tokens in the cache."""
    token: int = 0
    """The newest token, which is not in the cache yet."""


class Batch:
    """Up to `size` rows of up to `slots` tokens, of one model."""

    def __init__(self, model: Folded, size: int, slots: int) -> None:
        self.model, self.size, self.slots = model, size, slots
        self.recorded = graphs_apply(model.device)
        self.caches = model.make_caches(size, slots)
        self.reader = None
        if self.recorded:
            self.reader = PromptReader(model.make_caches(1, slots), partial(read_prompts, model), recorded=True)
        self.tokens, self.positions = (torch.zeros(size, dtype=torch.long, device=model.device) for _ in range(2))
        self.logits = torch.zeros(size, model.cfg.vocab_size, dtype=model.wide, device=model.device)
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self.rows: list[Row] = []

    @property
    def cache_bytes(self) -> int:
        single = [] if self.reader is None else self.reader.caches
        return sum(tensor.nbytes for cache in [*self.caches, *single] for tensor in cache)

    @torch.no_grad()
    def join(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Row:
        """Read a prompt into a free row and choose the first token after it."""
        place, tokens = len(self.rows), torch.tensor([prompt], device=self.model.device)
        if self.reader is None:
            caches = [Cache(c.keys[place : place + 1], c.values[place : place + 1]) for c in self.caches]
            logits = read_prompts(self.model, tokens, torch.tensor([len(prompt)], device=self.model.device), caches)
        else:
            logits = self.reader([prompt])
            for cache, single in zip(self.caches, self.reader.caches, strict=True):
                for tensor, part in zip(cache, single, strict=True):
                    tensor[place, :, : len(prompt)] = part[0, :, : len(prompt)]
        seen = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
            seen[tokens[0]] = True
        row = Row(sampling, uniforms(seed), seen, len(prompt))
        self.rows.append(row)
        choose([row], logits)
        return row

    @torch.no_grad()
    def step(self) -> None:
        """Add one token to every row."""
        count = len(self.rows)
        width = min(1 << (count - 1).bit_length(), self.size) if self.recorded else count
        tokens, positions = torch.zeros(2, width, dtype=torch.long)  # rows that only fill up the width stay at slot 0
        tokens[:count] = torch.tensor([row.token for row in self.rows])
        positions[:count] = torch.tensor([row.position for row in self.rows])
        self.tokens[:width].copy_(tokens)
        self.positions[:width].copy_(positions)
        self._decode(width, shown_slots(max(row.position for row in self.rows), self.slots))
        for row in self.rows:
            row.position += 1
        choose(self.rows, self.logits[:count])

    def leave(self, row: Row) -> None:
        """Free a row; the last one takes its place."""
        place, last = self.rows.index(row), self.rows.pop()
        if last is not row:
            self.rows[place] = last
            for tensor in (t for cache in self.caches for t in cache):
                tensor[place, :, : last.position] = tensor[len(self.rows), :, : last.position]

    def _decode(self, width: int, shown: int) -> None:
        def run() -> None:
            caches = [Cache(c.keys[:width, :, :shown], c.values[:width, :, :shown]) for c in self.caches]
            self.logits[:width] = decode_step(
                self.model, self.tokens[:width], self.positions[:width], caches, self.slots
            )

        if not self.recorded:
            run()
            return
        if (width, shown) not in self.graphs:
            # running it again changes nothing
            self.graphs[width, shown] = record(run, run, self.graphs.values(), self.model.device)
        self.graphs[width, shown].replay()


def choose(rows: Sequence[Row], logits: Tensor) -> None:
    """The next token of each row, from its logits (B, V). Rows with the same settings are sampled together."""
    groups: dict[Sampling, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row.sampling, []).append(place)
    for sampling, places in groups.items():
        members = [rows[place] for place in places]
        drawn = torch.tensor([next(row.uniforms) for row in members], device=logits.device)
        masks = [row.seen for row in members if row.seen is not None]
        tokens = pick(logits[places], sampling, drawn, torch.stack(masks) if masks else None)
        for row, token in zip(members, tokens.tolist(), strict=True):
            row.token = token
            if row.seen is not None:
                row.seen[token] = True
