"""Kimi Delta Attention: Gated DeltaNet with a decay of its own, alpha_t = exp(g_t), for every key channel.

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T
    o_t = scale * S_t^T q_t

Source: Kimi Team 2025 (2510.26692), eq. 1. A scalar alpha_t commutes with the erasing factor, Diag(alpha_t) does not:
that the decay comes first is part of the definition.
"""

import torch

from linattn_edu import deltanet
from linattn_edu.algebra import channel_scores, since_start, solve_unit_lower, to_end
from linattn_edu.forms import Operator
from linattn_edu.gated_deltanet import inter


def update(q, k, v, g, beta, S):
    """S~ = Diag(exp(g_t)) S_{t-1},   S_t = S~ + beta_t k_t (v_t - S~^T k_t)^T,   o_t = S_t^T q_t."""
    return deltanet.update(q, k, v, beta, g.exp()[..., None] * S)


def intra(q, k, v, g, beta):
    """Gated DeltaNet's block, where each channel c of q and k decays by itself, g [C, K]:

    P(X)_ij = sum_c X_ic K_jc exp(g_{j+1,c} + ... + g_ic) for i >= j, else 0,
    A = tril(P(Diag(beta) K), -1),   (I + A) W = since_start * Diag(beta) K,   (I + A) U = Diag(beta) V,
    V' = U - W S,   O = (since_start * Q) S + P(Q) V',   S' = Diag(decay) S + (to_end * K)^T V',
    since_start_i = exp(g_1 + ... + g_i),   to_end_i = exp(g_{i+1} + ... + g_C),   decay = since_start_C.

    The paper's eqs. 6-9 write P(K) as (Gamma * K) (K / Gamma)^T with Gamma = since_start, whose second factor overflows
    in float32 once the block has decayed by e^-88. `channel_scores` never forms it.
    """
    start, end = since_start(g), to_end(g)
    beta = beta[..., None]
    k_beta = beta * k
    q_scores, A = channel_scores(torch.stack([q, k_beta]), k, g)
    W, U = solve_unit_lower(A, start * k_beta, beta * v)
    return start * q, q_scores, end * k, W, U, start[..., -1:, :].mT


operator = Operator(
    update,
    intra,
    inter,
    gates={"g": "B T HV K", "beta": "B T HV"},
    source="Kimi Team 2025, Kimi Linear, eqs. 1 and 6-9.",
)
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)
