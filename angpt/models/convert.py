"""Converts other transformers to anGPT: `convert` replaces modules of a pre-norm transformer, in place.

The code of the network stays. Where it computes h + block(norm(h)), the norm becomes the identity and the block is
wrapped, so that it returns what the residual update of anGPT adds to h. A `Description` names the modules.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from angpt.constraints import MAPS, constraints_of, left_out
from angpt.errors import UserError
from angpt.models.factors import nu_linear
from angpt.models.parts import (
    AnUpdate,
    Around,
    Heads,
    NormedHeads,
    NormedOutput,
    ScaledHead,
    init_unit_rows_,
    is_bias,
    mlp_factor,
)
from angpt.models.primitives import LearnedScale
from angpt.serialization import check_types

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Description:
    """Where a pre-norm transformer has the parts that anGPT replaces.

    A name stands for all modules whose name ends with it: "mlp" for "model.layers.0.mlp" and those of other layers. The
    full name of a module stands for this one only.
    """

    attention: tuple[str, ...]
    """Attention blocks, whose output the network adds to the residual stream."""
    mlp: tuple[str, ...]
    """MLPs, whose output the network adds to the residual stream."""
    norms: tuple[str, ...]
    """Norms before these blocks and before the head, which are removed."""
    heads: dict[str, Heads] = field(hash=False)
    """Maps to queries and keys, or norms of these, and what they return."""
    start: tuple[str, ...] = ()
    """Modules whose output starts the residual stream as a sum of vectors (token, position); the output is normed."""
    head: tuple[str, ...] = ()
    """Linear maps to logits."""
    gated: bool = False
    """True if the MLP multiplies its activation by a second map, as SwiGLU does."""
    d_model: int | None = None
    """Width; `hidden_size` of the network's `config` unless given."""
    d_head: int | None = None
    """Width of a head; from the `config` unless given."""
    d_mlp: int | None = None
    """Width of the MLP, needed if gated; `intermediate_size` of the `config` unless given."""

    def __post_init__(self) -> None:
        check_types(self, "Description.")


LLAMA = Description(
    attention=("self_attn",),
    mlp=("mlp",),
    norms=("input_layernorm", "post_attention_layernorm", "norm"),
    heads={"q_proj": "q", "k_proj": "k"},
    head=("lm_head", "score"),
    gated=True,
)
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": replace(LLAMA, heads={"q_norm": "q", "k_norm": "k"}),
    "gpt2": Description(
        attention=("attn",),
        mlp=("mlp",),
        norms=("ln_1", "ln_2", "ln_f"),
        heads={"attn.c_attn": "qkv"},
        start=("drop",),  # of the sum of token and position
        head=("lm_head", "score", "classifier"),
    ),
    "gpt_neox": Description(
        attention=("attention",),
        mlp=("mlp",),
        norms=("input_layernorm", "post_attention_layernorm", "final_layer_norm"),
        heads={"query_key_value": "qkv per head"},
        head=("embed_out", "lm_head", "score", "classifier"),
    ),
    "vit": Description(
        attention=("attention",),
        mlp=("mlp",),
        norms=("layernorm_before", "layernorm_after", "layernorm"),
        heads={"q_proj": "q", "k_proj": "k"},
        start=("patch_embeddings", "embeddings"),
        head=("classifier",),
    ),
}
"""Descriptions of transformers' models, by `model_type` of their config."""


@dataclass
class Conversion:
    """What `convert` changed in a network, and what it left as it was."""

    changed: dict[str, list[str]] = field(default_factory=dict)
    """What was done, and the names of the modules or parameters that it was done to."""
    left: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = {"changed": self.changed, "left as it was": self.left}
        return "\n".join(
            f"{title}\n" + "\n".join(f"  {what} ({len(names)}): {shortened(names)}" for what, names in rows.items())
            for title, rows in parts.items()
            if rows
        )


def shortened(names: list[str]) -> str:
    """Names with numbers of layers as *, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))


def convert(
    model: nn.Module,
    description: Description | None = None,
    *,
    init: bool = True,
    generator: torch.Generator | None = None,
) -> Conversion:
    """Turn a pre-norm transformer into its approximately normalized form, in place.

    Norms become constant factors, residual sums become learned interpolations, queries and keys get length 1 and a
    learned scale, logits a learned scale s_z. All weights are drawn anew, because those of the original do not fit.
    Train it under its constraints: `angpt.constrain(optimizer, model)`.

    Args:
        model: Llama, Mistral, Qwen 2 and 3, GPT-2, GPT-NeoX or ViT of transformers, or any network with a description.
        description: Where the parts are; known for the models named above.
        init: False leaves the weights, for those of a converted model that are loaded next.
        generator: Source of the random weights.

    Returns:
        What was changed, and what was left.
    """
    kind = type(model).__name__
    if any(isinstance(part, Around | ScaledHead) for part in model.modules()):
        raise UserError(f"{kind} is converted already")
    if any(hasattr(part, "lora_A") or type(part).__module__.startswith("peft.") for part in model.modules()):
        raise UserError(f"{kind} has adapters, which convert would draw anew: convert first, then add LoRA")
    config = getattr(model, "config", None)
    where = description or FAMILIES.get(getattr(config, "model_type", ""))
    if where is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"{kind}: no description is known (known: {known}); give an angpt.Description")
    with torch.device(next(model.parameters()).device):
        planned = list(replacements(model, sized(where, config)))
    modules, changed = dict(model.named_modules(remove_duplicate=False)), [name for _, name, _ in planned]
    for needed, names in {"attention": where.attention, "MLP": where.mlp, "query or key": tuple(where.heads)}.items():
        if not any(stands_for(names, name, modules) for name in changed):
            raise UserError(f"{kind}: no {needed} found under the name {' or '.join(names)}")
    if where not in FAMILIES.values():  # these name alternatives
        given = (*where.attention, *where.mlp, *where.norms, *where.heads, *where.start, *where.head)
        if unused := [end for end in given if not any(stands_for((end,), name, modules) for name in changed)]:
            raise UserError(f"{kind}: nothing to convert under the names {', '.join(unused)} of the Description")
    report = Conversion()
    for what, name, part in planned:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, part)
        report.changed.setdefault(what, []).insert(0, name)
    if init:
        init_unit_rows_(model, generator)
    drawn = "bounded by length 1" + (", drawn anew" if init else "")
    report.changed[f"vectors {drawn}"] = list(constraints_of(model))
    report.left = {what: names for what, names in leftovers(model).items() if names}
    return report


def converted(kind: type[M], description: Description | None = None) -> type[M]:
    """The class of converted models: its `from_pretrained` loads what a converted model of transformers has saved.

    Args:
        kind: Class of the original model, such as `LlamaForCausalLM`.
        description: The one given to `convert`.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        name = getattr(kind, "__name__", repr(kind))
        raise UserError(f"converted needs the class of a model, such as LlamaForCausalLM, not {name}")
    return _converted(kind, description)  # type: ignore[arg-type]  # mypy knows no hash of classes


@cache  # one class for all models of a kind
def _converted(kind: Any, description: Description | None) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        convert(self, description, init=not next(self.parameters()).is_meta)  # from_pretrained builds it on meta

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _empty, (kind, description), self.__getstate__()

    members = {"__init__": init, "__reduce_ex__": reduce, "__module__": kind.__module__, "__doc__": kind.__doc__}
    in_fp32 = getattr(kind, "_keep_in_fp32_modules_strict", None) or ()
    members["_keep_in_fp32_modules_strict"] = {*in_fp32, "stored"}  # α, g and s_z
    return type(kind.__name__, (kind,), members)


def _empty(kind: Any, description: Description | None) -> Any:
    """An instance of the class of converted models, for pickle to fill."""
    cls = _converted(kind, description)
    return cls.__new__(cls)


def stands_for(ends: Iterable[str], name: str, modules: Container[str]) -> bool:
    """True if one of the names of a description stands for the module of this name."""
    return any(name == end if end in modules else f".{name}".endswith(f".{end}") for end in ends)


def sized(where: Description, config: Any) -> Description:
    """The description with the widths that its config states; an error if its fused maps are not three equal parts."""
    d_model = where.d_model or getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or heads
    if keys != heads and (fused := [name for name, kind in where.heads.items() if kind.startswith("qkv")]):
        raise UserError(
            f"{fused[0]}: a fused map needs as many keys as queries, but the config has {keys} and {heads} heads"
        )
    d_head = where.d_head or getattr(config, "head_dim", None) or (d_model // heads if d_model and heads else None)
    d_mlp = where.d_mlp or getattr(config, "intermediate_size", None)
    for name, size in {"d_model": d_model, "d_head": d_head, **({"d_mlp": d_mlp} if where.gated else {})}.items():
        if size is None:
            raise UserError(f"the network has no config that states its widths: give {name} in the Description")
    return replace(where, d_model=d_model, d_head=d_head, d_mlp=d_mlp)


def replacements(model: nn.Module, where: Description) -> Iterator[tuple[str, str, nn.Module]]:
    """What is done, the name of a module, and the module that takes its place; inner modules first."""
    d, d_head = where.d_model or 0, where.d_head or 0
    mlp = mlp_factor(d, where.d_mlp or 0, where.gated)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, part in reversed(list(places(modules))):
        if kinds := [kind for end, kind in where.heads.items() if stands_for((end,), name, modules)]:
            attention = model.get_submodule(name.rpartition(".")[0])
            scaling = getattr(attention, "scaling", d_head**-0.5)
            inner = nn.Identity() if "Norm" in type(part).__name__ else part
            yield "queries and keys normed", name, NormedHeads(inner, d_head, kinds[0], scaling)
        elif stands_for(where.norms, name, modules):
            if isinstance(part, MAPS):
                raise UserError(f"{name} is no norm but a {type(part).__name__}: give the full name of the norm")
            yield "norm removed", name, nn.Identity()
        elif stands_for(where.attention, name, modules):
            yield "sum with attention made an interpolation", name, AnUpdate(part, d, nu_linear(d, d_head))
        elif stands_for(where.mlp, name, modules):
            yield f"sum with MLP made an interpolation, input times {mlp:.4g}", name, AnUpdate(part, d, mlp)
        elif stands_for(where.start, name, modules):
            yield "start of the residual stream normed", name, NormedOutput(part)
        elif stands_for(where.head, name, modules) and isinstance(part, nn.Linear):
            yield "logits scaled by s_z", name, ScaledHead(part)


def places(modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every attribute of the network that holds a module, by name: a module that two layers share has two, those of a
    layer that is used twice count once."""
    seen = set()
    for name, part in modules.items():
        outer, _, attribute = name.rpartition(".")
        if (place := (id(modules[outer]), attribute)) not in seen:
            seen.add(place)
            yield name, part


def leftovers(model: nn.Module) -> dict[str, list[str]]:
    """What a converted network still has that anGPT does not."""

    def modules(has: Callable[[Any], bool]) -> list[str]:
        return [name for name, part in model.named_modules() if has(part)]

    def is_norm(part: nn.Module) -> bool:
        return "Norm" in type(part).__name__ and not isinstance(part, Around)

    def drops(part: Any) -> bool:
        path = type(part).__name__ == "DropPath" and getattr(part, "drop_prob", True)
        return bool(path) or (isinstance(part, nn.Dropout) and part.p > 0)

    known = {
        p
        for part in model.modules()
        if is_norm(part) or isinstance(part, LearnedScale)
        for p in part.parameters(recurse=False)
    }
    vectors = {name: p for name, p in model.named_parameters() if p.ndim < 2 and p.requires_grad and p not in known}
    tables = {id(part.weight): name for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    return {
        "norm": modules(is_norm),
        "bias": [name for name, _ in model.named_parameters() if is_bias(name)],
        "learned vector": [name for name in vectors if not is_bias(name)],
        "dropout": modules(drops),
        "head tied to the embedding": modules(lambda part: isinstance(part, ScaledHead) and id(part.weight) in tables),
        "both updates of a layer are added to the same stream": modules(
            lambda part: not isinstance(part, Around) and getattr(part, "use_parallel_residual", False)
        ),
        "parameter without a bound": left_out(model),
    }
