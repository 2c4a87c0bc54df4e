"""Which operations a model is made of, read off its class: what folding and export need to know of an architecture.

A block is known by its methods. A variant that changes one of them in a way that is not listed here is refused by name,
rather than folded or exported as something that it is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from angpt.errors import UserError
from angpt.models import angpt, decoder, gptplus, ngpt, variants
from angpt.models.decoder import Decoder
from angpt.models.primitives import LerpFactor, PositiveScale, RMSNorm


@dataclass(frozen=True)
class Graph:
    """What an architecture computes, its learned parameters aside.

    ν_qkv is not here: it vanishes in the norms of q and k, and passes through attention linearly with v, so that it
    stands with ν_p. The factor of `angpt/attention-factor` vanishes in the norm behind the block.
    """

    input: Literal["none", "rms", "tanh"]
    """Before each block and before the head: nothing, rms(h) · γ, or tanh(a h) · γ."""
    input_factors: tuple[float, ...]
    """A constant per layer behind that."""
    qk: Literal["g", "s_qk", "plain"]
    """q and k normed and scaled by g, normed and scaled by s_qk and √d_k, or divided by √d_h alone."""
    s_uz: bool
    """u and z are scaled by a learned vector, and z by √d_m."""
    nu_p: float
    """Factor of the attention output: ν_qkv ν_p of anGPT."""
    nu_uz: float
    """Factor of u and z."""
    nu_d: float
    """Factor of the MLP output: ν_acf ν_d of anGPT."""
    output_norm: bool
    """A norm after each block."""
    lerp: bool
    """The residual update interpolates with a learned α; otherwise it is a sum."""
    positive_alpha: bool
    """The absolute value of α counts."""
    nu_alpha: bool
    """The update is multiplied by ν(α)."""
    update_factor: float
    """The update is multiplied by this number as well."""
    update_norm: bool
    """A norm after each residual update."""
    s_z: bool
    """The logits are scaled by a learned vector."""
    embed_scale: bool
    """The embedding is scaled by a learned number."""


Facts = dict[str, Any]
PRE, BARE = {"input": "norm"}, {"input": "none"}
SUM = {"lerp": False, "positive_alpha": False, "nu_alpha": False, "update_factor": 1.0, "update_norm": False}
NOTHING: Facts = {}

BLOCK: dict[str, dict[Callable[..., Any], Facts]] = {
    "normed_heads": {decoder.Block.normed_heads: NOTHING},
    "attend": {decoder.Block.attend: NOTHING, variants.AttentionFactor.Block.attend: NOTHING},
    "attention": {
        gptplus.Block.attention: PRE | {"qk": "g"},
        variants.NoQKNorm.Block.attention: PRE | {"qk": "plain"},
        ngpt.Block.attention: BARE | {"qk": "s_qk"},
        angpt.Block.attention: BARE | {"qk": "g"},
    },
    "mlp": {
        gptplus.Block.mlp: PRE | {"s_uz": False},
        ngpt.Block.mlp: BARE | {"s_uz": True},
        angpt.Block.mlp: BARE | {"s_uz": False},
    },
    "forward": {
        gptplus.Block.forward: SUM | {"output_norm": False},
        variants.NoLerp.Block.forward: SUM | {"output_norm": True},
        ngpt.Block.forward: {"lerp": True, "output_norm": True},
        angpt.Block.forward: {"lerp": True, "output_norm": True},
    },
}
UPDATE: dict[Callable[..., Any], Facts] = {
    ngpt.Block.update: {"nu_alpha": False, "update_factor": 1.0, "update_norm": True},
    variants.NGPTLerpFactor.Block.update: {"nu_alpha": True, "update_factor": 1.0, "update_norm": False},
    angpt.Block.update: {"update_norm": False},  # its ν(α) is a method of its own
}
MODEL: dict[str, dict[Callable[..., Any], Facts]] = {
    "forward": {decoder.Decoder.forward: NOTHING},
    "start": {decoder.Decoder.start: NOTHING},
    "embed": {
        gptplus.GPTPlus.embed: {"embed_scale": False},
        ngpt.NGPT.embed: {"embed_scale": False},
        angpt.AnGPT.embed: {"embed_scale": False},
        variants.DyT.embed: {"embed_scale": True},
    },
    "head": {gptplus.GPTPlus.head: {"s_z": False}, ngpt.NGPT.head: {"s_z": True}, angpt.AnGPT.head: {"s_z": True}},
}


def read_graph(model: Decoder) -> Graph:
    """The graph of a model; an error that names the method, where the model does something that is not known here."""
    name = model.cfg.architecture
    block: Any = model.blocks[0]
    if any(type(other) is not type(block) for other in model.blocks):
        raise UserError(f"{name}: its blocks are of several classes, so it can be neither folded nor exported")
    facts: Facts = {"nu_p": 1.0, "nu_uz": 1.0, "nu_d": 1.0, "input_factors": (1.0,) * model.cfg.n_layers}
    for owner, table in ((model, MODEL), (block, BLOCK)):
        for method, known in table.items():
            found = _known(name, owner, method, known)
            if any(facts.get(key, value) != value for key, value in found.items()):
                raise UserError(f"{name}: its methods do not belong together; it can be neither folded nor exported")
            facts |= found
    # A stream that is longer by √d_m is read without a norm in front and written with one behind, or neither.
    if (facts["input"] == "norm") == facts["output_norm"]:
        raise UserError(f"{name}: has norms on both sides of a block or none; it can be neither folded nor exported")
    if facts["lerp"]:
        facts |= _known(name, block, "update", UPDATE)
        facts["positive_alpha"] = isinstance(block.alpha_a, PositiveScale)
        if "nu_alpha" not in facts:
            facts |= _nu_of(name, block.nu_lerp)
    if facts["input"] == "norm":
        norms = [block.norm_a for block in model.blocks]
        facts["input"] = _input_of(name, norms[0])
        facts["input_factors"] = tuple(float(getattr(norm, "factor", 1.0)) for norm in norms)
    if isinstance(block, angpt.Block):
        nu = block.nu
        facts |= {"nu_p": nu.qkv * nu.p, "nu_uz": nu.uz, "nu_d": nu.acf * nu.d}
    return Graph(**facts)


def _known(name: str, owner: Any, method: str, known: Mapping[Callable[..., Any], Facts]) -> Facts:
    found = getattr(type(owner), method)
    if found not in known:
        raise UserError(
            f"{name}: {found.__qualname__} is not among the operations that can be folded or exported "
            f"(angpt/inference/graph.py lists them under {method!r})"
        )
    return known[found]


def _nu_of(name: str, factor: Any) -> Facts:
    if type(factor) is not LerpFactor:
        raise UserError(
            f"{name}: its factor of the residual update is neither ν(α) nor 1; it can be neither folded nor exported"
        )
    return {"nu_alpha": factor.of_alpha, "update_factor": factor.times}


def _input_of(name: str, norm: Any) -> str:
    kinds: dict[type, str] = {RMSNorm: "rms", variants.DynamicTanh: "tanh"}
    if type(norm) not in kinds:
        raise UserError(f"{name}: {type(norm).__name__} is not among the norms that can be folded or exported")
    return kinds[type(norm)]


@dataclass(frozen=True)
class Operations:
    """What is left of one layer when everything that is constant has been folded: the rows of `angpt fold`'s table."""

    residual: str
    norms: int
    vectors: int
    """Products with a vector of the width of the residual stream; with the attention scale, where it is a vector."""
    tanh: int
    norms_at_head: int


def operations(graph: Graph) -> Operations:
    """Counted from the graph; a test counts them in a running model."""
    normed = {"none": 0, "tanh": 0, "rms": 2}[graph.input]
    qk_norms = 0 if graph.qk == "plain" else 2
    update = "keep·h + add·x" if graph.lerp else "h + x"
    return Operations(
        residual=f"rms({update})" if graph.update_norm else update,
        norms=normed + qk_norms + 2 * graph.output_norm + 2 * graph.update_norm,
        vectors=4 * graph.lerp + (graph.qk == "s_qk"),
        tanh=2 if graph.input == "tanh" else 0,
        norms_at_head=int(graph.input == "rms"),
    )
