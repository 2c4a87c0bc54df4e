"""What an architecture computes, as data that its blocks declare: read by folding, export, decode kernels, analysis."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Design:
    """What an architecture computes, its learned parameters aside.

    ν_qkv is not here: it vanishes in the norms of q and k, and passes through attention linearly with v, so that it
    stands with ν_p. The factor of `angpt/attention-factor` vanishes in the norm behind the block.
    """

    input: Literal["none", "rms", "tanh"] = "none"
    """Before each block and before the head: nothing, rms(h) · γ, or tanh(a h) · γ."""
    input_factors: tuple[float, ...] = ()
    """A constant per layer behind that."""
    qk: Literal["g", "s_qk", "plain"] = "g"
    """q and k normed and scaled by g, normed and scaled by s_qk and √d_k, or divided by √d_h alone."""
    s_uz: bool = False
    """u and z are scaled by a learned vector, and z by √d_m."""
    nu_p: float = 1.0
    """Factor of the attention output: ν_qkv ν_p of anGPT."""
    nu_uz: float = 1.0
    """Factor of u and z."""
    nu_d: float = 1.0
    """Factor of the MLP output: ν_acf ν_d of anGPT."""
    output_norm: bool = False
    """A norm after each block."""
    lerp: bool = False
    """The residual update interpolates with a learned α; otherwise it is a sum."""
    positive_alpha: bool = False
    """The absolute value of α counts."""
    nu_alpha: bool = False
    """The update is multiplied by ν(α)."""
    update_factor: float = 1.0
    """The update is multiplied by this number as well."""
    update_norm: bool = False
    """A norm after each residual update."""
    s_z: bool = False
    """The logits are scaled by a learned vector."""
    embed_scale: bool = False
    """The embedding is scaled by a learned number."""
