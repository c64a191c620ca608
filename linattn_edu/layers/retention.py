"""RetNet's multi-scale retention."""

from torch import nn

from linattn_edu import decay, validate
from linattn_edu.layers import packing
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.qkv import QKVLayer, head_dim
from linattn_edu.layers.rope import check_turning, rope


class Retention(QKVLayer):
    """Linear attention whose head h forgets at the fixed rate gamma_h = 1 - 2^(-5-h), with rotated queries and keys.

        q_t, k_t = rope(W_q x_t), rope(W_k x_t),   S_t = gamma S_{t-1} + k_t v_t^T
        y_t = W_o (norm_head(K^(-1/2) S_t^T q_t) * silu(W_z x_t))

    Args:
        width: D.
        heads: H.
        key_dim: K, even; width / heads if None.
        value_dim: V; 2 width / heads if None.
        rope_base: of the rotation.
        conv_size: W of a short convolution with SiLU on q, k and v, which RetNet does not have; none if None.
        eps: of the norm.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    Source: Sun et al. 2023, eqs. 5-8. The paper's xPos with one gamma a head is this rotation times this decay; its
    normalisation of scores is a positive factor a token, which the norm removes (up to eps), and is left out. The code
    scales k, here q is scaled: the same.
    """

    def __init__(
        self, width, heads, *, key_dim=None, value_dim=None, rope_base=10_000.0, conv_size=None, eps=1e-6, form="fused"
    ):
        key_dim = head_dim("key_dim", key_dim, width, heads)
        value_dim = head_dim("value_dim", value_dim, width, heads, times=2)
        super().__init__(width, heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size, form=form)
        self.rope_base = check_turning(validate.number("rope_base", rope_base, positive=True), "key_dim", key_dim)
        self.register_buffer("log_decay", decay.retnet_log_decay(heads))
        self.z_proj = nn.Linear(width, heads * value_dim, bias=False)
        self.norm = RMSNorm(value_dim, eps=eps, weight=False, gate="silu")

    def mix(self, x, cache, cu_seqlens):
        q, k, v, conv = self.project(x, cache, cu_seqlens)
        positions = packing.positions(x, cache.seen, cu_seqlens)
        q, k = (rope(each, base=self.rope_base, positions=positions) for each in (q, k))
        o, state = self.run(decay, q, k, v, cache.state, cu_seqlens, g=self.log_decay)
        return self.o_proj(self.norm(o, self.z_proj(x).view_as(o)).flatten(2)), state, conv
