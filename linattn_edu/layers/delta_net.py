"""DeltaNet as a layer."""

from torch import nn

from linattn_edu import deltanet, l2norm, validate
from linattn_edu.gates import write_strength
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.qkv import QKVLayer, head_dim


class DeltaNet(QKVLayer):
    """The delta rule: what the state holds under a key is replaced, not added to.

        q_t, k_t = l2norm(silu(conv(W_q x)_t)), l2norm(silu(conv(W_k x)_t)),   v_t = silu(conv(W_v x)_t)
        beta_t = sigmoid(W_b x_t),   S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        y_t = W_o norm_head(K^(-1/2) S_t^T q_t)

    Args:
        width: D.
        heads: H.
        key_dim, value_dim: K and V; width / heads if None.
        conv_size: W of the short convolution; none if None.
        negative_eigenvalues: beta in (0, 2) instead of (0, 1).
        output_gate: multiply the norm by silu(W_z x_t).
        eps: of the norm.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    Source: Yang et al. 2024 (2406.06484); the rule from Schlag et al. 2021, negative eigenvalues from Grazzi et al.
    2025 (2411.12537).
    """

    silu = True

    def __init__(
        self, width, heads, *, key_dim=None, value_dim=None, conv_size=4, negative_eigenvalues=False, output_gate=False,
        eps=1e-5, form="fused",
    ):  # fmt: skip
        key_dim, value_dim = head_dim("key_dim", key_dim, width, heads), head_dim("value_dim", value_dim, width, heads)
        super().__init__(width, heads, key_dim=key_dim, value_dim=value_dim, conv_size=conv_size, form=form)
        self.negative_eigenvalues = validate.flag("negative_eigenvalues", negative_eigenvalues)
        self.b_proj = nn.Linear(width, heads, bias=False)
        self.z_proj = nn.Linear(width, heads * value_dim, bias=False) if output_gate else None
        self.norm = RMSNorm(value_dim, eps=eps, gate="silu" if output_gate else None)

    def mix(self, x, cache, cu_seqlens):
        q, k, v, conv = self.project(x, cache, cu_seqlens)
        beta = write_strength(self.b_proj(x), negative_eigenvalues=self.negative_eigenvalues)
        o, state = self.run(deltanet, l2norm(q), l2norm(k), v, cache.state, cu_seqlens, beta=beta)
        z = None if self.z_proj is None else self.z_proj(x).view_as(o)
        return self.o_proj(self.norm(o, z).flatten(2)), state, conv
