"""Layers: mixers of tokens and what stands beside them in a block, as `torch.nn` modules.

Every mixer has `forward(x, *, cache=None, mask=None, cu_seqlens=None) -> (y, cache)`.
"""

from linattn_edu.layers.cache import Cache
from linattn_edu.layers.delta_net import DeltaNet
from linattn_edu.layers.gated_delta_net import GatedDeltaNet
from linattn_edu.layers.gated_linear_attention import GatedLinearAttention
from linattn_edu.layers.kimi_delta_attention import KimiDeltaAttention
from linattn_edu.layers.linear_attention import LinearAttention
from linattn_edu.layers.mamba import Mamba
from linattn_edu.layers.mamba2 import Mamba2
from linattn_edu.layers.norm import LayerScale, RMSNorm
from linattn_edu.layers.retention import Retention
from linattn_edu.layers.short_convolution import ShortConvolution

__all__ = [
    "Cache",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LayerScale",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "RMSNorm",
    "Retention",
    "ShortConvolution",
]
