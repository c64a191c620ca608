"""Layers: mixers of tokens and what stands beside them in a block, as `torch.nn` modules.

Every mixer has `forward(x, *, cache=None, mask=None, cu_seqlens=None) -> (y, cache)`. A layer checks its sizes when it
is made: `ValueError` for one that does not fit, `TypeError` for what is no number.
"""

from linattn_edu.layers.attention import SoftmaxAttention
from linattn_edu.layers.cache import Cache
from linattn_edu.layers.delta_net import DeltaNet
from linattn_edu.layers.gated_attention import GatedAttention
from linattn_edu.layers.gated_delta_net import GatedDeltaNet
from linattn_edu.layers.gated_linear_attention import GatedLinearAttention
from linattn_edu.layers.kimi_delta_attention import KimiDeltaAttention
from linattn_edu.layers.latent_attention import LatentAttention
from linattn_edu.layers.linear_attention import LinearAttention
from linattn_edu.layers.mamba import Mamba
from linattn_edu.layers.mamba2 import Mamba2
from linattn_edu.layers.moe import MixtureOfExperts, Router
from linattn_edu.layers.norm import LayerScale, RMSNorm
from linattn_edu.layers.retention import Retention
from linattn_edu.layers.rope import rope
from linattn_edu.layers.short_convolution import ShortConvolution
from linattn_edu.layers.swiglu import SwiGLU

__all__ = [
    "Cache",
    "DeltaNet",
    "GatedAttention",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LatentAttention",
    "LayerScale",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "MixtureOfExperts",
    "RMSNorm",
    "Retention",
    "Router",
    "ShortConvolution",
    "SoftmaxAttention",
    "SwiGLU",
    "rope",
]
