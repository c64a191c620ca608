r"""The backward pass of the delta rule in two launches, each the transpose of one in `delta_forward`.

Write dX for the gradient of the loss with respect to X. From the formulas of `delta_forward`, chunk by chunk from the last:

    (1) dV' = P^T dO + (end * K) dS'
    (2) dS  = Diag(decay) dS' + (scale * start * Q)^T dO - W^T dV'

These carry dS backwards through time and are all that must be sequential: `delta_inter_backward`. It keeps dV' and every
chunk's dS'. The rest, `delta_intra_backward`, reads the chunk as the system that V' solves, (I + A) V' = R with

    R = beta * (V - (start * K) S):    (3) dR = M^T dV',   dA = -tril(dR V'^T, -1)
    (4) dV = beta * dR,   dK_s = -(beta * dR) S^T,   dbeta = rowsum(dR * R) / beta

with K_s = start * K, so that neither W nor U nor the gradient of an inverse appears; and what else meets a state:

    (5) dP = tril(dO V'^T),   dQ_s = dO S^T,   dK_e = V' dS'^T,   ddecay = rowsum(S * dS')

The rest is the product rule through P, A, K_s, Q_s, K_e. A log-decay g_m enters the sum in D_ij for j < m <= i, in
start_i for i >= m, in end_i for i < m and in decay always; its gradient collects (value * gradient) of these.
Where value heads share q and k, each writes a gradient of its own and the caller adds them: no atomics, so that two
runs give the same bits.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import (
    chunk_of_program,
    decay_of_chunk,
    decay_matrix,
    decay_matrix_gradient,
    decay_vectors,
    matmul,
    sequence_of_chunk,
    sum_before,
    tokens_of_sequence,
)


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def delta_inter_backward(
    q_start, k_end, W, P, decay, do, dS_last, dv_new, dstates, dS_first, cu_seqlens, first_chunk, T, NT, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Equations 1 and 2: one program a sequence, value head and BV value channels, dS^T [BV, K] in registers.

    Bytes a token and head: reads 3 K + C for each of the V / BV programs, and V; writes V + K V / C.
    FLOPs: 6 K V + 2 C V.
    """
    n = tl.program_id(0).to(tl.int64) // HV
    h = tl.program_id(0) % HV
    first, stop, c, chunks = tokens_of_sequence(cu_seqlens, first_chunk, n, T, NT, C, PACKED)
    i = tl.arange(0, C)
    x = tl.arange(0, KP)
    y = tl.program_id(1) * BV + tl.arange(0, BV)
    in_P = i[:, None] * C + i[None, :]
    in_k = i[:, None] * KP + x[None, :]
    in_v = y[:, None] * C + i[None, :]
    in_o = y[:, None] + i[None, :] * (HV * V)
    in_states = y[:, None] * KP + x[None, :]
    at_state = (n * HV + h) * K * V + y[:, None] + x[None, :] * V
    mask_state = (y < V)[:, None] & (x < K)[None, :]
    dS = tl.zeros([BV, KP], tl.float32)
    if dS_last is not None:
        dS += tl.load(dS_last + at_state, mask=mask_state, other=0.0)
    first_c = c
    first += chunks * C
    c += chunks
    ahead = decay_of_chunk(decay, tl.maximum(c - 1, first_c) * HV + h, x, KP, GATE)
    for _ in range(chunks):
        first -= C
        c -= 1
        tile = c * HV + h
        if GATE != "none":
            kept, ahead = ahead, decay_of_chunk(decay, tl.maximum(c - 1, first_c) * HV + h, x, KP, GATE)
        dS_low = dS.to(DTYPE)
        tl.store(dstates + tile * VP * KP + in_states, dS_low)
        mask_o = (y < V)[:, None] & (i < stop - first)[None, :]
        do_c = tl.load(do + (first * HV + h) * V + in_o, mask=mask_o, other=0.0)
        dv_c = matmul(dS_low, tl.trans(tl.load(k_end + tile * C * KP + in_k)), DTYPE, PRECISION)
        dv_c += matmul(do_c, tl.load(P + tile * C * C + in_P), DTYPE, PRECISION)
        dv_low = dv_c.to(DTYPE)
        if GATE != "none":
            dS *= kept
        dS -= matmul(dv_low, tl.load(W + tile * C * KP + in_k), DTYPE, PRECISION)
        dS += matmul(do_c, tl.load(q_start + tile * C * KP + in_k), DTYPE, PRECISION)
        tl.store(dv_new + tile * VP * C + in_v, dv_low)
    if dS_first is not None:
        tl.store(dS_first + at_state, dS, mask=mask_state)


@triton.jit
def states_met(
    states, dstates, S_first, dS_last, tile, n, h, starts, ends, x, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """ddecay of the channels x of a chunk that starts or ends its sequence: with the state, or its gradient, as it was
    given. Those are float32; here, where nothing but their product counts, bfloat16 would be all of the error.
    """
    dd = tl.zeros(x.shape, tl.float32)
    for v0 in range(0, VP, BV):
        y = v0 + tl.arange(0, BV)
        in_states = tile * VP * KP + y[:, None] * KP + x[None, :]
        at_state = (n * HV + h) * K * V + y[:, None] + x[None, :] * V
        given = (y < V)[:, None] & (x < K)[None, :]
        S = tl.load(states + in_states).to(tl.float32)
        dS = tl.load(dstates + in_states).to(tl.float32)
        if S_first is not None:
            S = tl.load(S_first + at_state, mask=tl.where(starts, given, False), other=S)
        if dS_last is not None:
            dS = tl.load(dS_last + at_state, mask=tl.where(ends, given, False), other=dS)
        dd += tl.sum(S * dS, 0)
    return dd


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def delta_intra_backward(
    q, k, v, g, beta, P, M, decay, do, v_new, dv_new, states, dstates, S_first, dS_last, dP_out, dA_out, dQ_s, dK_e,
    dK_s, ddecay, dq, dk, dv, dg, dbeta, cu_seqlens, chunks, scale, T, NT, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Equations 3 to 5 and the product rule: one program a chunk and value head.

    With a channel gate the product rule is left to `channel_intra_backward`: dP, dA, dQ_s, dK_e, dK_s, ddecay are handed
    over, and in dbeta rowsum(dR * V).
    Bytes a token and head: reads 2 K + 4 V + C + 2 K V / C, writes 2 K + V, with a channel gate K + 2 C more and q, k
    not. FLOPs: 6 K V + 8 C V + 8 C K.
    """
    c, h, first, stop = chunk_of_program(chunks, T, NT, HV, C, PACKED)
    if first >= stop:
        return
    i = tl.arange(0, C)
    t = first + i
    real = t < stop
    row = t * HV + h
    row_qk = t * H + h // (HV // H)
    tile = c * HV + h
    in_C = tile * C * C + i[:, None] * C + i[None, :]
    if GATE != "none":
        n, start_n = sequence_of_chunk(chunks, cu_seqlens, c, T, NT, PACKED)
        starts, ends = first == start_n, first + C >= stop
    b = tl.load(beta + row, mask=real, other=0.0)[:, None]
    M_T = tl.trans(tl.load(M + in_C))
    dP = tl.zeros([C, C], tl.float32)
    dA = tl.zeros([C, C], tl.float32)
    db = tl.zeros([C], tl.float32)
    for v0 in range(0, VP, BV):
        y = v0 + tl.arange(0, BV)
        at_v = row[:, None] * V + y[None, :]
        mask_v = real[:, None] & (y < V)[None, :]
        in_v = tile * VP * C + y[:, None] * C + i[None, :]
        dR = matmul(M_T, tl.trans(tl.load(dv_new + in_v)), DTYPE, PRECISION)
        v_T = tl.load(v_new + in_v)
        dA -= matmul(dR, v_T, DTYPE, PRECISION)
        dP += matmul(tl.load(do + at_v, mask=mask_v, other=0.0), v_T, DTYPE, PRECISION)
        db += tl.sum(dR * tl.load(v + at_v, mask=mask_v, other=0.0).to(tl.float32), 1)
        tl.store(dv + at_v, b * dR, mask=mask_v)
    dP = tl.where(i[:, None] >= i[None, :], dP, 0.0)
    dA = tl.where(i[:, None] > i[None, :], dA, 0.0)
    if GATE == "channel":
        tl.store(dP_out + in_C, dP)
        tl.store(dA_out + in_C, dA)
    else:
        A = tl.zeros([C, C], tl.float32)
        for k0 in range(0, KP, BK):
            x = k0 + tl.arange(0, BK)
            mask = real[:, None] & (x < K)[None, :]
            k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
            A += matmul(k_x, tl.trans(k_x), DTYPE, PRECISION)
        if GATE == "scalar":
            g_c = tl.load(g + row, mask=real, other=0.0)
            start, end = decay_vectors(g_c, i)
            D = decay_matrix(g_c, i, DTYPE, PRECISION)
            A *= D
            dg_c = decay_matrix_gradient(dP * tl.load(P + in_C).to(tl.float32) + b * dA * A, i, DTYPE, PRECISION)
            dP *= D
            read = tl.zeros([C], tl.float32)
            written = tl.zeros([C], tl.float32)
            kept = tl.zeros([BK], tl.float32)
        db += tl.sum(dA * A, 1)
        dA *= b
        if GATE == "scalar":
            dA *= D
        dA = (dA + tl.trans(dA)).to(DTYPE)
        dP = (scale * dP).to(DTYPE)

    for k0 in range(0, KP, BK):
        x = k0 + tl.arange(0, BK)
        dq_x = tl.zeros([C, BK], tl.float32)
        dk_x = tl.zeros([C, BK], tl.float32)
        dk_s = tl.zeros([C, BK], tl.float32)
        dd = tl.zeros([BK], tl.float32)
        for v0 in range(0, VP, BV):
            y = v0 + tl.arange(0, BV)
            at_v = row[:, None] * V + y[None, :]
            in_v = tile * VP * C + y[:, None] * C + i[None, :]
            in_states = tile * VP * KP + y[:, None] * KP + x[None, :]
            S = tl.load(states + in_states)
            dS = tl.load(dstates + in_states)
            if GATE != "none":
                dd += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
            dk_x += matmul(tl.trans(tl.load(v_new + in_v)), dS, DTYPE, PRECISION)
            do_y = tl.load(do + at_v, mask=real[:, None] & (y < V)[None, :], other=0.0)
            dq_x += matmul(do_y, S, DTYPE, PRECISION)
            dR = matmul(M_T, tl.trans(tl.load(dv_new + in_v)), DTYPE, PRECISION)
            dk_s -= matmul(dR, S, DTYPE, PRECISION)
        if GATE != "none":
            if starts | ends:
                dd = states_met(states, dstates, S_first, dS_last, tile, n, h, starts, ends, x, HV, K, V, KP, VP, BV)
        if GATE == "channel":
            in_k = tile * C * KP + i[:, None] * KP + x[None, :]
            tl.store(dQ_s + in_k, dq_x)
            tl.store(dK_e + in_k, dk_x)
            tl.store(dK_s + in_k, dk_s)
            tl.store(ddecay + tile * KP + x, dd)
        else:
            at = row[:, None] * K + x[None, :]
            mask = real[:, None] & (x < K)[None, :]
            q_x = tl.load(q + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
            k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
            dq_x *= scale
            if GATE == "scalar":
                dq_x *= start
                dk_x *= end
                dk_s *= start
                read += tl.sum(dq_x * q_x.to(tl.float32) + b * dk_s * k_x.to(tl.float32), 1)
                written += tl.sum(dk_x * k_x.to(tl.float32), 1)
                kept += dd
            db += tl.sum(dk_s * k_x.to(tl.float32), 1)
            dk_x += b * dk_s
            dq_x += matmul(dP, k_x, DTYPE, PRECISION)
            dk_x += matmul(tl.trans(dP), q_x, DTYPE, PRECISION) + matmul(dA, k_x, DTYPE, PRECISION)
            tl.store(dq + at, dq_x, mask=mask)
            tl.store(dk + at, dk_x, mask=mask)
    if GATE == "scalar":
        dg_c += tl.cumsum(read, 0, reverse=True) + sum_before(written, i)
        dg_c += tl.sum(kept, 0) * tl.load(decay + tile)
        tl.store(dg + row, dg_c, mask=real)
    tl.store(dbeta + row, db, mask=real)
