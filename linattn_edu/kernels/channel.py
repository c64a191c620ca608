"""What a gate for each channel adds to `walk`: scores whose decay differs from channel to channel, and their gradient.

The tokens of a chunk form pairs of neighbouring blocks of h = 1, 2, 4, ... C/2 tokens, and a later token i meets an
earlier one j across one such pair exactly once. With `mid` the last token of its earlier block,

    exp(g_{j+1} + ... + g_i) = exp(G_i - G_mid) exp(G_mid - G_j),    G_i = g_1 + ... + g_i,

and neither factor exceeds 1. A token is late or early in its pair, never both: one tile X of late queries and early
keys, each times its factor, serves a level, and what X X^T holds across the pairs are the scores.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import matmul, operand, sum_where
from linattn_edu.kernels.walk import LOG2_E, running_sums, tokens_of_segment


@triton.jit
def tokens_of_chunk(table, T, L, NS, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of the chunk of this program and end of its segment, which may lie before it."""
    chunk = tl.program_id(0).to(tl.int64)
    s = chunk // (L // C)
    first, stop = tokens_of_segment(table, s, T, L, NS, PACKED)
    return chunk, first + (chunk - s * (L // C)) * C, stop


@triton.jit
def level_factors(G, at_G, row, i, tokens, level, unit, mask):
    """For blocks of 2^level tokens: which tokens are late, as a column, and the decay between each and its `mid`.

    `at_G` points to G of the first of the chunk's `tokens`, rows `row` apart; the row of another token is read, not
    computed. Where `mid` would lie behind the last token nothing is late, and any row will do.
    """
    block = i >> level
    mid = tl.minimum((block | 1) << level, tokens.to(tl.int32)) - 1
    G_mid = tl.load(at_G + mid[:, None] * row, mask=mask, other=0)
    return ((block & 1) == 1)[:, None], tl.exp2(tl.abs(G - G_mid).to(tl.float32) * -unit)


@triton.jit(do_not_specialize=["T", "L", "NS", "H", "HV"])
def intra(
    q, k, g, G, P, q_start, k_end, decay, table, T, L, NS, H, HV,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """P_ij = sum_c q_ic k_jc exp(G_ic - G_jc) for j <= i, else 0; q and k decayed from and to the chunk's ends; its decay.

    One program a chunk and value head. Bytes a token and head: reads 2 K and the gates, writes 2 K + C and the running
    sums G, which it reads again row by row. FLOPs: 2 C K log2 C.
    """
    chunk, first, stop = tokens_of_chunk(table, T, L, NS, C, PACKED)
    h = tl.program_id(1)
    if first >= stop:
        return
    unit = LOG2_E / (1 << DIGITS)
    i = tl.arange(0, C)
    real = (i < stop - first)[:, None]
    scores = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        x = k0 + tl.arange(0, BK)
        mask = real & (x < K)[None, :]
        at = (first * HV + h) * K + i[:, None] * (HV * K) + x[None, :]
        at_qk = (first * H + h // (HV // H)) * K + i[:, None] * (H * K) + x[None, :]
        G_x = running_sums(tl.load(g + at, mask=mask, other=0.0), DIGITS)
        tl.store(G + at, G_x, mask=mask)
        G_C = tl.min(G_x, 0)
        q_x = tl.load(q + at_qk, mask=mask, other=0.0)
        k_x = tl.load(k + at_qk, mask=mask, other=0.0)
        tl.store(q_start + at, tl.exp2(G_x.to(tl.float32) * unit) * q_x, mask=mask)
        tl.store(k_end + at, tl.exp2((G_C[None, :] - G_x).to(tl.float32) * unit) * k_x, mask=mask)
        tl.store(decay + (chunk * HV + h) * K + x, tl.exp2(G_C.to(tl.float32) * unit), mask=x < K)
        scores += tl.where(i[:, None] == i[None, :], tl.sum(q_x.to(tl.float32) * k_x.to(tl.float32), 1)[:, None], 0.0)
        tl.debug_barrier()
        at_G = G + (first * HV + h) * K + x[None, :]
        for level in range(C.bit_length() - 1):
            late, factor = level_factors(G_x, at_G, HV * K, i, stop - first, level, unit, mask)
            X = operand(factor * tl.where(late, q_x, k_x), DTYPE, PRECISION)
            pair = late & ((i >> level)[:, None] == (i >> level)[None, :] + 1)
            scores += tl.where(pair, tl.dot(X, tl.trans(X), input_precision=PRECISION), 0.0)
    at_P = (first * HV + h) * C + i[:, None] * (HV * C) + i[None, :]
    tl.store(P + at_P, scores, mask=real)


@triton.jit(do_not_specialize=["T", "L", "NS", "H", "HV", "splits"])
def intra_backward(
    q, k, v, do, G, dq_start, dk_end, kept, dq, dk, dg, table, scale, T, L, NS, H, HV, splits,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """From the gradients of q_start and k_end that walks have left, and dP = scale tril(dO V^T), to dq, dk and dg.

    With the tile X of a level, dX = (dP + dP^T, cut to the pairs) X: rows of late queries and early keys at once. G_i
    gains X_i dX_i where i is late and loses it where i is early; what G_mid gains is nothing, for over one pair the
    late and the early sum are the same sum of X_i dP_ij X_j, also after rounding, if X is the rounded tile. Then
    dg_m sums dG_i over i >= m.
    `kept` [splits, chunks, HV, K] are the products of each chunk's first S and last dS, summed over V. One program a
    chunk and value head. Bytes a token and head: reads 4 K + 2 V and G, writes 2 K and the gates' gradient.
    FLOPs: 2 C V + 2 C K log2 C.
    """
    chunk, first, stop = tokens_of_chunk(table, T, L, NS, C, PACKED)
    h = tl.program_id(1)
    if first >= stop:
        return
    unit = LOG2_E / (1 << DIGITS)
    i = tl.arange(0, C)
    real = (i < stop - first)[:, None]
    dP = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        y = v0 + tl.arange(0, BV)
        mask = real & (y < V)[None, :]
        at_v = (first * HV + h) * V + i[:, None] * (HV * V) + y[None, :]
        do_y = tl.load(do + at_v, mask=mask, other=0.0)
        v_y = tl.load(v + at_v, mask=mask, other=0.0)
        dP = matmul(do_y, tl.trans(v_y), DTYPE, PRECISION, dP)
    diagonal = scale * tl.sum(tl.where(i[:, None] == i[None, :], dP, 0.0), 1)[:, None]
    dP = scale * tl.where(i[:, None] > i[None, :], dP, 0.0)
    dP = operand(dP + tl.trans(dP), DTYPE, PRECISION)
    for k0 in range(0, K, BK):
        x = k0 + tl.arange(0, BK)
        mask = real & (x < K)[None, :]
        at = (first * HV + h) * K + i[:, None] * (HV * K) + x[None, :]
        at_qk = (first * H + h // (HV // H)) * K + i[:, None] * (H * K) + x[None, :]
        at_G = G + (first * HV + h) * K + x[None, :]
        G_x = tl.load(G + at, mask=mask, other=0)
        q_x = tl.load(q + at_qk, mask=mask, other=0.0)
        k_x = tl.load(k + at_qk, mask=mask, other=0.0)
        dq_x = diagonal * k_x
        dk_x = diagonal * q_x
        dG = tl.zeros([C, BK], tl.float32)
        for level in range(C.bit_length() - 1):
            late, factor = level_factors(G_x, at_G, HV * K, i, stop - first, level, unit, mask)
            X = operand(factor * tl.where(late, q_x, k_x), DTYPE, PRECISION)
            pair = ((i >> level)[:, None] ^ (i >> level)[None, :]) == 1
            dX = tl.dot(tl.where(pair, dP, 0.0).to(DTYPE), X, input_precision=PRECISION)
            dq_x += tl.where(late, factor * dX, 0.0)
            dk_x += tl.where(late, 0.0, factor * dX)
            dG += tl.where(late, X, -X) * dX
        start = tl.exp2(G_x.to(tl.float32) * unit)
        G_C = tl.min(tl.where(real, G_x, 0), 0)
        end = tl.exp2((G_C[None, :] - G_x).to(tl.float32) * unit)
        read = tl.load(dq_start + at, mask=mask, other=0.0) * start
        written = tl.load(dk_end + at, mask=mask, other=0.0) * end
        tl.store(dq + at, dq_x + read, mask=mask)
        tl.store(dk + at, dk_x + written, mask=mask)
        lasting = tl.zeros([BK], tl.float32)
        for z in range(splits):
            at_kept = ((z * tl.num_programs(0) + chunk) * HV + h) * K + x
            lasting += tl.load(kept + at_kept, mask=x < K, other=0.0)
        dg_x = sum_where(i[:, None] <= i[None, :], dG + read * q_x, DTYPE, PRECISION)
        dg_x += sum_where(i[:, None] > i[None, :], written * k_x, DTYPE, PRECISION)
        dg_x += (lasting * tl.exp2(G_C.to(tl.float32) * unit))[None, :]
        tl.store(dg + at, dg_x, mask=mask)
