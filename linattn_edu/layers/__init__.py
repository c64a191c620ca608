"""Layers: mixers of tokens and what stands beside them in a block, as `torch.nn` modules.

Every mixer has `forward(x, *, cache=None, mask=None, cu_seqlens=None) -> (y, cache)`.
"""

from linattn_edu.layers.cache import Cache
from linattn_edu.layers.norm import LayerScale, RMSNorm
from linattn_edu.layers.short_convolution import ShortConvolution

__all__ = ["Cache", "LayerScale", "RMSNorm", "ShortConvolution"]
