"""DeltaNet: before a value is written, what the state already answers for that key is taken out.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = scale * S_t^T q_t

Sources: Schlag et al. 2021, section 4.2 (the rule); Yang et al. 2024 (2406.06484), section 3 (the chunkwise form). Both
hold the transposed state, [V, K], so that their products of matrices run the other way.

One step of gradient descent on |S^T k_t - v_t|^2 / 2 with step size beta_t. For |k_t| = 1 the transition has the
eigenvalue 1 - beta_t along k_t and 1 across it: beta_t = 1 overwrites, beta_t = 2 reflects, beyond 2 the state grows.
"""

from linattn_edu.algebra import outer, read, solve_unit_lower
from linattn_edu.forms import Operator


def update(q, k, v, beta, S):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = S_t^T q_t."""
    S = S + outer(k, beta[..., None] * (v - read(S, k)))
    return read(S, q), S


def ut_transform(scores, beta, k, v):
    """W and U of a block: W = T K, U = T V with T = (I + A)^{-1} Diag(beta), A = Diag(beta) tril(scores, -1).

    Row i of scores = K K^T says how strongly key i reads what the earlier keys have written. From the state S the
    block writes K^T V' with V'_i = beta_i (v_i - S^T k_i - sum_{j<i} (k_i^T k_j) V'_j), that is (I + A) V' =
    Diag(beta) (V - K S), so V' = U - W S: one triangular system for all states.
    """
    beta = beta[..., None]
    return solve_unit_lower(beta * scores, beta * k, beta * v)


def intra(q, k, v, beta):
    """In a block that starts from the state S, with the causal mask M (diagonal included):

    A = Diag(beta) tril(K K^T, -1),   (I + A) W = Diag(beta) K,   (I + A) U = Diag(beta) V,
    V' = U - W S,   O = Q S + (Q K^T * M) V',   S' = S + K^T V'.
    """
    W, U = ut_transform(k @ k.mT, beta, k, v)
    return q, (q @ k.mT).tril(), k, W, U


def inter(q, scores, k, W, U, S):
    v = U - W @ S
    return q @ S + scores @ v, S + k.mT @ v


operator = Operator(
    update,
    intra,
    inter,
    gates={"beta": "B T HV"},
    source="Schlag et al. 2021, section 4.2; Yang et al. 2024 (2406.06484), section 3.",
)
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)
