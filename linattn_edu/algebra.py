"""The few products that every variant is written in."""

import torch
import torch.nn.functional as F

from linattn_edu import validate
from linattn_edu.forms import computing_dtype


def outer(k, v):
    """The outer product k v^T: `k [..., K]`, `v [..., V]` -> `[..., K, V]`."""
    return k[..., :, None] * v[..., None, :]


def read(S, q):
    """The state asked with a query, S^T q: `S [..., K, V]`, `q [..., K]` -> `[..., V]`."""
    return (q[..., None, :] @ S)[..., 0, :]


def since_start(g):
    """What token i finds of the state at the start of its block, exp(g_1 + ... + g_i): `g [..., C, K]` -> the same."""
    return g.cumsum(-2).exp()


def to_end(g):
    """What the end of the block finds of a write at token i, exp(g_{i+1} + ... + g_C): `g [..., C, K]` -> the same.

    The sum is taken from the end, not as the difference G_C - G_i of running sums G: after one strong gate, say -1e4,
    G holds three digits of the weak ones, and the gradient of a difference rounds where the terms should cancel.
    """
    later = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return later.flip(-2).cumsum(-2).flip(-2).exp()


def decay_matrix(g):
    """What token i finds of a write at token j, for one gate a token: `g [..., C]` ->

    D_ij = exp(g_{j+1} + ... + g_i) for j <= i, else 0,   `[..., C, C]`.

    Each entry has a sum of its own, for the reason given in `to_end`. No exponent is positive.
    """
    C = g.shape[-1]
    lower = g.new_ones(C, C).tril()
    later = lower.tril(-1)  # 1 where token i comes after token j
    return (g[..., None] * later).cumsum(-2).exp() * lower


def channel_scores(q, k, g):
    """Scores whose decay differs from channel to channel: `q, k, g [..., C, K]` ->

    P_ij = sum_c q_ic k_jc exp(g_{j+1,c} + ... + g_ic) for j <= i, else 0,   `[..., C, C]`.

    The one matmul (q exp(G)) (k exp(-G))^T, G the running sum of g, would overflow. For queries of the later half of
    the block and keys of the earlier one the decay is that to the end of one half and since the start of the other:

        P_ij = (q_i since_start(g)_i)^T (k_j to_end(g)_j),   j <= C/2 < i,

    and no factor exceeds 1. The two halves are blocks of their own, down to one token, where nothing decays.
    `q` may have further leading axes: several kinds of queries then share the factors of k.

    GLA's secondary chunking (Yang et al. 2024, section 4.3) carried on to blocks of one token.
    """
    C = q.shape[-2]
    if C < 2:
        return (q * k).sum(-1, keepdim=True)[..., :C]
    if C % 2:
        return channel_scores(*(F.pad(x, (0, 0, 1, 0)) for x in (q, k, g)))[..., 1:, 1:]
    q, k, g = (x.unflatten(-2, (2, C // 2)) for x in (q, k, g))
    (_, q_late), (k_early, _), (g_early, g_late) = (x.unbind(-3) for x in (q, k, g))
    across = (q_late * since_start(g_late)) @ (k_early * to_end(g_early)).mT
    early, late = channel_scores(q, k, g).unbind(-3)
    return torch.cat([F.pad(early, (0, C // 2)), torch.cat([across, late], -1)], -2)


def l2norm(x):
    """Scale vectors to (almost) unit length: x * rsqrt(sum(x^2) + 1e-6), over the last axis, in the dtype of `x`.

    Computed in at least float32: in float16 the sum would overflow for a vector longer than 256. In float32 it does
    beyond 1.8e19, and the result is 0. A zero vector stays zero and has a finite gradient. Same as FLA's `l2norm` (eps
    inside the root).
    """
    validate.floating("x", x)
    dtype, x = x.dtype, x.to(computing_dtype(x))
    return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).to(dtype)


def scan(a, x):
    """All h_t = a_t h_{t-1} + x_t along the axis 1, from h = 0, in 2 log2(T) levels: `a, x [B, T, ...]` -> `[B, T, ...]`.

    Two tokens in a row act like one with the factor a' a and the input a' x + x'. The scan of these pairs, a problem of
    half the length, gives every other h; one step more gives the rest. Nothing is divided by, so factors may be 0.

    Source: Blelloch 1990.
    """
    T = x.shape[1]
    if T < 2:
        return x + a[:, :0].sum()  # 0, and part of a's graph
    pairs = 2 * (T // 2)
    a_even, x_even, a_odd, x_odd = a[:, 0:pairs:2], x[:, 0:pairs:2], a[:, 1::2], x[:, 1::2]
    odd = scan(a_odd * a_even, a_odd * x_even + x_odd)
    h = torch.empty_like(x)
    h[:, 0], h[:, 1::2] = x[:, 0], odd
    h[:, 2::2] = a[:, 2::2] * odd[:, : (T - 1) // 2] + x[:, 2::2]
    return h


def solve_unit_lower(A, *right):
    """(I + A)^{-1} X for each X of `right`, by forward substitution; only what `A` holds below its diagonal counts.

    Row i is X_i - sum_{j<i} A_ij (row j), no inverse is formed. The series I - A + A^2 - ... and its doubling
    (I - A)(I + A^2)(I + A^4)... end too, since A^C = 0, but their terms grow far beyond the sum where keys are alike.
    """
    # X^T (I + A)^{-T}: solved from the right, so that the rows of X stay rows in memory.
    return tuple(
        torch.linalg.solve_triangular(A.mT, X.mT, upper=True, left=False, unitriangular=True).mT for X in right
    )
