"""What the layers with queries, keys and values share: projections, heads, the short convolution, the way back."""

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import validate
from linattn_edu.layers.recurrent import RecurrentLayer
from linattn_edu.layers.short_convolution import ShortConvolution


class QKVLayer(RecurrentLayer):
    """Projections q_proj, k_proj, v_proj and o_proj, and one short convolution over the channels of q, k and v.

    A subclass writes `mix`, its recipe: `project`, gates, operator, output.

    Attributes:
        heads, key_dim: H and K.
        value_heads, value_dim: HV and V.
        conv: the ShortConvolution, or None.
        silu: SiLU on q, k and v where there is no convolution, which has it built in.
    """

    silu = False

    def __init__(self, width, heads, *, key_dim, value_heads=None, value_dim, conv_size=None, form="fused"):
        super().__init__(width, form)
        self.heads = validate.count("heads", heads)
        self.value_heads = self.heads if value_heads is None else validate.count("value_heads", value_heads)
        if self.value_heads % self.heads:
            raise ValueError(f"`value_heads`: got {value_heads}, expected a multiple of heads = {heads}")
        self.key_dim, self.value_dim = validate.count("key_dim", key_dim), validate.count("value_dim", value_dim)
        self.channels = [*2 * [self.heads * self.key_dim], self.value_heads * self.value_dim]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n, bias=False) for n in self.channels)
        self.conv = self.conv_shape = None
        if conv_size is not None:
            self.conv = ShortConvolution(sum(self.channels), validate.count("conv_size", conv_size))
            self.conv_shape = self.conv.conv_shape
        self.state_shapes = ((self.value_heads, self.key_dim, self.value_dim),)
        self.o_proj = nn.Linear(self.channels[2], width, bias=False)

    def project(self, x, cache, cu_seqlens):
        """x [B, T, D] -> q, k [B, T, H, K], v [B, T, HV, V], and the state of the convolution."""
        qkv, conv = (self.q_proj(x), self.k_proj(x), self.v_proj(x)), None
        if self.conv is not None:
            y, conv = self.conv.convolve(torch.cat(qkv, -1), cache.conv, cu_seqlens)
            qkv = y.split(self.channels, -1)
        elif self.silu:
            qkv = (F.silu(each) for each in qkv)
        q, k, v = qkv
        return *(each.unflatten(-1, (self.heads, -1)) for each in (q, k)), v.unflatten(-1, (self.value_heads, -1)), conv


def head_dim(name, given, width, heads, *, times=1.0):
    """Channels a head: what is given by that name, or where this is None `times` * width / heads."""
    if given is not None:
        return validate.count(name, given)
    size = times * validate.count("width", width) / validate.count("heads", heads)
    if size != int(size):
        raise ValueError(f"`heads`: got {heads}, expected a number that divides {times:g} * width = {times * width:g}")
    return int(size)


def low_rank(width, rank, channels, *, bias=False):
    """A projection of few parameters, width -> rank -> channels."""
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, channels, bias=bias))
