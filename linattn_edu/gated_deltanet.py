"""Gated DeltaNet: DeltaNet whose state first decays by alpha_t = exp(g_t), one number a head and token.

    S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T
    o_t = scale * S_t^T q_t

Source: Yang, Kautz and Hatamizadeh 2025 (2412.06464 v2), eq. 10 (there S is [V, K]). The decay comes before the delta
read: what is taken out is what the decayed state answers, alpha_t S_{t-1}^T k_t, as in the official code.
"""

from linattn_edu import deltanet
from linattn_edu.algebra import decay_matrix, since_start, solve_unit_lower, to_end
from linattn_edu.forms import Operator


def update(q, k, v, g, beta, S):
    """S~ = exp(g_t) S_{t-1},   S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T,   o_t = S_t^T q_t."""
    return deltanet.update(q, k, v, beta, g.exp()[..., None, None] * S)


def intra(q, k, v, g, beta):
    """DeltaNet's block, where D_ij = exp(g_{j+1} + ... + g_i) for i >= j, else 0, decays what token j has written:

    A = tril(Diag(beta) K K^T * D, -1),   (I + A) W = Diag(since_start beta) K,   (I + A) U = Diag(beta) V,
    V' = U - W S,   O = Diag(since_start) Q S + (Q K^T * D) V',   S' = decay S + (Diag(to_end) K)^T V',
    since_start_i = exp(g_1 + ... + g_i),   to_end_i = exp(g_{i+1} + ... + g_C),   decay = since_start_C.
    """
    start, end, D = since_start(g[..., None]), to_end(g[..., None]), decay_matrix(g)
    beta = beta[..., None]
    k_beta = beta * k
    W, U = solve_unit_lower(k_beta @ k.mT * D, start * k_beta, beta * v)
    return start * q, q @ k.mT * D, end * k, W, U, start[..., -1:, :]


def inter(q, scores, k, W, U, decay, S):
    v = U - W @ S
    return q @ S + scores @ v, decay * S + k.mT @ v


operator = Operator(
    update,
    intra,
    inter,
    gates={"g": "B T HV", "beta": "B T HV"},
    source="Yang, Kautz and Hatamizadeh 2025, Gated Delta Networks, eq. 10.",
)
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)
