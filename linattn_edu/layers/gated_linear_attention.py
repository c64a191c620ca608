"""Gated linear attention as a layer."""

from torch import nn

from linattn_edu import gla, validate
from linattn_edu.gates import gla_decay
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.qkv import QKVLayer, head_dim, low_rank


class GatedLinearAttention(QKVLayer):
    """Linear attention whose key channels forget at rates that the token decides.

        g_t = logsigmoid(W_a2 W_a1 x_t + b_a) / tau,   S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T
        y_t = W_o (norm_head(K^(-1/2) S_t^T q_t) * silu(W_z x_t + b_z))

    Args:
        width: D.
        heads: H.
        key_dim: K; width / (2 heads) if None.
        value_dim: V; width / heads if None.
        gate_rank: width of W_a1 x.
        tau: a gate logit of 0 halves the state after tau tokens.
        conv_size: W of a short convolution with SiLU on q, k and v, which the paper does not have; none if None.
        eps: of the norm.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    Source: Yang et al. 2024 (2312.06635), section 4.4, with an RMSNorm a head as in the code where the paper has a
    LayerNorm.
    """

    def __init__(
        self, width, heads, *, key_dim=None, value_dim=None, gate_rank=16, tau=16.0, conv_size=None, eps=1e-5,
        form="fused",
    ):  # fmt: skip
        key_dim = head_dim("key_dim", key_dim, width, heads, times=0.5)
        value_dim = head_dim("value_dim", value_dim, width, heads)
        super().__init__(width, heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size, form=form)
        self.tau = validate.number("tau", tau, positive=True)
        self.a_proj = low_rank(width, validate.count("gate_rank", gate_rank), heads * key_dim, bias=True)
        self.z_proj = nn.Linear(width, heads * value_dim)
        self.norm = RMSNorm(value_dim, eps=eps, gate="silu")

    def mix(self, x, cache, cu_seqlens):
        q, k, v, conv = self.project(x, cache, cu_seqlens)
        g = gla_decay(self.a_proj(x).view_as(k), tau=self.tau)
        o, state = self.run(gla, q, k, v, cache.state, cu_seqlens, g=g)
        return self.o_proj(self.norm(o, self.z_proj(x).view_as(o)).flatten(2)), state, conv
