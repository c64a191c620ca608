"""Softmax attention as a layer: projections, positions, padding, and a cache of keys and values."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import validate
from linattn_edu.layers import packing
from linattn_edu.layers.cache import Cache
from linattn_edu.layers.growing import remember
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.qkv import head_dim as width_a_head
from linattn_edu.layers.rope import check_turning, rope
from linattn_edu.softmax import seen


def attend(q, k, v, mask=None, scale=None):
    """Causal attention of the last T of S tokens: q [B, T, HQ, K], k [B, S, H, K], v [B, S, H, V] -> o [B, T, HQ, V].

    `mask` [B, S] says which keys are real; a token always sees itself, so that no softmax is empty. Where T < S the
    HQ / H query heads that share a key head become so many queries of it: the cache is read as it lies, not copied.
    """
    T, S, H, group = q.shape[1], k.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    if T == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + (q.sum() + k[:, :0].sum() + v[:, :0].sum())
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if T == S and mask is None:
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, scale=scale).transpose(1, 2)
    allowed = None
    if mask is not None or T > 1:
        past = seen(T, S, True, q.device)
        allowed = past if mask is None else past & (mask[:, None, None, :] | past.triu(S - T))
        allowed = allowed.repeat_interleave(group, -2)
    q = q.unflatten(2, (H, group)).transpose(1, 2).flatten(2, 3)  # [B, H, T * group, K]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
    return o.unflatten(2, (T, group)).transpose(1, 2).flatten(2, 3)


class AttentionLayer(nn.Module):
    """A layer that remembers every token by a row of its cache.

    A subclass writes `mix(x, stored, positions, mask) -> (y, stored)`: x [B, T, D], `stored` its tensors [B, S, ...] of
    the tokens before, positions [B, T], `mask` [B, S + T] or None if all tokens are real. Its y at padding is dropped.

    Attributes:
        width: D.
        stored_shapes: the shape of each tensor of the cache, for one token of one sequence.
    """

    stored_shapes = ()

    def __init__(self, width):
        super().__init__()
        self.width = validate.count("width", width)

    def forward(self, x, *, cache=None, mask=None, cu_seqlens=None):
        """Mix the tokens of x, and remember them.

        Args:
            x: [B, T, D], in the dtype of the weights unless `torch.autocast` is on.
            cache: what an earlier call returned; None at the beginning of the sequences.
            mask: [B, T] bool, True for a real token. Padding may stand anywhere; its outputs are 0.
            cu_seqlens: integers [N+1], the bounds of N sequences packed into one row (B = 1); each sees itself alone,
                and has a row of its own in the cache.

        Returns:
            y [B, T, D], and the new cache.

        Raises:
            ValueError: a wrong shape, dtype or device; `mask` together with `cu_seqlens`; a cache of another layer.
            TypeError: an argument that is no tensor, or a cache that is no Cache.
        """
        N = packing.check(self, x, cache, mask, cu_seqlens)
        cache = self.initial_cache(N, dtype=x.dtype, device=x.device) if cache is None else self._own(cache)
        if cu_seqlens is None:
            return self._remember(x, cache, mask)
        rows = packing.rows(cu_seqlens.to(x.device))
        y, cache = self._remember(packing.scatter(x, rows), cache, rows)
        return packing.pack(y, rows)[0], cache

    def _remember(self, x, cache, mask):
        if mask is None or mask.all():
            stored_mask = None if cache.mask is None else F.pad(cache.mask, (0, x.shape[1]), value=True)
            y, state = self.mix(x, _tuple(cache.state), packing.positions(x, cache.seen, None), stored_mask)
            return y, Cache(_single(state), seen=cache.seen + x.shape[1], mask=stored_mask)
        S = _tuple(cache.state)[0].shape[1]
        stored_mask = torch.cat([mask.new_ones(len(mask), S) if cache.mask is None else cache.mask, mask], 1)
        positions, real = cache.seen[:, None] + mask.cumsum(1) - 1, mask[..., None]
        # A NaN in the padding would pass through a weight of 0, so it is taken out first.
        y, state = self.mix(x.masked_fill(~real, 0), _tuple(cache.state), positions, stored_mask)
        return y.masked_fill(~real, 0), Cache(_single(state), seen=cache.seen + mask.sum(1), mask=stored_mask)

    def initial_cache(self, N, *, dtype=torch.float32, device=None):
        """What the layer remembers of N sequences before their first token: tensors of no tokens.

        Args:
            N: number of sequences.
            dtype: of what is stored.
            device: of all tensors; torch's default if None.
        """
        state = tuple(torch.zeros(N, 0, *shape, dtype=dtype, device=device) for shape in self.stored_shapes)
        return Cache(_single(state), seen=torch.zeros(N, dtype=torch.int64, device=device))

    def cache_bytes(self, T=0, *, dtype=torch.float32):
        """Memory of the cache of one sequence of T tokens of this dtype, none of them padding, in bytes.

        What is allocated while decoding may be an eighth more, see `growing.append`.
        """
        a_token = sum(math.prod(shape) for shape in self.stored_shapes) * dtype.itemsize
        return self.initial_cache(1, device="meta").bytes + validate.count("T", T, least=0) * a_token

    def _own(self, cache):
        """The cache, if it stores what this layer stores."""
        got, expected = [list(x.shape[2:]) for x in _tuple(cache.state)], [list(shape) for shape in self.stored_shapes]
        if got != expected or cache.conv is not None:
            raise ValueError(f"`cache`: got {got} a token, expected {expected}: that of another layer?")
        return cache


def _tuple(state):
    return state if isinstance(state, tuple) else (state,)


def _single(state):
    return state if len(state) > 1 else state[0]


class SoftmaxAttention(AttentionLayer):
    """Multi-head attention: q_t asks the keys of all tokens up to t, o_t = softmax(K^-1/2 q_t^T k_i) v_i, y = W_O o.

    Args:
        width: D, channels of x and y.
        heads: HQ, query heads.
        kv_heads: H, key and value heads, each read by HQ / H query heads; HQ if None.
        head_dim: K, channels of a head; D / HQ if None.
        rope_base: base of the rotary positions; None for no positions at all (NoPE).
        rope_channels: how many channels of a head turn (partial RoPE); all if None.
        qk_norm: normalise each head's q and k by an RMSNorm with a weight, before they turn.
        zero_centred, eps: of these norms.
        bias: give the four projections a bias.

    Raises:
        ValueError: sizes that do not fit.

    The cache holds k and v, [B, S, H, K] each, in the dtype of x. Source: Vaswani et al. 2017; grouped heads Ainslie et
    al. 2023; q and k norms Henry et al. 2020.
    """

    def __init__(
        self, width, heads, *, kv_heads=None, head_dim=None, rope_base=10_000.0, rope_channels=None, qk_norm=False,
        zero_centred=False, eps=1e-6, bias=False,
    ):  # fmt: skip
        super().__init__(width)
        self.heads = validate.count("heads", heads)
        self.kv_heads = self.heads if kv_heads is None else validate.count("kv_heads", kv_heads)
        if self.heads % self.kv_heads:
            raise ValueError(f"`kv_heads`: got {kv_heads}, expected a divisor of heads = {heads}")
        self.head_dim = width_a_head("head_dim", head_dim, width, heads)
        if rope_channels is not None:
            rope_channels = validate.count("rope_channels", rope_channels, most=self.head_dim)
        turning = ("head_dim", self.head_dim) if rope_channels is None else ("rope_channels", rope_channels)
        self.rope_base, self.rope_channels = check_turning(rope_base, *turning), rope_channels
        self.stored_shapes = 2 * [(self.kv_heads, self.head_dim)]
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)
        norms = [RMSNorm(self.head_dim, eps=eps, zero_centred=zero_centred) if qk_norm else None for _ in range(2)]
        self.q_norm, self.k_norm = norms

    def project(self, x):
        """q [B, T, HQ, K], k and v [B, T, H, K] before norms and positions."""
        return (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q_proj, self.k_proj, self.v_proj))

    def qkv(self, x, positions=None, *, start=0):
        """What attention sees: q [B, T, HQ, K], k and v [B, T, H, K]; `start` is the place of the first token."""
        q, k, v = self.project(x)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            turn = {"base": self.rope_base, "start": start, "positions": positions, "channels": self.rope_channels}
            q, k = rope(q, **turn), rope(k, **turn)
        return q, k, v

    def mix(self, x, stored, positions, mask):
        q, *kv = self.qkv(x, positions)
        k, v = remember(stored, kv)
        return self.leave(attend(q, k, v, mask), x), (k, v)

    def leave(self, o, x):
        """From the heads' outputs o [B, T, HQ, K] to y [B, T, D]."""
        return self.o_proj(o.flatten(2))
