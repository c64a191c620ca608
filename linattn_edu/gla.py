"""Gated linear attention: every key channel decays by a factor of its own, alpha_t = exp(g_t), a vector of K numbers.

    S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T
    o_t = scale * S_t^T q_t

Source: Yang et al. 2024 (2312.06635), eq. 3, where q, k and v are rows. Row c of the state belongs to key channel c and
forgets at the rate of that channel. The layer's gate is `gates.gla_decay`.
"""

from linattn_edu import linear
from linattn_edu.algebra import channel_scores, since_start, to_end
from linattn_edu.decay import inter
from linattn_edu.forms import Operator


def update(q, k, v, g, S):
    """S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t."""
    return linear.update(q, k, v, g.exp()[..., None] * S)


def intra(q, k, v, g):
    """The block of `decay`, where each channel c of q and k decays by itself, g [C, K]:

    P_ij = sum_c Q_ic K_jc exp(g_{j+1,c} + ... + g_ic) for i >= j, else 0,
    O = P V + (since_start * Q) S,   S' = Diag(decay) S + (to_end * K)^T V.
    """
    start, end = since_start(g), to_end(g)
    return channel_scores(q, k, g) @ v, start * q, (end * k).mT @ v, start[..., -1:, :].mT


operator = Operator(
    update,
    intra,
    inter,
    gates={"g": "B T HV K"},
    source="Yang et al. 2024 (2312.06635), Gated Linear Attention, eqs. 3-4 and section 4.2.",
)
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)
