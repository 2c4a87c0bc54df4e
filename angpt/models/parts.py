"""Parts that make another network approximately normalized; `angpt.convert` puts them into it."""

import math
import re
from typing import Any, Literal

import torch
from torch import Tensor, nn

from angpt.constraints import Constraint, constraints_of, left_out, project_
from angpt.errors import UserError
from angpt.models.primitives import LearnedScale, Resettable, lerp, linear_with_row_gains, norm, nu_lerp

ALPHA_INIT, STORED_SCALE = 0.05, 0.01
"""Initial α, and initial stored value of α and s_z: the defaults of anGPT."""
Heads = Literal["q", "k", "qkv", "qkv per head"]
"""What a map returns: queries; keys; all queries, then all keys, then all values; or these three head by head.
The three have equal size."""


class Around(nn.Module):
    """A module around another, `block`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block


class AnResidual(Around):
    """h ← lerp(h, norm(block(ν h)), α, ν(α)), in place of h + block(norm(h)).

    Args:
        block: Takes the residual stream, and further arguments; returns its output, or a tuple that starts with it.
        d: Width of the residual stream.
        factor: ν, in place of the norm before the block. It matters in a block with an activation (`mlp_factor`); the
            norm after the block removes the factor of a linear one.
    """

    def __init__(self, block: nn.Module, d: int, factor: float = 1.0) -> None:
        super().__init__(block)
        self.factor = factor
        self.alpha = LearnedScale(d, init=ALPHA_INIT, scale=STORED_SCALE)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = self.block(hidden_states * self.factor, *args, **kwargs)
        if isinstance(found, tuple):
            return self.update(hidden_states, found[0]), *found[1:]
        return self.update(hidden_states, found)

    def update(self, h: Tensor, x: Tensor) -> Tensor:
        alpha = self.alpha()
        return lerp(h, norm(x), alpha, nu_lerp(alpha))

    def extra_repr(self) -> str:
        return f"factor={self.factor:.4g}"


class AnUpdate(AnResidual):
    """`AnResidual` minus h, for a network that adds the output of its blocks to the residual stream itself."""

    def update(self, h: Tensor, x: Tensor) -> Tensor:
        return super().update(h, x) - h


class NormedHeads(Around):
    """A map to queries or keys, or to queries, keys and values, whose queries and keys have length 1 in each head.

    Queries are then multiplied by a learned g, and divided by the `scaling` that attention multiplies them by.
    """

    def __init__(self, block: nn.Module, d_head: int, heads: Heads, scaling: float) -> None:
        super().__init__(block)
        self.d_head, self.heads, self.scaling = d_head, heads, scaling
        if heads != "k":
            self.g = LearnedScale(1, init=math.sqrt(d_head), scale=math.sqrt(d_head))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        if self.heads in ("q", "k"):
            by_head = y.view(*y.shape[:-1], -1, self.d_head)
            return (self.query(by_head) if self.heads == "q" else norm(by_head)).flatten(-2)
        three, dim = ((3, -1), -3) if self.heads == "qkv" else ((-1, 3), -2)
        q, k, v = y.view(*y.shape[:-1], *three, self.d_head).unbind(dim)
        return torch.stack((self.query(q), norm(k), v), dim).flatten(-3)

    def query(self, q: Tensor) -> Tensor:
        return (norm(q) * (self.g() / self.scaling)).to(q.dtype)

    def extra_repr(self) -> str:
        return f"{self.heads}, d_head={self.d_head}"


class NormedOutput(Around):
    """norm(block(·)), for a residual stream that starts as a sum of vectors, such as those of token and position."""

    def __getattr__(self, name: str) -> Any:
        """The attributes of the block too: ViT reads those of its embeddings."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "block":
                raise
            return getattr(self.block, name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return norm(self.block(*args, **kwargs))

    def constraints(self) -> dict[str, Constraint]:
        """The constraints of the block, and a bound on the vectors of its tables, such as those of positions."""
        tables = {name: Constraint("bound", -1) for name in left_out(self.block)}
        return {f"block.{name}": constraint for name, constraint in (constraints_of(self.block) | tables).items()}


class ScaledHead(nn.Module):
    """logits = s_z · (W h) + b, with the weights of a linear head and a learned scale for each output.

    No `nn.Linear`: tools that wrap or replace those (adapters, quantizers) would lose s_z.
    """

    bias: nn.Parameter | None

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        if not isinstance(head.weight, nn.Parameter):
            raise UserError(f"the weight of the head ({type(head).__name__}) is no parameter: remove what computes it")
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight = head.weight
        self.register_parameter("bias", head.bias)
        self.s_z = LearnedScale(head.out_features, init=1.0, scale=STORED_SCALE)

    def forward(self, x: Tensor) -> Tensor:
        logits = linear_with_row_gains(x, self.weight, self.s_z())
        return logits if self.bias is None else logits + self.bias

    def constraints(self) -> dict[str, Constraint]:
        return {"weight": Constraint("bound", 1)}

    def hidden_matrices(self) -> dict[str, int]:
        """None: the weight of a head is not for Muon."""
        return {}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def mlp_factor(d: int, d_mlp: int, gated: bool) -> float:
    """ν of the input of an MLP whose input has length 1.

    Gated, as in the paper: √(d / d_mlp). Without a gate: √d, so that the activation receives values of variance 1; with
    the paper's factor they start so small that the activation is nearly linear.
    """
    return math.sqrt(d / d_mlp) if gated else math.sqrt(d)


@torch.no_grad()
def init_unit_rows_(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Initialise as anGPT does: every constrained vector uniform on the unit sphere, learned scales at their start, and
    biases and the vector of padding 0."""
    named = dict(module.named_parameters(remove_duplicate=False))
    weights = {named[name]: constraint for name, constraint in constraints_of(module).items()}
    for weight, constraint in weights.items():
        project_(weight.normal_(generator=generator), Constraint("unit", constraint.dim))
    for name, p in named.items():
        if is_bias(name):
            p.zero_()
    for part in module.modules():
        if isinstance(part, Resettable):  # not any method `reset`: other modules have their own
            part.reset()
        elif isinstance(part, nn.Embedding) and part.padding_idx is not None:
            part.weight[part.padding_idx].zero_()


def is_bias(name: str) -> bool:
    """True for the name that PyTorch gives a bias: bias, in_proj_bias, bias_ih, bias_hh_l0_reverse."""
    return re.fullmatch(r"(in_proj_)?bias(_[ih]h(_l\d+\w*)?)?", name.rpartition(".")[2]) is not None
