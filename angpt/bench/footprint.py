"""Memory per GPU and traffic between GPUs of a run, computed from sizes; docs/scaling.md has the tables."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from angpt.config import SIZES, ModelConfig, Parallel
from angpt.models.variants import build
from angpt.present.tables import Table, replace_marked
from angpt.training.plan import rule_for
from angpt.training.reducer import BUCKET_BYTES

BF16, FP32 = 2, 4
MOMENTS = 2 * FP32
KEPT = 44
"""Bytes of bf16 activations that a block keeps per token and unit of width, 22 values: its input, q, k, v, the normed q
and k, the output of attention, the two inputs of each residual update, u and z, and their product."""

# The machines that the tables assume: figures of data sheets, reduced to what is reached in practice.
GPUS = 8
"""GPUs of a machine."""
FLOPS = 0.5 * 989e12
"""FLOP/s of an H100 at an MFU of 50 %."""
INSIDE = 350e9
"""Bytes per second of a GPU over NVLink (450 GB/s in the data sheet)."""
BETWEEN = 40e9
"""Bytes per second of a GPU over the network, with one 400 Gbit/s adapter per GPU (50 GB/s in the data sheet)."""
HOP_INSIDE = 1e-6
"""Latency to the next GPU of the machine, in seconds."""
HOP_BETWEEN = 10e-6
"""Latency to the next machine, in seconds."""
CONTEXT = 2048
"""Tokens of a sequence in the tables."""


@dataclass(frozen=True)
class MatrixCounts:
    """Sizes of a model that determine memory and traffic."""

    blocks: int
    """Entries of the matrices of all blocks."""
    ends: int
    """Entries of embedding and head, which FSDP gathers once for the whole step."""
    flops_per_token: int
    parameters: int

    @property
    def matrices(self) -> int:
        return self.blocks + self.ends


@cache
def matrix_counts(cfg: ModelConfig) -> MatrixCounts:
    with torch.device("meta"):
        model = build(cfg)
    sizes = {name: p.numel() for name, p in model.matrices().items()}
    blocks = sum(n for name, n in sizes.items() if name.startswith("blocks."))
    return MatrixCounts(blocks, sum(sizes.values()) - blocks, model.flops_per_token(), model.parameter_count())


def state_bytes(cfg: ModelConfig, strategy: Parallel | None, shards: int = 1) -> float:
    """Bytes of matrices on one GPU: parameters, moments, gradients and gathered shards, with one pass per step."""
    n = matrix_counts(cfg)
    if strategy != "fsdp":  # with a copy in bf16 and its gradient
        return n.matrices * (FP32 + MOMENTS + BF16 + BF16)
    held = n.matrices * (FP32 + MOMENTS + FP32) / shards
    if shards == 1:
        return held + n.matrices * 2 * BF16
    # Embedding and head during the whole step, and a block and the next one; each has its gradient.
    return held + (n.ends + 2 * n.blocks / cfg.n_layers) * BF16 + (n.ends + n.blocks / cfg.n_layers) * BF16


def activation_bytes(cfg: ModelConfig, tokens: int, recompute: bool = False) -> float:
    """Bytes of activations on one GPU with this many tokens per forward pass."""
    layers = cfg.d_model * (BF16 * cfg.n_layers + KEPT if recompute else KEPT * cfg.n_layers)
    return tokens * (layers + BF16 * cfg.vocab_size)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends per step inside its machine and to other machines, and the latency in seconds."""

    inside: float
    between: float
    latency: float

    @property
    def seconds(self) -> float:
        """Time of the communication, without overlap with compute; both links work in parallel."""
        return max(self.inside / INSIDE, self.between / BETWEEN) + self.latency


def traffic(cfg: ModelConfig, strategy: Parallel, ranks: int, shards: int | None = None) -> Traffic:
    """Traffic of one GPU per step.

    An all-reduce of n bytes over k ranks in rings sends 2 n (k − 1)/k per rank; an all-gather or reduce-scatter half of
    that. A ring passes through all GPUs of a machine before it leaves it, and each ring uses another adapter, so an
    adapter sends 1/GPUs of that. The latency of an all-reduce is that of a tree of machines, of an all-gather a ring's.
    """
    n = matrix_counts(cfg)
    inner, machines = min(ranks, GPUS), max(1, ranks // GPUS)
    tree = 2 * machines.bit_length() * HOP_BETWEEN if machines > 1 else 0.0
    if strategy == "ddp":
        total = 2 * _part(ranks) * n.matrices * BF16
        buckets = -(-n.matrices * BF16 // BUCKET_BYTES)
        return Traffic(total, total / inner if machines > 1 else 0.0, buckets * tree)
    shards = shards or ranks
    gathers = (n.ends + 2 * n.blocks) * BF16  # blocks are gathered again for the backward pass
    shared = _part(shards) * (gathers + n.matrices * BF16)
    messages = cfg.n_layers * 3  # two all-gathers and a reduce-scatter
    if shards <= inner:  # gradients of the replicas are then all-reduced between machines
        copies = 2 * _part(ranks // shards) * n.matrices * BF16 / shards
        return Traffic(shared, copies, messages * (shards - 1) * HOP_INSIDE + cfg.n_layers * tree)
    around = (shards - machines) * HOP_INSIDE + machines * HOP_BETWEEN
    return Traffic(shared, shared / inner, messages * around)


def _part(ranks: int) -> float:
    return (ranks - 1) / ranks


def memory_table() -> str:
    """GiB per GPU for the training state, and for the activations of one sequence."""
    head = ["size", "parameters", "ddp", "fsdp 4", "fsdp 8", "fsdp 64", "a sequence", "recomputed"]
    rows = []
    for size in SIZES:
        cfg = ModelConfig.size(size, context=CONTEXT)
        cells = [state_bytes(cfg, "ddp"), *(state_bytes(cfg, "fsdp", shards) for shards in (4, 8, 64))]
        cells += [activation_bytes(cfg, CONTEXT), activation_bytes(cfg, CONTEXT, recompute=True)]
        rows.append([size, f"{matrix_counts(cfg).parameters / 1e6:,.0f}M", *(f"{c / 2**30:.2f}" for c in cells)])
    return Table(head, rows).markdown() + "\n"


def traffic_table() -> str:
    """Milliseconds of compute and communication per step of 1B at the default batch size, by the number of GPUs."""
    cfg = ModelConfig.size("1B", context=CONTEXT)
    n = matrix_counts(cfg)
    sequences = rule_for(cfg.architecture).batch_at(n.parameters, 20 * n.parameters, CONTEXT) // CONTEXT
    head = ["GPUs", "sequences each", "compute", "ddp", "fsdp, all", f"fsdp, {GPUS} each", "limit"]
    rows = []
    for ranks in (1, 8, 16, 64, 256, 1024, 4096):
        each = max(1, sequences // ranks)
        compute = each * CONTEXT * n.flops_per_token / FLOPS
        hybrid = traffic(cfg, "fsdp", ranks, min(ranks, GPUS))
        kinds = traffic(cfg, "ddp", ranks), traffic(cfg, "fsdp", ranks), hybrid
        links = [kind.seconds for kind in kinds]
        over = "" if ranks <= sequences else f"; a batch of {ranks * CONTEXT / 1e6:.1f}M tokens"
        limit = "compute" if min(links) < 2 / 3 * compute else "links"  # the backward pass, which hides it, is 2/3
        rows.append([f"{ranks:,}", f"{each}", *(f"{1e3 * x:,.1f}" for x in (compute, *links)), limit + over])
    return Table(head, rows).markdown() + "\n"


def generate(text: str) -> str:
    """The text of docs/scaling.md with up-to-date tables."""
    for name, table in {"memory": memory_table(), "traffic": traffic_table()}.items():
        if "<!-- end -->\n" not in text.partition(f"<!-- {name} -->\n")[2]:
            raise ValueError(f"docs/scaling.md has no marks for the table {name!r}")
        text = replace_marked(text, name, table)
    return text


if __name__ == "__main__":
    target = Path(__file__).parents[2] / "docs" / "scaling.md"
    target.write_text(generate(target.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {target}")
