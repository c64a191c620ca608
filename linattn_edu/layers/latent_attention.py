"""Multi-head latent attention: all heads read their keys and values out of one small vector a token."""

import torch
from torch import nn

from linattn_edu import validate
from linattn_edu.layers.attention import AttentionLayer, attend
from linattn_edu.layers.growing import remember
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.rope import check_turning, rope


class LatentAttention(AttentionLayer):
    """MLA: the cache holds a latent c_t of R channels and a key part k^P_t of P channels that all heads share.

        [c_t; k^P_t] = W_D x_t,   c_t <- norm(c_t)
        q_t = [q^N_t; q^P_t] of each head,   k_i = [W_UK c_i; k^P_i],   v_i = W_UV c_i
        o_t = softmax((N + P)^-1/2 q_t^T k_i) v_i,   y = W_O o

    q^P and k^P turn by position, or do not turn where `rope_base` is None (NoPE, as in Kimi Linear, which keeps the P
    channels). Because q^N . W_UK c = (W_UK^T q^N) . c, the up-projections can move from the stored tokens
    to the query and the output: `absorbed` attends to the cache itself, one key [c; k^P] and one value c for all heads.
    `expanded` and `absorbed` are one function; `forward` takes the one with fewer products.

    Args:
        width: D, channels of x and y.
        heads: H.
        latent: R, channels of c.
        nope_dim: N, channels of a head's query that meet the latent.
        rope_dim: P, channels of the shared key; may be 0 in NoPE.
        v_dim: channels of a head's value.
        q_latent: rank of the query projection, with a norm in the middle; full rank if None.
        rope_base: base of the rotary positions; None for NoPE.
        eps: of the two norms.
        bias: give W_D, the first half of a low-rank query projection, and W_O a bias.

    Raises:
        ValueError: a wrong size.

    The cache is [B, S, R + P] in the dtype of x. Source: DeepSeek-AI 2024, DeepSeek-V2 (2405.04434), section 2.1;
    NoPE as in Kimi Team 2025.
    """

    def __init__(
        self, width, heads, *, latent=512, nope_dim=128, rope_dim=64, v_dim=128, q_latent=None, rope_base=None,
        eps=1e-6, bias=False,
    ):  # fmt: skip
        super().__init__(width)
        self.heads, self.latent = validate.count("heads", heads), validate.count("latent", latent)
        self.nope_dim = validate.count("nope_dim", nope_dim)
        self.rope_dim = validate.count("rope_dim", rope_dim, least=0)
        self.v_dim = validate.count("v_dim", v_dim)
        self.rope_base = check_turning(rope_base, "rope_dim", self.rope_dim)
        self.stored_shapes = [(latent + rope_dim,)]
        q_dim = heads * (nope_dim + rope_dim)
        self.q_down = self.q_norm = None
        if q_latent is not None:
            self.q_down = nn.Linear(width, validate.count("q_latent", q_latent), bias=bias)
            self.q_norm = RMSNorm(q_latent, eps=eps)
        self.q_proj = nn.Linear(width if q_latent is None else q_latent, q_dim, bias=False)
        self.kv_down = nn.Linear(width, latent + rope_dim, bias=bias)
        self.kv_norm = RMSNorm(latent, eps=eps)
        self.kv_up = nn.Linear(latent, heads * (nope_dim + v_dim), bias=False)
        self.o_proj = nn.Linear(heads * v_dim, width, bias=bias)

    def mix(self, x, stored, positions, mask):
        q = self.q_proj(x if self.q_down is None else self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1))
        c, shared = self.kv_down(x).split([self.latent, self.rope_dim], -1)
        if self.rope_base is not None:
            q, shared = self._turned(q, positions), self._turned(shared[:, :, None], positions)[:, :, 0]
        (row,) = remember(stored, [torch.cat([self.kv_norm(c), shared], -1)])
        form = self.absorbed if self._absorbing_pays(x.shape[1]) else self.expanded
        return self.o_proj(form(q, row, mask).flatten(2)), (row,)

    def _turned(self, q, positions):
        """The last P channels of every head turned by position."""
        passed, turning = q.split([q.shape[-1] - self.rope_dim, self.rope_dim], -1)
        return torch.cat([passed, rope(turning, base=self.rope_base, positions=positions)], -1)

    def _absorbing_pays(self, T):
        """A stored token costs R (N + V) + T (N + P + V) products a head expanded, and T (2 R + P) absorbed."""
        return T * (2 * self.latent - self.nope_dim - self.v_dim) < self.latent * (self.nope_dim + self.v_dim)

    def expanded(self, q, row, mask=None):
        """q [B, T, H, N + P] over the cache [B, S, R + P] -> [B, T, H, V]; every head has its own k and v."""
        c, shared = row.split([self.latent, self.rope_dim], -1)
        k, v = self.kv_up(c).unflatten(-1, (self.heads, -1)).split([self.nope_dim, self.v_dim], -1)
        k = torch.cat([k, shared[:, :, None].expand(-1, -1, self.heads, -1)], -1)
        return attend(q, k, v, mask)

    def absorbed(self, q, row, mask=None):
        """The same with W_UK moved to the query and W_UV to the output: the cache is the only key and value head."""
        up_k, up_v = self.kv_up.weight.unflatten(0, (self.heads, -1)).split([self.nope_dim, self.v_dim], 1)
        q_n, q_p = q.split([self.nope_dim, self.rope_dim], -1)
        q = torch.cat([torch.einsum("bthn,hnr->bthr", q_n, up_k), q_p], -1)
        row, scale = row[:, :, None], (self.nope_dim + self.rope_dim) ** -0.5
        return torch.einsum("bthr,hvr->bthv", attend(q, row, row[..., : self.latent], mask, scale), up_v)
