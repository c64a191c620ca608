"""Linear attention as a layer."""

import torch

from linattn_edu import linear
from linattn_edu.layers import packing
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.qkv import QKVLayer, head_dim
from linattn_edu.layers.rope import check_turning, rope


class LinearAttention(QKVLayer):
    """Softmax attention with phi(q)^T phi(k) in the place of exp(q^T k).

        S_t = S_{t-1} + phi(k_t) v_t^T,   z_t = z_{t-1} + phi(k_t)
        y_t = W_o (S_t^T phi(q_t) / (z_t^T phi(q_t) + eps))

    With `rope_base`, q and k turn by position before phi. Without the normaliser z the sum S grows with t, and an
    RMSNorm of each head takes its place.

    Args:
        width: D.
        heads: H.
        key_dim, value_dim: K and V; width / heads if None.
        feature_map: phi, a name in `feature_maps.FEATURE_MAPS`, or a callable on the last axis.
        normalize: divide by z_t^T phi(q_t) + eps.
        rope_base: base of the rotary positions; none if None.
        conv_size: W of a short convolution with SiLU on q, k and v; none if None. Without both nothing tells the order
            of the tokens.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    Source: Katharopoulos et al. 2020; the norm instead of z: Qin et al. 2022 (2210.10340).
    """

    def __init__(
        self, width, heads, *, key_dim=None, value_dim=None, feature_map="elu1", normalize=True, rope_base=None,
        conv_size=None, form="fused",
    ):  # fmt: skip
        key_dim, value_dim = head_dim("key_dim", key_dim, width, heads), head_dim("value_dim", value_dim, width, heads)
        super().__init__(width, heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size, form=form)
        self.feature_map, self.normalize = feature_map, normalize
        self.rope_base = check_turning(rope_base, "key_dim", key_dim)
        space = linear.FeatureSpace(feature_map=feature_map, normalize=normalize)
        features = space.features(torch.zeros(1, 1, heads, key_dim), "k").shape[-1]
        self.state_shapes = ((heads, features, value_dim), *([(heads, features)] if normalize else []))
        self.norm = None if normalize else RMSNorm(value_dim)

    def qkv(self, x, *, start=0):
        """What the operator sees of a text: q, k and v, [B, T, H, K] each; `start` is the place of the first token."""
        q, k, v, _ = self.project(x, self.initial_cache(len(x), dtype=x.dtype, device=x.device), None)
        return *self.placed(q, k, start=start), v

    def placed(self, q, k, **positions):
        if self.rope_base is None:
            return q, k
        return tuple(rope(each, base=self.rope_base, **positions) for each in (q, k))

    def mix(self, x, cache, cu_seqlens):
        q, k, v, conv = self.project(x, cache, cu_seqlens)
        q, k = self.placed(q, k, positions=packing.positions(x, cache.seen, cu_seqlens))
        options = {"feature_map": self.feature_map, "normalize": self.normalize}
        o, state = self.run(linear, q, k, v, cache.state, cu_seqlens, **options)
        o = o if self.norm is None else self.norm(o)
        return self.o_proj(o.flatten(2)), state, conv
