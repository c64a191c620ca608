r"""The backward pass in three launches, each the transpose of a part of the forward pass.

Write dX for the gradient of the loss with respect to X. From the formulas of `forward`, chunk by chunk from the last:

    (1) dV' = P^T dO + (end * K) dS'
    (2) dS  = Diag(decay) dS' + (scale * start * Q)^T dO - W^T dV'

These two carry dS backwards through time and are all that must be sequential: `inter_backward`. It keeps dV' and every
chunk's dS'. Then, for all chunks at once, what meets a state (`state_backward`), X_s the decayed X:

    (3) dQ_s = dO S^T,   dK_e = V' dS'^T,   dW = -dV' S^T,   ddecay = rowsum(S * dS')

and what stays in the chunk (`intra_backward`):

    (4) dP = tril(dO V'^T)
    (5) W = M K_b, U = M V_b with K_b = beta * start * K, V_b = beta * V:   dK_b = M^T dW,   dV_b = M^T dV'
    (6) M = (I + A)^{-1}:   dA = -M^T (dW K_b^T + dV' V_b^T) M^T = -tril(dK_b W^T + dV_b U^T, -1)

(6) shows why W and U are kept: no gradient of the inverse is ever formed. The rest is the product rule through
P, A, K_b, V_b, Q_s, K_e. A log-decay g_m enters the sum in D_ij for j < m <= i, in start_i for i >= m, in end_i for
i < m and in decay always; its gradient collects (value * gradient) of these, and no difference of two large sums.
Where value heads share q and k, each writes a gradient of its own and the caller adds them: no atomics, so that two
runs give the same bits.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import (
    channel_decays_gradient,
    channel_decays,
    channel_scores_gradient,
    decay_matrix,
    decay_matrix_gradient,
    decay_vectors,
    matmul,
    tokens_of_chunk,
    tokens_of_sequence,
)


@triton.jit(do_not_specialize=["T", "NT", "HQ", "HV"])
def inter_backward(
    q, k, P, W, decay, do, dS_last, dv_new, dstates, dS_first, cu_seqlens, first_chunk, scale, T, NT, HQ, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Equations 1 and 2: one program a sequence, value head and BV value channels, dS [K, BV] in registers.

    Bytes a token and head: reads 2 K + C for each of the V / BV programs, with delta K more, and V; writes V + K V / C.
    FLOPs: 4 K V + 2 C V, with delta 2 K V more.
    """
    n = tl.program_id(0).to(tl.int64) // HV
    h = tl.program_id(0) % HV
    first, stop, c, chunks = tokens_of_sequence(cu_seqlens, first_chunk, n, T, NT, C, PACKED)
    first += chunks * C
    c += chunks
    i = tl.arange(0, C)
    x = tl.arange(0, KP)
    y = tl.program_id(1) * BV + tl.arange(0, BV)
    real_x = x < K
    real_y = (y < V)[None, :]
    at_state = x[:, None] * V + y[None, :]
    mask_state = real_x[:, None] & real_y
    dS = tl.zeros([KP, BV], tl.float32)
    if dS_last is not None:
        dS += tl.load(dS_last + (n * HV + h) * K * V + at_state, mask=mask_state, other=0.0)
    for _ in range(chunks):
        first -= C
        c -= 1
        t = first + i
        real = t < stop
        row = t * HV + h
        mask = real[:, None] & real_x[None, :]
        at_q = (t * HQ + h // (HV // HQ))[:, None] * K + x[None, :]
        at_v = row[:, None] * V + y[None, :]
        tl.store(dstates + (c * HV + h) * K * V + at_state, dS, mask=mask_state)
        do_c = tl.load(do + at_v, mask=real[:, None] & real_y, other=0.0)
        P_c = tl.load(P + row[:, None] * C + i[None, :], mask=real[:, None], other=0.0)
        k_c = tl.load(k + at_q, mask=mask, other=0.0)
        dv_c = matmul(tl.trans(P_c), do_c, DTYPE, PRECISION) + matmul(k_c, dS, DTYPE, PRECISION)
        tl.store(dv_new + at_v, dv_c, mask=real[:, None] & real_y)
        if GATE == "scalar":
            dS *= tl.load(decay + c * HV + h)
        if GATE == "channel":
            dS *= tl.load(decay + (c * HV + h) * K + x, mask=real_x, other=0.0)[:, None]
        q_c = tl.load(q + at_q, mask=mask, other=0.0)
        dS += scale * matmul(tl.trans(q_c), do_c, DTYPE, PRECISION)
        if DELTA:
            W_c = tl.load(W + row[:, None] * K + x[None, :], mask=mask, other=0.0)
            dS -= matmul(tl.trans(W_c), dv_c, DTYPE, PRECISION)
    if dS_first is not None:
        tl.store(dS_first + (n * HV + h) * K * V + at_state, dS, mask=mask_state)


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def state_backward(
    M, do, v_new, dv_new, states, dstates, dq_start, dk_end, dK_b, ddecay, chunks, T, NT, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Equation 3, and dK_b of 5: one program a chunk, value head and BK key channels.

    Bytes a token and head: reads 2 V for each of the K / BK programs, with delta V + C more, and 2 K V / C; writes 2 K,
    with delta K more. FLOPs: 4 K V, with delta 2 K V + 2 C K more.
    """
    c, first, stop = tokens_of_chunk(chunks, T, NT, C, PACKED)
    h = tl.program_id(1)
    if first >= stop:
        return
    i = tl.arange(0, C)
    t = first + i
    real = t < stop
    row = t * HV + h
    x = tl.program_id(2) * BK + tl.arange(0, BK)
    real_x = x < K
    dq = tl.zeros([C, BK], tl.float32)
    dk = tl.zeros([C, BK], tl.float32)
    dW = tl.zeros([C, BK], tl.float32)
    dd = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        y = v0 + tl.arange(0, BV)
        at_v = row[:, None] * V + y[None, :]
        mask_v = real[:, None] & (y < V)[None, :]
        at_state = (c * HV + h) * K * V + x[:, None] * V + y[None, :]
        mask_state = real_x[:, None] & (y < V)[None, :]
        S = tl.load(states + at_state, mask=mask_state, other=0.0)
        dS = tl.load(dstates + at_state, mask=mask_state, other=0.0)
        do_y = tl.load(do + at_v, mask=mask_v, other=0.0)
        v_y = tl.load(v_new + at_v, mask=mask_v, other=0.0)
        dq += matmul(do_y, tl.trans(S), DTYPE, PRECISION)
        dk += matmul(v_y, tl.trans(dS), DTYPE, PRECISION)
        if DELTA:
            dv_y = tl.load(dv_new + at_v, mask=mask_v, other=0.0)
            dW -= matmul(dv_y, tl.trans(S), DTYPE, PRECISION)
        if GATE != "none":
            dd += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    at = row[:, None] * K + x[None, :]
    mask = real[:, None] & real_x[None, :]
    tl.store(dq_start + at, dq, mask=mask)
    tl.store(dk_end + at, dk, mask=mask)
    if DELTA:
        M_c = tl.load(M + row[:, None] * C + i[None, :], mask=real[:, None], other=0.0)
        tl.store(dK_b + at, matmul(tl.trans(M_c), dW, DTYPE, PRECISION), mask=mask)
    if GATE != "none":
        tl.store(ddecay + (c * HV + h) * K + x, dd, mask=real_x)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def intra_backward(
    q, k, v, g, beta, P, M, W, U, do, v_new, dv_new, dq_start, dk_end, dK_b, ddecay,
    dq, dk, dv, dg, dbeta, chunks, scale, T, NT, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Equations 4 to 6 and the product rule down to the inputs: one program a chunk and value head.

    Bytes a token and head: reads 4 K + 2 V + C, with delta 3 K + 2 V + C more, with a channel gate K more; writes
    2 K, with delta V more, with a channel gate K more. FLOPs: 2 C V + 4 C K (times log2 C levels with a channel gate),
    with delta 4 C V + 6 C K more.
    """
    c, first, stop = tokens_of_chunk(chunks, T, NT, C, PACKED)
    h = tl.program_id(1)
    if first >= stop:
        return
    i = tl.arange(0, C)
    t = first + i
    real = t < stop
    row = t * HV + h
    row_qk = t * H + h // (HV // H)
    at_C = row[:, None] * C + i[None, :]
    dP = tl.zeros([C, C], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    db = tl.zeros([C], tl.float32)
    b = tl.full([C, 1], 1.0, tl.float32)
    if DELTA:
        b = tl.load(beta + row, mask=real, other=0.0)[:, None]
        M_T = tl.trans(tl.load(M + at_C, mask=real[:, None], other=0.0))
    for v0 in range(0, V, BV):
        y = v0 + tl.arange(0, BV)
        at_v = row[:, None] * V + y[None, :]
        mask_v = real[:, None] & (y < V)[None, :]
        do_y = tl.load(do + at_v, mask=mask_v, other=0.0)
        v_y = tl.load(v_new + at_v, mask=mask_v, other=0.0)
        dP += matmul(do_y, tl.trans(v_y), DTYPE, PRECISION)
        if DELTA:
            dV_b = matmul(M_T, tl.load(dv_new + at_v, mask=mask_v, other=0.0), DTYPE, PRECISION)
            tl.store(dv + at_v, b * dV_b, mask=mask_v)
            db += tl.sum(dV_b * tl.load(v + at_v, mask=mask_v, other=0.0).to(tl.float32), 1)
            dA -= matmul(dV_b, tl.trans(tl.load(U + at_v, mask=mask_v, other=0.0)), DTYPE, PRECISION)
    dP = tl.where(i[:, None] >= i[None, :], dP, 0.0)

    if DELTA:
        A = tl.zeros([C, C], tl.float32)
        for k0 in range(0, K, BK):
            x = k0 + tl.arange(0, BK)
            at = row[:, None] * K + x[None, :]
            mask = real[:, None] & (x < K)[None, :]
            dK_b_x = tl.load(dK_b + at, mask=mask, other=0.0)
            dA -= matmul(dK_b_x, tl.trans(tl.load(W + at, mask=mask, other=0.0)), DTYPE, PRECISION)
            if GATE == "scalar":
                k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
                A += matmul(k_x, tl.trans(k_x), DTYPE, PRECISION)
        dA = tl.where(i[:, None] > i[None, :], dA, 0.0)
    if GATE == "scalar":
        g_c = tl.load(g + row, mask=real, other=0.0)
        start, end = decay_vectors(g_c, i)
        D = decay_matrix(g_c, i, DTYPE, PRECISION)
        X = dP * tl.load(P + at_C, mask=real[:, None], other=0.0).to(tl.float32)
        dP *= D
        if DELTA:
            dA *= D
            X += b * dA * A
        dg_token = decay_matrix_gradient(X, i, DTYPE, PRECISION)
        read = tl.zeros([C], tl.float32)
        written = tl.zeros([C], tl.float32)
        kept = tl.zeros([BK], tl.float32)
    dP *= scale

    for k0 in range(0, K, BK):
        x = k0 + tl.arange(0, BK)
        at = row[:, None] * K + x[None, :]
        mask = real[:, None] & (x < K)[None, :]
        q_x = tl.load(q + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0).to(tl.float32)
        k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0).to(tl.float32)
        dq_x = scale * tl.load(dq_start + at, mask=mask, other=0.0).to(tl.float32)
        dk_x = tl.load(dk_end + at, mask=mask, other=0.0).to(tl.float32)
        if GATE == "channel":
            g_x = tl.load(g + at, mask=mask, other=0.0)
            start, end = channel_decays(g_x, i, C.bit_length() - 1, DTYPE, PRECISION)
        if GATE != "none":
            dq_x *= start
            dk_x *= end
            at_start = dq_x * q_x
            at_end = dk_x * k_x
        if DELTA:
            dk_W = tl.load(dK_b + at, mask=mask, other=0.0).to(tl.float32)
            if GATE != "none":
                dk_W *= start
                at_start += b * dk_W * k_x
            db += tl.sum(dk_W * k_x, 1)
            dk_x += b * dk_W
        if GATE == "channel":
            dq_P, dk_P, dk_i, dg_x = channel_scores_gradient(
                dP, dA, q_x, k_x, b, g_x, i, C, DELTA, DTYPE, PRECISION
            )
            kept_x = tl.load(ddecay + (c * HV + h) * K + x, mask=x < K, other=0.0) * tl.exp(tl.sum(g_x, 0))
            dg_x += channel_decays_gradient(at_start, at_end, i, C.bit_length() - 1, DTYPE, PRECISION) + kept_x[None, :]
            tl.store(dg + at, dg_x, mask=mask)
        else:
            dq_P = matmul(dP, k_x, DTYPE, PRECISION)
            dk_P = matmul(tl.trans(dP), q_x, DTYPE, PRECISION)
            if DELTA:
                dk_i = matmul(dA, k_x, DTYPE, PRECISION)
                dk_P += matmul(tl.trans(dA), b * k_x, DTYPE, PRECISION)
        if GATE == "scalar":
            read += tl.sum(at_start, 1)
            written += tl.sum(at_end, 1)
            kept += tl.load(ddecay + (c * HV + h) * K + x, mask=x < K, other=0.0)
        dq_x += dq_P
        dk_x += dk_P
        if DELTA:
            db += tl.sum(dk_i * k_x, 1)
            dk_x += b * dk_i
        tl.store(dq + at, dq_x, mask=mask)
        tl.store(dk + at, dk_x, mask=mask)
    if GATE == "scalar":
        dg_token += tl.cumsum(read, 0, reverse=True) + tl.cumsum(written, 0) - written
        dg_token += tl.sum(kept, 0) * tl.exp(tl.sum(g_c, 0))
        tl.store(dg + row, dg_token, mask=real)
    if DELTA:
        tl.store(dbeta + row, db, mask=real)
