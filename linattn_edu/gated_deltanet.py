"""Gated DeltaNet: DeltaNet whose state first decays by alpha_t = exp(g_t), one number a head and token.

    S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T
    o_t = scale * S_t^T q_t

Source: Yang, Kautz and Hatamizadeh 2025 (2412.06464 v2), eq. 10 (there S is [V, K]). The decay comes before the delta
read: what is taken out is what the decayed state answers, alpha_t S_{t-1}^T k_t, as in the official code.
"""

from linattn_edu import deltanet
from linattn_edu.algebra import decay_matrix
from linattn_edu.deltanet import ut_transform
from linattn_edu.forms import Operator


def update(q, k, v, g, beta, S):
    """S~ = exp(g_t) S_{t-1},   S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T,   o_t = S_t^T q_t."""
    return deltanet.update(q, k, v, beta, g.exp()[..., None, None] * S)


def intra(q, k, v, g, beta):
    """DeltaNet's block, where G is the running sum of g in the block and D_ij = exp(G_i - G_j) for i >= j, else 0:

    A = Diag(beta) tril(K K^T * D, -1),   (I + A) W = Diag(beta exp(G)) K,   (I + A) U = Diag(beta) V,
    V' = U - W S,   O = Diag(exp(G)) Q S + (Q K^T * D) V',   S' = exp(G_C) S + (Diag(exp(G_C - G)) K)^T V'.
    """
    G = g.cumsum(-1)
    D = decay_matrix(G)
    since_start, to_end = G.exp()[..., None], (G[..., -1:] - G).exp()[..., None]
    W, U = ut_transform(k @ k.mT * D, beta, since_start * k, v)
    return since_start * q, q @ k.mT * D, to_end * k, W, U, since_start[..., -1:, :]


def inter(q, scores, k, W, U, decay, S):
    v = U - W @ S
    return q @ S + scores @ v, decay * S + k.mT @ v


operator = Operator(
    update,
    intra,
    inter,
    gates={"g": "B T HV", "beta": "B T HV"},
    source="Yang, Kautz and Hatamizadeh 2025, Gated Delta Networks, eq. 10 and section 3.3.",
)
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)
