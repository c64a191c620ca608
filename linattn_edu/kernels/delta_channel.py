"""Channel gates inside a chunk of the delta rule: the scores and what follows from them, and the way back.

A chunk is C tokens, C a power of two. At each level it falls into pairs of neighbouring blocks of h = 1, 2, 4, ... C/2
tokens, and later tokens meet earlier ones across the border inside one such pair exactly once. The decay between the two
is that from the earlier one to the border times that from the border to the later one; no factor exceeds 1, whatever
the gates. Both are decays inside a token's own block: from its start to a later token, from an earlier one to its end.

The logarithm of each is a sum of its own, made as a product with ones on tensor cores: nothing is subtracted, so that
nothing cancels. A program is one warp. The result of a product lies in its registers just as the left operand of the
next one must, so that tiles go from the sum through the exponential into the scores without a move: [tokens, channels]
forwards, where the scores sum over channels; [channels, tokens] backwards, where gradients sum over tokens.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import chunk_of_program, matmul, pairs, sum_where, two_terms

LOG2_E = tl.constexpr(1.4426950408889634)
VANISHING = tl.constexpr(-104.0)
"""exp(-104) is 0 in float32: a stronger gate does the same, but would cost a sum its digits."""


@triton.jit
def part_of_chunk(chunks, T, NT, HV, C: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr):
    """As `chunk_of_program`, where several programs share a chunk and head: which of its PARTS comes second."""
    c, part_and_head, first, stop = chunk_of_program(chunks, T, NT, PARTS * HV, C, PACKED)
    return c, part_and_head // HV, part_and_head % HV, first, stop


@triton.jit
def inside(i, level):
    """[i, j]: true where j lies between token i and the border of its pair, in the block of 2^level tokens of i."""
    block = i >> level
    late = ((block & 1) == 1)[:, None]
    return (block[:, None] == block[None, :]) & ((i[:, None] >= i[None, :]) == late)


@triton.jit
def rows(g, at, mask):
    """A tile of log-decays in powers of two."""
    return tl.maximum(tl.load(g + at, mask=mask, other=0.0), VANISHING) * LOG2_E


@triton.jit
def decays(g, i, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """From the start of a block to each token, from each token to the end, and over the whole block, from log-decays g."""
    start = tl.exp2(sum_where(i[:, None] >= i[None, :], g, DTYPE, PRECISION))
    end = tl.exp2(sum_where(i[:, None] < i[None, :], g, DTYPE, PRECISION))
    return start, end, tl.exp2(tl.sum(g, 0))


@triton.jit
def block_scores(P, A, q, k, g, i, B: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """P_ij + sum_c q_ic k_jc exp(G_ic - G_jc) for j <= i in a block of B tokens, and the same of k and k for A, j < i."""
    P = tl.where(i[:, None] == i[None, :], P + matmul(q, tl.trans(k), DTYPE, PRECISION), P)
    for level in tl.static_range(B.bit_length() - 1):
        own = tl.exp2(sum_where(inside(i, level), g, DTYPE, PRECISION))
        k_T = tl.trans((k * own).to(DTYPE))
        met = pairs(i, level) & (i[:, None] > i[None, :])
        P = tl.where(met, P + matmul(q * own, k_T, DTYPE, PRECISION), P)
        A = tl.where(met, A + matmul(k * own, k_T, DTYPE, PRECISION), A)
    return P, A


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def channel_intra(
    q, k, g, P, A, k_start, q_start, k_end, decay, chunks, scale, T, NT, H, HV,
    K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores P and A = K K^T * D, decayed q and k, decay: one program a value head and two blocks of B tokens, if C > B.

    Bytes a token and head: reads 2 K and the float32 g, half of q and k and all of g twice; writes C + 3 K and the
    float32 A. FLOPs: 8 B K log2 B for the levels in a block, half of them for sums of log-decays; 12 B K for those sums
    from and to its ends; 4 B K across the border of two blocks and C K + 2 C K across that of two halves of a chunk.
    """
    c, s, h, first, stop = part_of_chunk(chunks, T, NT, HV, C, (C + B) // (2 * B), PACKED)
    if first >= stop:
        return
    i = tl.arange(0, B)
    t = first + 2 * s * B + i
    tile = c * HV + h
    row = t * HV + h
    row_qk = t * H + h // (HV // H)
    in_K = (tile * C + 2 * s * B + i[:, None]) * KP
    in_C = (tile * C + 2 * s * B + i[:, None]) * C + 2 * s * B + i[None, :]
    P_0 = tl.zeros([B, B], tl.float32)
    A_0 = tl.zeros([B, B], tl.float32)
    P_1 = tl.zeros([B, B], tl.float32)
    A_1 = tl.zeros([B, B], tl.float32)
    P_met = tl.zeros([B, B], tl.float32)
    A_met = tl.zeros([B, B], tl.float32)
    for k0 in range(0, KP, BK):
        x = k0 + tl.arange(0, BK)
        mask = (t < stop)[:, None] & (x < K)[None, :]
        q_0 = tl.load(q + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
        k_0 = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
        g_0 = rows(g, row[:, None] * K + x[None, :], mask)
        if C > B:
            mask = (t + B < stop)[:, None] & (x < K)[None, :]
            q_1 = tl.load(q + (row_qk + B * H)[:, None] * K + x[None, :], mask=mask, other=0.0)
            k_1 = tl.load(k + (row_qk + B * H)[:, None] * K + x[None, :], mask=mask, other=0.0)
            g_1 = rows(g, (row + B * HV)[:, None] * K + x[None, :], mask)
        if C > 2 * B:
            t_other = first + 2 * (1 - s) * B + tl.arange(0, 2 * B)
            mask = (t_other < stop)[:, None] & (x < K)[None, :]
            other = tl.exp2(tl.sum(rows(g, (t_other * HV + h)[:, None] * K + x[None, :], mask), 0))
        start_0, end_0, kept = decays(g_0, i, DTYPE, PRECISION)
        P_0, A_0 = block_scores(P_0, A_0, q_0, k_0, g_0, i, B, DTYPE, PRECISION)
        if C > B:
            start_1, end_1, kept_1 = decays(g_1, i, DTYPE, PRECISION)
            early = tl.trans((k_0 * end_0).to(DTYPE))
            P_met += matmul(q_1 * start_1, early, DTYPE, PRECISION)
            A_met += matmul(k_1 * start_1, early, DTYPE, PRECISION)
            P_1, A_1 = block_scores(P_1, A_1, q_1, k_1, g_1, i, B, DTYPE, PRECISION)
            start_1 *= kept[None, :]
            end_0 *= kept_1[None, :]
            kept *= kept_1
            if C > 2 * B:
                kept *= other
                before = tl.where(s == 1, other, 1.0)[None, :]
                after = tl.where(s == 1, 1.0, other)[None, :]
                start_0 *= before
                start_1 *= before
                end_0 *= after
                end_1 *= after
            in_k = in_K + B * KP + x[None, :]
            tl.store(q_start + in_k, scale * start_1 * q_1)
            tl.store(k_start + in_k, start_1 * k_1)
            tl.store(k_end + in_k, end_1 * k_1)
        in_k = in_K + x[None, :]
        tl.store(q_start + in_k, scale * start_0 * q_0)
        tl.store(k_start + in_k, start_0 * k_0)
        tl.store(k_end + in_k, end_0 * k_0)
        if s == 0:  # one writer: the other half of the chunk would round otherwise
            tl.store(decay + tile * KP + x, kept)
    tl.store(P + in_C, scale * P_0)
    tl.store(A + in_C, A_0)
    if C > B:
        tl.store(P + in_C + B, tl.zeros([B, B], tl.float32))
        tl.store(P + in_C + B * C, scale * P_met)
        tl.store(A + in_C + B * C, A_met)
        tl.store(P + in_C + B * C + B, scale * P_1)
        tl.store(A + in_C + B * C + B, A_1)
    if C > 2 * B:
        across(q, k, g, P, A, scale, c, s, h, first, stop, H, HV, K, C, KP, BK, DTYPE, PRECISION)


@triton.jit
def across(
    q, k, g, P, A, scale, c, s, h, first, stop, H, HV,
    K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scores of the second half of a chunk with the first; both are decayed to the border between them."""
    B: tl.constexpr = C // 2
    i = tl.arange(0, B)
    in_C = ((c * HV + h) * C + i[:, None]) * C + i[None, :]
    if s == 0:
        tl.store(P + in_C + B, tl.zeros([B, B], tl.float32))
    else:
        P_c = tl.zeros([B, B], tl.float32)
        A_c = tl.zeros([B, B], tl.float32)
        t = first + i
        row = t * HV + h
        row_qk = t * H + h // (HV // H)
        for k0 in range(0, KP, BK):
            x = k0 + tl.arange(0, BK)
            mask = (t < stop)[:, None] & (x < K)[None, :]
            to_end = sum_where(i[:, None] < i[None, :], rows(g, row[:, None] * K + x[None, :], mask), DTYPE, PRECISION)
            early = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0) * tl.exp2(to_end)
            early = tl.trans(early.to(DTYPE))
            mask = (t + B < stop)[:, None] & (x < K)[None, :]
            g_x = rows(g, (row + B * HV)[:, None] * K + x[None, :], mask)
            late = tl.exp2(sum_where(i[:, None] >= i[None, :], g_x, DTYPE, PRECISION))
            at = (row_qk + B * H)[:, None] * K + x[None, :]
            P_c += matmul(late * tl.load(q + at, mask=mask, other=0.0), early, DTYPE, PRECISION)
            A_c += matmul(late * tl.load(k + at, mask=mask, other=0.0), early, DTYPE, PRECISION)
        tl.store(P + in_C + B * C, scale * P_c)
        tl.store(A + in_C + B * C, A_c)


@triton.jit
def sums(g, chosen, so_far, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """so_far plus, in column i, the columns j of g with chosen_ji: `sum_where` for tiles that are transposed."""
    ones = tl.where(chosen, 1.0, 0.0).to(DTYPE)
    if DTYPE == tl.bfloat16 or PRECISION == "tf32":
        high, low = two_terms(g, DTYPE)
        so_far = tl.dot(high, ones, so_far, input_precision=PRECISION)
        return tl.dot(low, ones, so_far, input_precision=PRECISION)
    else:
        return tl.dot(g, ones, so_far, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "tokens"])
def channel_intra_backward(
    q, k, g, beta, decay, dP, dA, dQ_s, dK_e, dK_s, ddecay, dq, dk, dg, dbeta, chunks, scale, T, NT, H, HV, tokens,
    K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradients of scores, decayed q and k, and decay to those of q, k and g: one program a chunk, value head
    and BK channels. All but dbeta stays inside a channel; `dbeta` [KP / BK, tokens, HV] are the parts of its sum over
    channels, the first comes in with what is known of it.

    Blocks of B tokens are taken from the last. A block meets the earlier ones and the later ones as wholes, and there
    dg_m sums over the tokens from m on: what m decays for token i is q_i dq_i, less k_j dk_j of the keys j >= m, which pay
    for what no decay at m touches. Itself it meets level by level, and there dg_m sums what a token loses or gives only
    over those that have m between themselves and the border, `inside` transposed. That costs a product a level, but what
    is added is never taken away again: the two would differ by the rounding of operands, and where gates are strong
    that is as large as dg. k stands on the left of A too, and dK_s is the gradient of start * k. The gradients of scores
    are read as [own, other] or [other, own], other tokens along the sum.
    Bytes a token and head: reads 5 K + 2 C and the float32 g, k, g and dK_e of earlier and q, k, g of later blocks too;
    writes 2 K and the float32 dg. FLOPs: 10 B K log2 B + 10 C K.
    """
    c, tile_k, h, first, stop = part_of_chunk(chunks, T, NT, HV, C, KP // BK, PACKED)
    if first >= stop:
        return
    N: tl.constexpr = C // B
    i = tl.arange(0, B)
    x = tile_k * BK + tl.arange(0, BK)
    real = (x < K)[:, None]
    tile = c * HV + h
    to_gates = (first * HV + h) * K
    to_qk = (first * H + h // (HV // H)) * K
    q, k = q + to_qk, k + to_qk
    g, dq, dk, dg = g + to_gates, dq + to_gates, dk + to_gates, dg + to_gates
    beta, dbeta = beta + first * HV + h, dbeta + (tl.cast(tokens, tl.int64) * tile_k + first) * HV + h
    dP, dA = dP + tile * C * C, dA + tile * C * C
    dQ_s, dK_e, dK_s = dQ_s + tile * C * KP, dK_e + tile * C * KP, dK_s + tile * C * KP
    tokens_left = (stop - first).to(tl.int32)
    until = i[:, None] <= i[None, :]
    beyond = i[:, None] > i[None, :]
    every = i[:, None] + i[None, :] >= 0
    later = tl.load(ddecay + tile * KP + x) * tl.load(decay + tile * KP + x)
    for n in range(N):
        b = N - 1 - n
        t = b * B + i
        mask = (t < tokens_left)[None, :] & real
        at = t[None, :] * (HV * K) + x[:, None]
        in_k = t[None, :] * KP + x[:, None]
        g_b = rows(g, at, mask)
        q_b = tl.load(q + t[None, :] * (H * K) + x[:, None], mask=mask, other=0.0)
        k_b = tl.load(k + t[None, :] * (H * K) + x[:, None], mask=mask, other=0.0)
        dQ_s_b = tl.load(dQ_s + in_k)
        dK_s_b = tl.load(dK_s + in_k)
        dK_e_b = tl.load(dK_e + in_k)
        below = t[:, None] * C + t[None, :]
        above = t[None, :] * C + t[:, None]
        dP_below = tl.load(dP + below)
        dP_above = tl.load(dP + above)
        dA_below = tl.load(dA + below)
        dA_above = tl.load(dA + above)
        dq_b = tl.zeros([BK, B], tl.float32)
        dk_b = tl.zeros([BK, B], tl.float32)
        dk_left = tl.zeros([BK, B], tl.float32)
        before = tl.zeros([BK, B], tl.float32)
        after = tl.zeros([BK, B], tl.float32)
        carried = tl.zeros([BK, B], tl.float32)
        for m in range(b):
            j = (b - 1 - m) * B + i
            mask_j = (j < tokens_left)[None, :] & real
            across = t[None, :] * C + j[:, None]
            g_j = rows(g, j[None, :] * (HV * K) + x[:, None], mask_j)
            k_j = tl.load(k + j[None, :] * (H * K) + x[:, None], mask=mask_j, other=0.0)
            dP_j = tl.load(dP + across)
            dA_j = tl.load(dA + across)
            dK_e_j = tl.load(dK_e + j[None, :] * KP + x[:, None])
            early = k_j * tl.exp2(sums(g_j, beyond, before, DTYPE, PRECISION))
            dq_b += matmul(early, dP_j, DTYPE, PRECISION)
            dk_left += matmul(early, dA_j, DTYPE, PRECISION)
            carried += early * dK_e_j.to(tl.float32)
            before = sums(g_j, every, before, DTYPE, PRECISION)
        for m in range(b + 1, N):
            j = m * B + i
            mask_j = (j < tokens_left)[None, :] & real
            across = j[:, None] * C + t[None, :]
            g_j = rows(g, j[None, :] * (HV * K) + x[:, None], mask_j)
            q_j = tl.load(q + j[None, :] * (H * K) + x[:, None], mask=mask_j, other=0.0)
            k_j = tl.load(k + j[None, :] * (H * K) + x[:, None], mask=mask_j, other=0.0)
            dP_j = scale * tl.load(dP + across)
            dA_j = tl.load(dA + across) * tl.load(beta + j * HV, mask=j < tokens_left, other=0.0)[:, None]
            late = tl.exp2(sums(g_j, until, after, DTYPE, PRECISION))
            dk_b += matmul(q_j * late, dP_j, DTYPE, PRECISION)
            dk_b += matmul(k_j * late, dA_j, DTYPE, PRECISION)
            after = sums(g_j, every, after, DTYPE, PRECISION)
        no = tl.zeros([BK, B], tl.float32)
        start = tl.exp2(sums(g_b, until, no, DTYPE, PRECISION))
        dq_b *= scale * start
        dk_left *= start
        dk_b *= tl.exp2(sums(g_b, beyond, no, DTYPE, PRECISION))
        start = tl.exp2(sums(g_b, until, before, DTYPE, PRECISION))
        dq_b += scale * start * dQ_s_b.to(tl.float32)
        dk_left += start * dK_s_b.to(tl.float32)
        written = tl.exp2(sums(g_b, beyond, after, DTYPE, PRECISION)) * dK_e_b.to(tl.float32)
        carried *= tl.exp2(sums(g_b, every, after, DTYPE, PRECISION))
        dg_b = sums(carried, every, no + later[:, None], DTYPE, PRECISION)
        dg_b = sums(written * k_b, i[:, None] < i[None, :], dg_b, DTYPE, PRECISION)
        beta_b = tl.load(beta + t * HV, mask=t < tokens_left, other=0.0)
        since = q_b * dq_b + k_b * (beta_b[None, :] * dk_left - dk_b)
        dg_b = sums(since, i[:, None] >= i[None, :], dg_b, DTYPE, PRECISION)
        later += tl.sum(since, 1)
        dk_b += written
        diagonal = scale * tl.load(dP + t * (C + 1)).to(tl.float32)[None, :]
        dP_b = (scale * dP_below.to(tl.float32) + scale * dP_above.to(tl.float32)).to(DTYPE)
        dA_b = (beta_b[:, None] * dA_below.to(tl.float32) + dA_above.to(tl.float32)).to(DTYPE)
        for level in tl.static_range(B.bit_length() - 1):
            own = tl.exp2(sums(g_b, tl.trans(inside(i, level)), no, DTYPE, PRECISION))
            late = (((i >> level) & 1) == 1)[None, :]
            met_q = matmul(tl.where(late, q_b, k_b) * own, tl.where(pairs(i, level), dP_b, 0.0), DTYPE, PRECISION)
            met_k = matmul(k_b * own, tl.where(pairs(i, level), dA_b, 0.0), DTYPE, PRECISION)
            dq_b = tl.where(late, dq_b + own * met_q, dq_b)
            dk_left = tl.where(late, dk_left + own * met_k, dk_left)
            dk_b = tl.where(late, dk_b, dk_b + own * (met_q + met_k))
            due = own * (tl.where(late, q_b, k_b) * met_q + k_b * (tl.where(late, beta_b[None, :], 1.0) * met_k))
            dg_b = matmul(due, tl.where(inside(i, level), 1.0, 0.0), DTYPE, PRECISION, dg_b)
        tl.store(dq + at, dq_b + diagonal * k_b, mask=mask)
        tl.store(dk + at, dk_b + diagonal * q_b + beta_b[None, :] * dk_left, mask=mask)
        tl.store(dg + at, dg_b, mask=mask)
        db = tl.sum(dk_left * k_b, 0)
        if tile_k == 0:
            db += tl.load(dbeta + t * HV, mask=t < tokens_left, other=0.0)
        tl.store(dbeta + t * HV, db, mask=t < tokens_left)
