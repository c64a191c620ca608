"""DeltaNet: before a value is written, what the state already answers for that key is taken out.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = scale * S_t^T q_t

Sources: Schlag et al. 2021 (2102.11174), the rule; Yang et al. 2024 (2406.06484), the chunkwise form. Both
hold the transposed state, [V, K], so that their products of matrices run the other way.

One step of gradient descent on |S^T k_t - v_t|^2 / 2 with step size beta_t. For |k_t| = 1 the transition has the
eigenvalue 1 - beta_t along k_t and 1 across it: beta_t = 1 overwrites, beta_t = 2 reflects, beyond 2 the state grows.

A block of C tokens writes K^T V' into its incoming state S, where row i of V' leaves out what S and the earlier rows
answer to k_i:

    v'_i = beta_i (v_i - S^T k_i - sum_{j<i} (k_i^T k_j) v'_j)

These are C equations, (I + A) V' = Diag(beta) (V - K S), with A strictly lower triangular. The right side is linear in
S, so that one solve serves every state: V' = U - W S. The paper calls W and U the WY representation of the block, and
(I + A)^{-1} Diag(beta) its UT transform.
"""

from linattn_edu.algebra import outer, read, solve_unit_lower
from linattn_edu.forms import Operator


def update(q, k, v, beta, S):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = S_t^T q_t."""
    S = S + outer(k, beta[..., None] * (v - read(S, k)))
    return read(S, q), S


def intra(q, k, v, beta):
    """In a block that starts from the state S, with the causal mask M (diagonal included):

    A = tril(Diag(beta) K K^T, -1),   (I + A) W = Diag(beta) K,   (I + A) U = Diag(beta) V,
    V' = U - W S,   O = Q S + (Q K^T * M) V',   S' = S + K^T V'.
    """
    beta = beta[..., None]
    k_beta = beta * k
    W, U = solve_unit_lower(k_beta @ k.mT, k_beta, beta * v)
    return q, (q @ k.mT).tril(), k, W, U


def inter(q, scores, k, W, U, S):
    v = U - W @ S
    return q @ S + scores @ v, S + k.mT @ v


operator = Operator(
    update,
    intra,
    inter,
    gates={"beta": "B T HV"},
    source="Schlag et al. 2021 (2102.11174), the rule; Yang et al. 2024 (2406.06484), the chunkwise form.",
)
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)
