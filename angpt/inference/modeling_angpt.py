"""GPT+, nGPT, anGPT and their variants for transformers, in one file that needs nothing else.

The parameters are those of training, byte for byte, except that an export for engines has s_z multiplied into the head.
The `graph` in config.json says what an architecture computes. Constant factors and learned scales multiply activations
here, which gives the same function as in training.
Vectors and the residual stream stay in fp32 if the matrices are bf16.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

EPS = 1e-20


class AnGPTConfig(PreTrainedConfig):  # type: ignore[misc]
    """Dimensions by their names in transformers, and the graph of the architecture."""

    model_type = "angpt"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 50_304,
        hidden_size: int = 256,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 4,
        intermediate_size: int = 1024,
        max_position_embeddings: int = 2048,
        rotary_dim: int = 32,
        rotary_base: float = 10_000.0,
        graph: dict[str, Any] | None = None,
        scales: dict[str, float] | None = None,
        weight_constraints: dict[str, tuple[str, int]] | None = None,
        for_engines: bool = False,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.head_dim = num_hidden_layers, hidden_size // num_attention_heads
        self.num_attention_heads = self.num_key_value_heads = num_attention_heads
        self.rotary_dim, self.rotary_base = rotary_dim, rotary_base
        self.graph, self.scales, self.weight_constraints = graph or {}, scales or {}, weight_constraints or {}
        self.for_engines, self.use_cache = for_engines, use_cache
        super().__init__(**({"tie_word_embeddings": False} | kwargs))


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def inverse_root(square: Tensor) -> Tensor:
    """1 / sqrt(square), and 1 for 0, so that the gradient of a zero vector is finite."""
    return torch.where(square > 0, torch.rsqrt(square + EPS), 1.0)


def norm(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last dimension, in at least fp32."""
    x = wide(x)
    return x * inverse_root(x.square().sum(-1, keepdim=True))


def call(layer: Any, x: Tensor) -> Tensor:
    """A linear layer of x, in the dtype of its weight. Quantized weights say nothing about the dtype of x."""
    dtype = layer.weight.dtype
    return layer(x.to(dtype) if dtype.is_floating_point and dtype.itemsize > 1 else x)


class Scale(nn.Module):
    """A learned vector, stored divided by a constant factor."""

    def __init__(self, size: int, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.stored = nn.Parameter(torch.ones(size))

    def forward(self) -> Tensor:
        return wide(self.stored) * self.factor


class InputNorm(nn.Module):
    """rms(h) · γ or tanh(a h) · γ, times a constant."""

    def __init__(self, size: int, kind: str, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        if kind == "tanh":
            self.a = nn.Parameter(torch.ones(1))
        self.gamma = nn.Parameter(torch.ones(size))

    def forward(self, h: Tensor) -> Tensor:
        if hasattr(self, "a"):
            return torch.tanh(self.a * h) * self.gamma * self.factor
        return h * inverse_root(h.square().mean(-1, keepdim=True)) * (self.gamma * self.factor)


class AnGPTBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    def __init__(self, config: AnGPTConfig, layer_idx: int) -> None:
        super().__init__()
        d, d_mlp, graph, scales = config.hidden_size, config.intermediate_size, config.graph, config.scales
        self.config, self.graph, self.layer_idx, self.is_causal = config, graph, layer_idx, True
        self.W_qkv = nn.Linear(d, 3 * d, bias=False)
        self.W_p = nn.Linear(d, d, bias=False)
        self.W_uz = nn.Linear(d, 2 * d_mlp, bias=False)
        self.W_d = nn.Linear(d_mlp, d, bias=False)
        if graph["input"] != "none":
            self.norm_a = InputNorm(d, graph["input"], graph["input_factors"][layer_idx])
            self.norm_m = InputNorm(d, graph["input"], graph["input_factors"][layer_idx])
        if graph["qk"] == "g":
            self.g = Scale(1)
        if graph["qk"] == "s_qk":
            self.s_qk = Scale(d, scales["s_qk"])
        if graph["s_uz"]:
            self.s_uz = Scale(2 * d_mlp)
        if graph["lerp"]:
            self.alpha_a = Scale(d, scales["alpha"])
            self.alpha_m = Scale(d, scales["alpha"])

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past_key_values: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream after this layer, and the attention matrix, which only eager attention has."""
        before = self.graph["input"] != "none"
        x, weights = self.attention(self.norm_a(h) if before else h, cos, sin, mask, past_key_values, **kwargs)
        h = self.update(h, x, "alpha_a")
        return self.update(h, self.mlp(self.norm_m(h) if before else h), "alpha_m"), weights

    def attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        d_head = self.config.head_dim
        q, k, v = call(self.W_qkv, x).view(*x.shape[:2], 3, -1, d_head).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.graph["qk"] == "g":
            q, k = norm(q) * self.g(), norm(k)
        elif self.graph["qk"] == "s_qk":
            s_qk = self.s_qk().view(-1, 1, d_head)
            q, k = norm(q) * s_qk * math.sqrt(d_head), norm(k) * s_qk
        else:
            q = q / math.sqrt(d_head)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend_eagerly)
        out, weights = attend(self, q, k, v, mask, dropout=0.0, scaling=1.0, **kwargs)
        return call(self.W_p, out.reshape(*x.shape[:2], -1)) * self.graph["nu_p"], weights

    def mlp(self, x: Tensor) -> Tensor:
        uz = call(self.W_uz, x) * self.graph["nu_uz"]
        if self.graph["s_uz"]:
            uz = uz * self.s_uz()
        u, z = uz.chunk(2, dim=-1)
        if self.graph["s_uz"]:
            z = z * math.sqrt(self.config.hidden_size)
        return call(self.W_d, u * F.silu(z)) * self.graph["nu_d"]

    def update(self, h: Tensor, x: Tensor, alpha_name: str) -> Tensor:
        graph = self.graph
        if graph["output_norm"]:
            x = norm(x)
        if graph["lerp"]:
            alpha = getattr(self, alpha_name)()
            if graph["positive_alpha"]:
                alpha = alpha.abs()
            nu = torch.rsqrt(alpha.square() + (1 - alpha).square()) if graph["nu_alpha"] else 1.0
            h = ((1 - alpha) * h + alpha * x) * (nu * graph["update_factor"])
        else:
            h = (h + x) * graph["update_factor"]
        return norm(h) if graph["update_norm"] else h


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + r/2) of the first r dimensions of each head."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest.to(cos.dtype)), dim=-1)


def attend_eagerly(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float = 1.0, **_: Any
) -> tuple[Tensor, Tensor]:
    scores = wide(q @ k.transpose(2, 3)) * scaling
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1).to(v.dtype)
    return (weights @ v).transpose(1, 2), weights


class AnGPTModel(PreTrainedModel):  # type: ignore[misc]
    """The model without its head: embedding, blocks, final norm.

    What engines that run transformers' models ask for (vLLM's transformers backend documents it) and this class has:

    - config.json names it in `auto_map.AutoModel`, and its dimensions by the names of transformers;
    - attention goes through `ALL_ATTENTION_FUNCTIONS`, with the block, which has `layer_idx` and `is_causal`, as its
      module, and with all further keyword arguments of `forward`: eager, sdpa, flash and registered functions;
    - masks come from `create_causal_mask`; positions are given or counted from the cache, which may be static;
    - no step depends on values of tensors: `forward` compiles without graph breaks, and once for all tokens;
    - all matrices are `nn.Linear` or `nn.Embedding`, and are called, so that they can be replaced;
    - the output has the dtype of the matrices, and the logits are one product with the matrix of the head, if the
      export was written by `angpt export hf --engine`: otherwise s_z of nGPT and anGPT multiplies them.

    q, k and v are one matrix, as are u and z: there is no plan for tensor parallelism. A block also returns its
    attention matrix; pipeline parallelism is not supported.
    """

    config_class = AnGPTConfig
    _input_embed_layer = "W_e"
    _no_split_modules: ClassVar = ["AnGPTBlock"]
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _keep_in_fp32_modules_strict: ClassVar = ["stored", "norm_a", "norm_m", "norm_h"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"^W_h\.", r"^lm_head\.", r"^s_z\."]

    def __init__(self, config: AnGPTConfig) -> None:
        super().__init__(config)
        graph = config.graph
        self.W_e = nn.Embedding(config.vocab_size, config.hidden_size)
        if graph["embed_scale"]:
            self.embed_scale = Scale(1)
        self.blocks = nn.ModuleList(AnGPTBlock(config, i) for i in range(config.num_hidden_layers))
        if graph["input"] != "none":
            self.norm_h = InputNorm(config.hidden_size, graph["input"])
        if graph["s_h"]:
            self.s_h = Scale(config.hidden_size, config.scales["s_h"])
        self.make_head(config)
        self.post_init()

    def make_head(self, config: AnGPTConfig) -> None:
        """Nothing: this model has no head."""

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        h = wide(self.W_e(input_ids) if inputs_embeds is None else inputs_embeds)
        if self.config.graph["embed_scale"]:
            h = h * self.embed_scale().to(h.device)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = (torch.arange(h.shape[1], device=h.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=h.to(self.W_e.weight.dtype),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        cos, sin = self.angles(position_ids, h.dtype)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError("output_attentions needs attn_implementation='eager'")
        hidden: tuple[Tensor, ...] = ()
        attentions: tuple[Tensor, ...] = ()
        for block in self.blocks:
            hidden += (h,) if output_hidden_states else ()
            h, weights = block(h, cos, sin, mask, past_key_values=past_key_values, **kwargs)
            attentions += (weights,) if output_attentions else ()
        h = self.norm_h(h) if self.config.graph["input"] != "none" else h
        h = h * self.s_h().to(h.device) if self.config.graph["s_h"] else h
        dtype = self.W_e.weight.dtype
        h = h.to(dtype) if dtype.is_floating_point and dtype.itemsize > 1 else h
        return BaseModelOutputWithPast(
            last_hidden_state=h,
            past_key_values=past_key_values,
            hidden_states=(*hidden, h) if output_hidden_states else None,
            attentions=attentions if output_attentions else None,
        )

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles, (B, 1, T, r/2), recomputed: from_pretrained drops buffers."""
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        r = self.config.rotary_dim
        frequencies = self.config.rotary_base ** (-torch.arange(0, r, 2, device=positions.device, dtype=exact) / r)
        angles = positions.to(exact)[:, None, :, None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def constraints(self) -> dict[str, tuple[str, int]]:
        """Kind of constraint and dimension of each constrained matrix, by name; `angpt.constrain` reads it."""
        found = {}
        for name, _ in self.named_parameters():
            layer = name.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2]  # base_layer: of LoRA
            if layer in self.config.weight_constraints:
                kind, dim = self.config.weight_constraints[layer]
                found[name] = (kind, dim)
        return found


class AnGPTForCausalLM(AnGPTModel, GenerationMixin):  # type: ignore[misc]
    """The model with its head. Its parameters have the names that they have in training; in an export for engines the
    matrix of the head is `lm_head`, and s_z is part of it. See `AnGPTModel` for the engines that can run it."""

    _keys_to_ignore_on_load_unexpected: ClassVar = []

    def make_head(self, config: AnGPTConfig) -> None:
        setattr(self, self.head_name, nn.Linear(config.hidden_size, config.vocab_size, bias=False))
        if config.graph["s_z"]:
            self.s_z = Scale(config.vocab_size, config.scales["s_z"])

    @property
    def head_name(self) -> str:
        return "lm_head" if self.config.for_engines else "W_h"

    def get_output_embeddings(self) -> nn.Module:
        return getattr(self, self.head_name)

    def set_output_embeddings(self, value: nn.Linear) -> None:
        setattr(self, self.head_name, value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the embedding, the head and s_z, which is its mean for new tokens."""
        embedding: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)
        if self.config.graph["s_z"] and len(old := self.s_z.stored) != (size := self.config.vocab_size):
            new = old.mean().expand(max(0, size - len(old)))
            self.s_z.stored = nn.Parameter(torch.cat((old, new))[:size].detach(), old.requires_grad)
        return embedding

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        given = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache)
        out = super().forward(*given, return_dict=True, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = wide(call(self.get_output_embeddings(), out.last_hidden_state[:, keep]))
        if self.config.graph["s_z"]:
            logits = logits * self.s_z().to(logits.device)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
