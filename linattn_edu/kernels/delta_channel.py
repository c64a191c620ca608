"""Channel gates inside a chunk of the delta rule: the scores and what follows from them, and the way back.

A chunk is C tokens, C a power of two. At each level it falls into pairs of neighbouring blocks of h = 1, 2, 4, ... C/2
tokens, and later tokens meet earlier ones across the border inside one such pair exactly once. The decay between the two
is that from the earlier one to the border times that from the border to the later one; no factor exceeds 1, whatever
the gates. With G the running sum of the log-decays, both are exp(-|G_i - G_border|): one exponential a token and level.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import chunk_of_program, matmul, pairs, sum_where

LOG2_E = tl.constexpr(1.4426950408889634)
VANISHING = tl.constexpr(-104.0)
"""exp(-104) is 0 in float32: a stronger gate does the same, but would cost the running sum its digits."""


@triton.jit
def running_decay(g, i, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """G_i = g_1 + ... + g_i in powers of two, for every channel."""
    return sum_where(i[:, None] >= i[None, :], tl.maximum(g, VANISHING) * LOG2_E, DTYPE, PRECISION)


@triton.jit
def border_decay(G, at_G, i, level, KP: tl.constexpr):
    """exp(-|G_i - G_border|), G being the rows at `at_G`; the border is the last token of the earlier block."""
    h = 1 << level
    border = (i & -(2 * h)) + h - 1
    return tl.exp2(-tl.abs(G - tl.load(at_G + border[:, None] * KP)))


@triton.jit
def channel_scores(
    q, k, G, at_G, i, B: tl.constexpr, KP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """P_ij = sum_c q_ic k_jc exp(G_ic - G_jc) for j <= i in a block of B tokens, and A, the same of k and k for
    j < i. The decays of a level serve both. What stands above the diagonal means nothing.
    """
    P = tl.where(i[:, None] == i[None, :], tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[:, None], 0.0)
    A = tl.zeros([B, B], tl.float32)
    for level in range(B.bit_length() - 1):
        decay = border_decay(G, at_G, i, level, KP)
        late = (((i >> level) & 1) == 1)[:, None]
        met = (tl.where(late, q, k) * decay).to(DTYPE)
        P = tl.where(pairs(i, level), matmul(met, tl.trans(met), DTYPE, PRECISION), P)
        met = (k * decay).to(DTYPE)
        A = tl.where(pairs(i, level), matmul(met, tl.trans(met), DTYPE, PRECISION), A)
    return P, A


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def channel_intra(
    q, k, g, P, A, k_start, q_start, k_end, G, decay, chunks, scale, T, NT, H, HV,
    K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, B: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores and decayed q and k: one program a value head and block of B tokens, of which a chunk has one or two.

    The later block of two also meets the earlier one, across the border between them.
    Bytes a token and head: reads 2 K and the float32 g, half of k and all of g twice; writes C + 3 K and the float32 A
    and G. FLOPs: 4 B K log2 B + 2 B K.
    """
    c, h, first, stop = chunk_of_program(chunks, T, NT, HV, C, PACKED)
    if first >= stop:
        return
    s = tl.program_id(1)
    i = tl.arange(0, B)
    x = tl.arange(0, KP)
    t = first + s * B + i
    mask = (t < stop)[:, None] & (x < K)[None, :]
    at_qk = (t * H + h // (HV // H))[:, None] * K + x[None, :]
    tile = c * HV + h
    at_G = G + (tile * C + s * B) * KP + x[None, :]
    in_k = (tile * C + s * B + i[:, None]) * KP + x[None, :]
    in_C = (tile * C + s * B + i[:, None]) * C + i[None, :]
    q_c = tl.load(q + at_qk, mask=mask, other=0.0)
    k_c = tl.load(k + at_qk, mask=mask, other=0.0)
    g_c = tl.load(g + (t * HV + h)[:, None] * K + x[None, :], mask=mask, other=0.0)
    since_block = running_decay(g_c, i, DTYPE, PRECISION)
    total = tl.sum(tl.maximum(g_c, VANISHING) * LOG2_E, 0)
    before = tl.zeros([KP], tl.float32)
    after = tl.zeros([KP], tl.float32)
    if B < C:
        t_other = first + (1 - s) * B + i
        mask_other = (t_other < stop)[:, None] & (x < K)[None, :]
        g_other = tl.load(g + (t_other * HV + h)[:, None] * K + x[None, :], mask=mask_other, other=0.0)
        total_other = tl.sum(tl.maximum(g_other, VANISHING) * LOG2_E, 0)
        if s == 1:
            before += total_other
            to_border = tl.exp2(
                tl.minimum(total_other[None, :] - running_decay(g_other, i, DTYPE, PRECISION), 0.0)
            )
            at_other = (t_other * H + h // (HV // H))[:, None] * K + x[None, :]
            early = tl.load(k + at_other, mask=mask_other, other=0.0) * to_border
            late = tl.exp2(since_block)
            P_across = scale * matmul(q_c * late, tl.trans(early), DTYPE, PRECISION)
            tl.store(P + in_C, P_across)
            tl.store(A + in_C, matmul(k_c * late, tl.trans(early), DTYPE, PRECISION))
        else:
            after += total_other
            tl.store(P + in_C + B, tl.zeros([B, B], tl.float32))
    G_c = before[None, :] + since_block
    tl.store(G + in_k, G_c)
    start = tl.exp2(G_c)
    tl.store(q_start + in_k, scale * start * q_c)
    tl.store(k_start + in_k, start * k_c)
    tl.store(k_end + in_k, tl.exp2(tl.minimum(total[None, :] - since_block, 0.0) + after[None, :]) * k_c)
    tl.store(decay + tile * KP + x, tl.exp2(before + total + after))
    tl.debug_barrier()  # what follows reads rows of G that other threads have written
    P_c, A_c = channel_scores(q_c, k_c, G_c, at_G, i, B, KP, DTYPE, PRECISION)
    tl.store(P + in_C + s * B, tl.where(i[:, None] >= i[None, :], scale * P_c, 0.0))
    tl.store(A + in_C + s * B, A_c)


@triton.jit
def channel_scores_gradient(
    dX, late_x, early_x, G, at_G, i, B: tl.constexpr, KP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr
):
    """The gradients of x_i and y_j in the scores X_ij = sum_c x_ic y_jc exp(G_ic - G_jc), j < i, of a block of B tokens.

    `dX` is the gradient of X below the diagonal and its transpose above: at each level a token is later or earlier, and
    its row holds the gradients of all that it meets, one product for both.
    """
    dx = tl.zeros([B, KP], tl.float32)
    dy = tl.zeros([B, KP], tl.float32)
    for level in range(B.bit_length() - 1):
        decay = border_decay(G, at_G, i, level, KP)
        late = (((i >> level) & 1) == 1)[:, None]
        met = tl.where(late, late_x, early_x) * decay
        met = decay * matmul(tl.where(pairs(i, level), dX, 0.0), met, DTYPE, PRECISION)
        dx += tl.where(late, met, 0.0)
        dy += tl.where(late, 0.0, met)
    return dx, dy


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def channel_intra_backward(
    q, k, G, beta, dP, dA, dQ_s, dK_e, dK_s, ddecay, dq, dk, dg, dbeta, chunks, scale, T, NT, H, HV,
    K: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, B: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """From the gradients of scores, decayed q and k, and decay to those of q, k and g: one program a chunk and value head.

    The one or two blocks of the chunk are taken from the last, since dg_m sums over the tokens from m on: what m decays
    for token i is q_i dq_i, less k_j dk_j of the keys j >= m, which pay for what no decay at m touches. k stands on the
    left of A too, and dK_s is the gradient of start * k; `dbeta` comes in with what is known of it.
    Bytes a token and head: reads 5 K + 2 C and the float32 G, half of k, q and G twice; writes 2 K and the float32 dg.
    FLOPs: 4 B K log2 B + 4 B K.
    """
    c, h, first, stop = chunk_of_program(chunks, T, NT, HV, C, PACKED)
    if first >= stop:
        return
    i = tl.arange(0, B)
    x = tl.arange(0, KP)
    tile = c * HV + h
    at_C = tile * C * C
    at_k = tile * C * KP + x[None, :]
    head_qk = h // (HV // H)
    G_last = tl.load(G + tile * C * KP + (C - 1) * KP + x)[None, :]
    G_border = tl.load(G + tile * C * KP + (B - 1) * KP + x)[None, :]
    lasting = tl.load(ddecay + tile * KP + x)[None, :] * tl.exp2(G_last)
    later = tl.zeros([1, KP], tl.float32)
    for n in range(C // B):
        s = C // B - 1 - n
        t = first + s * B + i
        row = t * HV + h
        mask = (t < stop)[:, None] & (x < K)[None, :]
        at = row[:, None] * K + x[None, :]
        at_qk = (t * H + head_qk)[:, None] * K + x[None, :]
        in_k = at_k + (s * B + i[:, None]) * KP
        at_G = G + at_k + s * B * KP
        in_C = at_C + (s * B + i[:, None]) * C + s * B + i[None, :]
        q_c = tl.load(q + at_qk, mask=mask, other=0.0).to(tl.float32)
        k_c = tl.load(k + at_qk, mask=mask, other=0.0).to(tl.float32)
        G_c = tl.load(G + in_k)
        dP_c = scale * tl.load(dP + in_C).to(tl.float32)
        diagonal = tl.sum(tl.where(i[:, None] == i[None, :], dP_c, 0.0), 1)[:, None]
        dq_c, dk_c = channel_scores_gradient(dP_c + tl.trans(dP_c), q_c, k_c, G_c, at_G, i, B, KP, DTYPE, PRECISION)
        b = tl.load(beta + row, mask=t < stop, other=0.0)[:, None]
        dA_c = tl.load(dA + in_C).to(tl.float32)
        dA_c += tl.trans(b * dA_c)
        dk_left, dk_right = channel_scores_gradient(dA_c, k_c, k_c, G_c, at_G, i, B, KP, DTYPE, PRECISION)
        if B < C:
            # The tile of dP and dA of later and earlier block, as [own, other].
            across = at_C + B * C + tl.where(s == 1, i[:, None] * C + i[None, :], i[None, :] * C + i[:, None])
            is_late = s.to(tl.float32)
            t_other = first + (1 - s) * B + i
            mask_other = (t_other < stop)[:, None] & (x < K)[None, :]
            at_other = (t_other * H + head_qk)[:, None] * K + x[None, :]
            own = tl.exp2(-tl.abs(G_c - G_border))
            other = tl.exp2(-tl.abs(tl.load(G + at_k + ((1 - s) * B + i[:, None]) * KP) - G_border))
            k_other = tl.load(k + at_other, mask=mask_other, other=0.0).to(tl.float32)
            q_other = tl.load(q + at_other, mask=mask_other, other=0.0).to(tl.float32)
            met = tl.where(s == 1, k_other, q_other) * other
            met = scale * own * matmul(tl.load(dP + across), met, DTYPE, PRECISION)
            dq_c += is_late * met
            dk_c += (1.0 - is_late) * met
            b_other = tl.load(beta + t_other * HV + h, mask=t_other < stop, other=0.0)[None, :]
            dA_across = tl.load(dA + across).to(tl.float32) * tl.where(s == 1, 1.0, b_other)
            met = own * matmul(dA_across, k_other * other, DTYPE, PRECISION)
            dk_left += is_late * met
            dk_right += (1.0 - is_late) * met
        start = tl.exp2(G_c)
        read = scale * start * tl.load(dQ_s + in_k).to(tl.float32)
        written = tl.exp2(tl.minimum(G_last - G_c, 0.0)) * tl.load(dK_e + in_k).to(tl.float32)
        since = q_c * (dq_c + read) - k_c * dk_c
        tl.store(dq + at, dq_c + diagonal * k_c + read, mask=mask)
        dk_c += diagonal * q_c + written
        dk_left += start * tl.load(dK_s + in_k).to(tl.float32)
        since += k_c * (b * dk_left - dk_right)
        dk_c += b * dk_left + dk_right
        db = tl.load(dbeta + row, mask=t < stop, other=0.0) + tl.sum(dk_left * k_c, 1)
        tl.store(dbeta + row, db, mask=t < stop)
        tl.store(dk + at, dk_c, mask=mask)
        dg_c = sum_where(i[:, None] <= i[None, :], since, DTYPE, PRECISION) + later + lasting
        dg_c += sum_where(i[:, None] > i[None, :], written * k_c, DTYPE, PRECISION)
        if B < C:
            early = tl.exp2(tl.minimum(G_last - tl.load(G + at_k + i[:, None] * KP), 0.0))
            early *= tl.load(dK_e + at_k + i[:, None] * KP).to(tl.float32) * tl.where(s == 1, k_other, 0.0)
            dg_c += tl.sum(early, 0)[None, :]
        tl.store(dg + at, dg_c, mask=mask)
        later += tl.sum(since, 0)[None, :]
