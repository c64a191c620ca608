"""Kimi Delta Attention as a layer."""

from torch import nn

from linattn_edu import kda, l2norm, validate
from linattn_edu.gates import kda_bounded_decay, kda_decay, write_strength
from linattn_edu.layers import initial
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.qkv import QKVLayer, head_dim, low_rank


class KimiDeltaAttention(QKVLayer):
    """Gated DeltaNet with a gate for every key channel.

        q_t, k_t = l2norm(silu(conv(W_q x)_t)), l2norm(silu(conv(W_k x)_t)),   v_t = silu(conv(W_v x)_t)
        g_t = -exp(A_log) softplus(W_a2 W_a1 x_t + dt_bias),   beta_t = sigmoid(W_b x_t)
        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
        y_t = W_o (norm_head(K^(-1/2) S_t^T q_t) * sigmoid(W_z2 W_z1 x_t))

    Args:
        width: D.
        heads: H.
        key_dim: K; width / heads if None.
        value_heads: HV, a multiple of heads; heads if None.
        value_dim: V; K if None.
        conv_size: W of the short convolution; none if None.
        negative_eigenvalues: beta in (0, 2) instead of (0, 1).
        gate_rank: width of W_a1 x and W_z1 x; K if None.
        lower_bound: None, or the bound below 0 of `gates.kda_bounded_decay`, which then takes the place of g_t.
        A_range: exp(A_log) is drawn uniformly from it.
        dt_min, dt_max: softplus(dt_bias) is drawn log-uniformly between them.
        eps: of the norm.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    A tiny model may need slower gates than the paper's: `initial.py` says why, and which.

    Source: Kimi Team 2025 (2510.26692), section 4 and eq. 10; A_log and dt_bias are those of the code.
    """

    silu = True
    undecayed = ("A_log", "dt_bias")

    def __init__(
        self, width, heads, *, key_dim=None, value_heads=None, value_dim=None, conv_size=4, negative_eigenvalues=False,
        gate_rank=None, lower_bound=None, A_range=(1.0, 16.0), dt_min=0.001, dt_max=0.1, eps=1e-6, form="fused",
    ):  # fmt: skip
        key_dim = head_dim("key_dim", key_dim, width, heads)
        value_dim = key_dim if value_dim is None else value_dim
        sizes = {"key_dim": key_dim, "value_heads": value_heads, "value_dim": value_dim}
        super().__init__(width, heads, **sizes, conv_size=conv_size, form=form)
        self.negative_eigenvalues = validate.flag("negative_eigenvalues", negative_eigenvalues)
        self.lower_bound = None if lower_bound is None else validate.number("lower_bound", lower_bound, negative=True)
        rank = key_dim if gate_rank is None else validate.count("gate_rank", gate_rank)
        self.a_proj = low_rank(width, rank, self.value_heads * key_dim)
        self.b_proj = nn.Linear(width, self.value_heads, bias=False)
        self.A_log = initial.rates([self.value_heads], A_range)
        self.dt_bias = initial.step_sizes([self.value_heads, key_dim], dt_min, dt_max)
        self.z_proj = low_rank(width, rank, self.value_heads * self.value_dim)
        self.norm = RMSNorm(self.value_dim, eps=eps, gate="sigmoid")

    def decay(self, x):
        """g [B, T, HV, K]."""
        logits = self.a_proj(x).unflatten(-1, (self.value_heads, -1))
        if self.lower_bound is None:
            return kda_decay(logits, self.A_log, self.dt_bias)
        return kda_bounded_decay(logits, self.A_log, self.dt_bias, lower_bound=self.lower_bound)

    def mix(self, x, cache, cu_seqlens):
        q, k, v, conv = self.project(x, cache, cu_seqlens)
        beta = write_strength(self.b_proj(x), negative_eigenvalues=self.negative_eigenvalues)
        o, state = self.run(kda, l2norm(q), l2norm(k), v, cache.state, cu_seqlens, g=self.decay(x), beta=beta)
        return self.o_proj(self.norm(o, self.z_proj(x).view_as(o)).flatten(2)), state, conv
