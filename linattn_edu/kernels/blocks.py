"""What the kernels share: whose tokens a program works on, products, sums of gates, scores, the inverse.

A chunk is C tokens, C a power of two, and everything inside it follows one scheme: at each level the chunk falls into
pairs of neighbouring blocks of h = 1, 2, 4, ... C/2 tokens, and later tokens meet earlier ones across one such pair
exactly once. `channel_scores` and `unit_lower_inverse` are that scheme. A tile is never cut: each level is a product of
whole tiles under the mask of `pairs`, which is how Triton likes it.
"""

import triton
import triton.language as tl


@triton.jit
def tokens_of_chunk(chunks, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """The chunk of this program, its first token, and where its sequence ends; sequences lie one after another."""
    c = tl.program_id(0).to(tl.int64)
    if PACKED:
        first = tl.load(chunks + 2 * c)
        stop = tl.load(chunks + 2 * c + 1)
    else:
        n = c // NT
        first = n * T + (c - n * NT) * C
        stop = (n + 1) * T
    return c, first, stop


@triton.jit
def tokens_of_sequence(cu_seqlens, first_chunk, n, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, end, first chunk and number of chunks of the sequence n."""
    if PACKED:
        first = tl.load(cu_seqlens + n)
        stop = tl.load(cu_seqlens + n + 1)
        c = tl.load(first_chunk + n)
    else:
        first = n * T
        stop = first + T
        c = n * NT
    return first, stop, c, tl.cdiv(stop - first, C).to(tl.int32)


@triton.jit
def matmul(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """a b, operands rounded to DTYPE, summed in float32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision=PRECISION)


@triton.jit
def sum_where(chosen, x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Row i is the sum of the rows j of `x` with chosen_ij: on tensor cores cheaper than a scan, and nothing cancels.

    Among bfloat16 operands x goes in two terms, which together keep 16 digits; ones are exact.
    """
    if DTYPE == tl.bfloat16:
        ones = tl.where(chosen, 1.0, 0.0).to(DTYPE)
        high = x.to(DTYPE)
        return tl.dot(ones, high) + tl.dot(ones, (x - high.to(tl.float32)).to(DTYPE))
    else:
        return tl.dot(tl.where(chosen, 1.0, 0.0), x, input_precision=PRECISION)


@triton.jit
def decay_vectors(g, i):
    """since_start_i = exp(g_1 + ... + g_i) and to_end_i = exp(g_{i+1} + ... + g_C) of scalar gates, as columns."""
    later = i[None, :] > i[:, None]
    return tl.exp(tl.cumsum(g, 0))[:, None], tl.exp(tl.sum(tl.where(later, g[None, :], 0.0), 1))[:, None]


@triton.jit
def decay_matrix(g, i, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """D_ij = exp(g_{j+1} + ... + g_i) for j <= i, else 0; every entry has a sum of its own, so nothing cancels."""
    own = i[:, None] >= i[None, :]
    sums = sum_where(own, tl.where(i[:, None] > i[None, :], g[:, None], 0.0), DTYPE, PRECISION)
    return tl.where(own, tl.exp(sums), 0.0)


@triton.jit
def decay_matrix_gradient(X, i, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """dg_m = sum of X_ij over j < m <= i, where X_ij = D_ij dD_ij."""
    reach = sum_where(i[:, None] <= i[None, :], X, DTYPE, PRECISION)
    return tl.sum(tl.where(i[:, None] > i[None, :], reach, 0.0), 1)


@triton.jit
def pairs(i, level):
    """True where i lies in the later and j in the earlier of two blocks of h = 2^level tokens that form a pair."""
    block = i >> level
    return ((block & 1) == 1)[:, None] & (block[:, None] == block[None, :] + 1)


@triton.jit
def channel_decays(g, i, level, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """since_start and to_end in blocks of 2^level tokens, a factor for every channel; none exceeds 1."""
    same = (i >> level)[:, None] == (i >> level)[None, :]
    since_start = sum_where(same & (i[:, None] >= i[None, :]), g, DTYPE, PRECISION)
    to_end = sum_where(same & (i[:, None] < i[None, :]), g, DTYPE, PRECISION)
    return tl.exp(since_start), tl.exp(to_end)


@triton.jit
def channel_decays_gradient(read, written, i, level, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """dg of `channel_decays`, given each factor times its gradient."""
    same = (i >> level)[:, None] == (i >> level)[None, :]
    dg = sum_where(same & (i[:, None] <= i[None, :]), read, DTYPE, PRECISION)
    return dg + sum_where(same & (i[:, None] > i[None, :]), written, DTYPE, PRECISION)


@triton.jit
def channel_scores(
    q, k, g, i, C: tl.constexpr, DELTA: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """P_ij = sum_c q_ic k_jc exp(g_{j+1,c} + ... + g_ic) for j <= i, else 0, over the channels at hand; with the delta
    rule also A, the same of k and k below the diagonal. The decays of a level serve both.
    """
    P = tl.where(i[:, None] == i[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    A = tl.zeros([C, C], tl.float32)
    for level in range(C.bit_length() - 1):
        late, early = channel_decays(g, i, level, DTYPE, PRECISION)
        k_early = tl.trans(k * early)
        across = pairs(i, level)
        P += tl.where(across, matmul(q * late, k_early, DTYPE, PRECISION), 0.0)
        if DELTA:
            A += tl.where(across, matmul(k * late, k_early, DTYPE, PRECISION), 0.0)
    return P, A


@triton.jit
def channel_scores_gradient(
    dP, dA, q, k, b, g, i, C: tl.constexpr, DELTA: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """dq, dk, dg of P and Diag(b) A in `channel_scores`, and the gradient of the left b k in A.

    dP is zero above its diagonal, dA there and on it.
    """
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], dP, 0.0), 1)[:, None]
    dq = diagonal * k
    dk = diagonal * q
    dk_left = tl.zeros_like(k)
    dg = tl.zeros_like(k)
    for level in range(C.bit_length() - 1):
        late, early = channel_decays(g, i, level, DTYPE, PRECISION)
        across = pairs(i, level)
        dX = tl.where(across, dP, 0.0)
        dq_h = late * matmul(dX, k * early, DTYPE, PRECISION)
        dk_h = matmul(tl.trans(dX), q * late, DTYPE, PRECISION)
        dq += dq_h
        read = dq_h * q
        if DELTA:
            dX = tl.where(across, dA, 0.0)
            dl_h = late * matmul(dX, k * early, DTYPE, PRECISION)
            dk_h += matmul(tl.trans(dX), b * k * late, DTYPE, PRECISION)
            dk_left += dl_h
            read += dl_h * b * k
        dk_h *= early
        dk += dk_h
        dg += channel_decays_gradient(read, dk_h * k, i, level, DTYPE, PRECISION)
    return dq, dk, dk_left, dg


@triton.jit
def unit_lower_inverse(A, i, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^{-1} for a strictly lower A [C, C] in float32.

    The inverse of [[X, 0], [Y, Z]] is [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]. Blocks of one token are their own inverse; each
    level joins pairs of them. No power of A is formed: those grow far beyond their sum where keys are alike.
    """
    M = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(pairs(i, 0), A, 0.0)
    for level in range(1, C.bit_length() - 1):
        Y = tl.where(pairs(i, level), A, 0.0)
        M -= matmul(M, matmul(Y, M, tl.float32, PRECISION), tl.float32, PRECISION)
    return M
