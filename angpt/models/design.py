"""What an architecture computes, declared by its blocks as data for folding, export, decode kernels and analysis."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Design:
    """What an architecture computes, without its learned parameters.

    ν_qkv is part of `nu_p`: the norms of q and k cancel it, and attention is linear in v. The norm after the block
    cancels the factor of `angpt/attention-factor`.
    """

    input: Literal["none", "rms", "tanh"] = "none"
    """Before each block and before the head: nothing, rms(h) · γ, or tanh(a h) · γ."""
    input_factors: tuple[float, ...] = ()
    """Constant factor of the input of the blocks, one per layer."""
    qk: Literal["g", "s_qk", "plain"] = "g"
    """q and k are normed, and q·k is scaled by g; or normed and scaled by s_qk and √d_h; or q·k is divided by √d_h."""
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
    """α is replaced by its absolute value."""
    nu_alpha: bool = False
    """The update is multiplied by ν(α)."""
    update_factor: float = 1.0
    """The update, interpolation or sum, is also multiplied by this number."""
    update_norm: bool = False
    """A norm after each residual update."""
    s_z: bool = False
    """The logits are scaled by a learned vector."""
    s_h: bool = False
    """The stream is scaled by a learned vector before the head."""
    embed_scale: bool = False
    """The embedding is scaled by a learned number."""

    @property
    def weighted_update(self) -> bool:
        """True if the residual update multiplies the stream and the output of the block, and does not only add them."""
        return self.lerp or self.update_factor != 1.0
