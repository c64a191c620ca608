"""Gated DeltaNet as a layer."""

from torch import nn

from linattn_edu import gated_deltanet, l2norm, validate
from linattn_edu.gates import mamba2_decay, write_strength
from linattn_edu.layers import initial
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.qkv import QKVLayer, head_dim


class GatedDeltaNet(QKVLayer):
    """The delta rule with Mamba-2's gate: the state decays, then what it holds under the key is replaced.

        q_t, k_t = l2norm(silu(conv(W_q x)_t)), l2norm(silu(conv(W_k x)_t)),   v_t = silu(conv(W_v x)_t)
        g_t = -exp(A_log) softplus(W_a x_t + dt_bias),   beta_t = sigmoid(W_b x_t)
        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        y_t = W_o (norm_head(K^(-1/2) S_t^T q_t) * silu(W_z x_t))

    Args:
        width: D.
        heads: H.
        key_dim: K; width / heads if None.
        value_heads: HV, a multiple of heads; heads if None. Each has gates of its own.
        value_dim: V; K if None.
        conv_size: W of the short convolution; none if None.
        negative_eigenvalues: beta in (0, 2) instead of (0, 1).
        A_range: exp(A_log) is drawn uniformly from it.
        dt_min, dt_max: softplus(dt_bias) is drawn log-uniformly between them.
        eps: of the norm.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    A tiny model may need slower gates than the paper's: `initial.py` says why, and which.

    Source: Yang, Kautz and Hatamizadeh 2025 (2412.06464), eq. 10 and footnote 4. The paper's sizes are
    key_dim = 3/4 width / heads and value_dim = 2 key_dim; Qwen3-Next has value_heads = 2 heads and V = K.
    """

    silu = True
    undecayed = ("A_log", "dt_bias")

    def __init__(
        self, width, heads, *, key_dim=None, value_heads=None, value_dim=None, conv_size=4, negative_eigenvalues=False,
        A_range=(0.0, 16.0), dt_min=0.001, dt_max=0.1, eps=1e-6, form="fused",
    ):  # fmt: skip
        key_dim = head_dim("key_dim", key_dim, width, heads)
        value_dim = key_dim if value_dim is None else value_dim
        sizes = {"key_dim": key_dim, "value_heads": value_heads, "value_dim": value_dim}
        super().__init__(width, heads, **sizes, conv_size=conv_size, form=form)
        self.negative_eigenvalues = validate.flag("negative_eigenvalues", negative_eigenvalues)
        self.a_proj, self.b_proj = (nn.Linear(width, self.value_heads, bias=False) for _ in range(2))
        self.A_log = initial.rates([self.value_heads], A_range)
        self.dt_bias = initial.step_sizes([self.value_heads], dt_min, dt_max)
        self.z_proj = nn.Linear(width, self.value_heads * self.value_dim, bias=False)
        self.norm = RMSNorm(self.value_dim, eps=eps, gate="silu")

    def mix(self, x, cache, cu_seqlens):
        q, k, v, conv = self.project(x, cache, cu_seqlens)
        g = mamba2_decay(self.a_proj(x), self.A_log, self.dt_bias)
        beta = write_strength(self.b_proj(x), negative_eigenvalues=self.negative_eigenvalues)
        o, state = self.run(gated_deltanet, l2norm(q), l2norm(k), v, cache.state, cu_seqlens, g=g, beta=beta)
        return self.o_proj(self.norm(o, self.z_proj(x).view_as(o)).flatten(2)), state, conv
