"""The forward pass in two launches: `intra`, all chunks at once, and `inter`, which carries the state through them.

In the letters of the variants' `intra`, for a chunk of C tokens that starts from the state S:

    P = scale tril(Q K^T * D)      A = tril(Diag(beta) K K^T * D, -1)      M = (I + A)^{-1}
    W = M (beta * start * K)       U = M (beta * V)                        V' = U - W S
    O = (scale * start * Q) S + P V'          S' = Diag(decay) S + (end * K)^T V'

D, start, end and decay are 1 without a gate, one number a token with a scalar gate, one a channel with a channel gate.
Without the delta rule V' = V, and A, M, W, U do not exist.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import (
    channel_decays,
    channel_scores,
    decay_matrix,
    decay_vectors,
    matmul,
    tokens_of_chunk,
    tokens_of_sequence,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def intra(
    q, k, v, g, beta, P, M, W, U, q_start, k_end, decay, chunks, scale, T, NT, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """One program a chunk and value head: P, and with the delta rule M, W, U, with a gate the decayed q and k.

    Bytes a token and head: reads 2 K + V inputs (k twice with the delta rule), writes C, with delta C + K + V more,
    with a gate 2 K more. FLOPs: 2 C K (4 C K with delta, times log2 C levels with a channel gate), then with delta
    4 C^2 log2 C for M and 2 C (K + V) for W and U.
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
    if GATE == "scalar":
        g_c = tl.load(g + row, mask=real, other=0.0)
        start, end = decay_vectors(g_c, i)
        tl.store(decay + c * HV + h, tl.exp(tl.sum(g_c, 0)))
    if DELTA:
        b = tl.load(beta + row, mask=real, other=0.0)[:, None]

    scores = tl.zeros([C, C], tl.float32)
    A = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):
        x = k0 + tl.arange(0, BK)
        mask = real[:, None] & (x < K)[None, :]
        q_x = tl.load(q + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0).to(tl.float32)
        k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0).to(tl.float32)
        if GATE == "channel":
            at = row[:, None] * K + x[None, :]
            g_x = tl.load(g + at, mask=mask, other=0.0)
            P_x, A_x = channel_scores(q_x, k_x, g_x, i, C, DELTA, DTYPE, PRECISION)
            scores += P_x
            A += A_x
            start, end = channel_decays(g_x, i, C.bit_length() - 1, DTYPE, PRECISION)
            tl.store(decay + (c * HV + h) * K + x, tl.exp(tl.sum(g_x, 0)), mask=x < K)
        else:
            scores += matmul(q_x, tl.trans(k_x), DTYPE, PRECISION)
            if DELTA:
                A += matmul(k_x, tl.trans(k_x), DTYPE, PRECISION)
        if GATE != "none":
            at = row[:, None] * K + x[None, :]
            tl.store(q_start + at, scale * start * q_x, mask=mask)
            tl.store(k_end + at, end * k_x, mask=mask)
    if GATE == "scalar":
        D = decay_matrix(g_c, i, DTYPE, PRECISION)
        scores *= D
        A *= D
    at_C = row[:, None] * C + i[None, :]
    tl.store(P + at_C, tl.where(i[:, None] >= i[None, :], scale * scores, 0.0), mask=real[:, None])

    if DELTA:
        inverse = unit_lower_inverse(tl.where(i[:, None] > i[None, :], b * A, 0.0), i, C, PRECISE)
        tl.store(M + at_C, inverse, mask=real[:, None])
        for k0 in range(0, K, BK):
            x = k0 + tl.arange(0, BK)
            mask = real[:, None] & (x < K)[None, :]
            k_x = b * tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0).to(tl.float32)
            at = row[:, None] * K + x[None, :]
            if GATE == "channel":
                start, end = channel_decays(tl.load(g + at, mask=mask, other=0.0), i, C.bit_length() - 1, DTYPE, PRECISION)
            if GATE != "none":
                k_x *= start
            tl.store(W + at, matmul(inverse, k_x, DTYPE, PRECISION), mask=mask)
        for v0 in range(0, V, BV):
            y = v0 + tl.arange(0, BV)
            at_v = row[:, None] * V + y[None, :]
            mask_v = real[:, None] & (y < V)[None, :]
            v_y = b * tl.load(v + at_v, mask=mask_v, other=0.0).to(tl.float32)
            tl.store(U + at_v, matmul(inverse, v_y, DTYPE, PRECISION), mask=mask_v)


@triton.jit(do_not_specialize=["T", "NT", "HQ", "HV"])
def inter(
    q, k, v, P, W, decay, S_first, o, v_new, states, S_last, cu_seqlens, first_chunk, scale, T, NT, HQ, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, value head and BV value channels: the state [K, BV] stays in registers, in float32.

    q and k are those of `intra`, decayed, or the inputs where there is no gate; v is U with the delta rule. `SAVE`
    keeps the state at the start of every chunk, and V', for the backward pass.
    Bytes a token and head: reads 2 K + C for each of the V / BV programs, with delta K more, and V; writes V. Saving
    adds K V / C, with delta V. FLOPs: 4 K V + 2 C V, with delta 2 K V more.
    """
    n = tl.program_id(0).to(tl.int64) // HV
    h = tl.program_id(0) % HV
    first, stop, c, chunks = tokens_of_sequence(cu_seqlens, first_chunk, n, T, NT, C, PACKED)
    i = tl.arange(0, C)
    x = tl.arange(0, KP)
    y = tl.program_id(1) * BV + tl.arange(0, BV)
    real_x = x < K
    real_y = (y < V)[None, :]
    at_state = x[:, None] * V + y[None, :]
    mask_state = real_x[:, None] & real_y
    S = tl.zeros([KP, BV], tl.float32)
    if S_first is not None:
        S += tl.load(S_first + (n * HV + h) * K * V + at_state, mask=mask_state, other=0.0)
    for _ in range(chunks):
        t = first + i
        real = t < stop
        row = t * HV + h
        mask = real[:, None] & real_x[None, :]
        at_q = (t * HQ + h // (HV // HQ))[:, None] * K + x[None, :]
        at_v = row[:, None] * V + y[None, :]
        if SAVE:
            tl.store(states + (c * HV + h) * K * V + at_state, S, mask=mask_state)
        v_c = tl.load(v + at_v, mask=real[:, None] & real_y, other=0.0).to(tl.float32)
        if DELTA:
            W_c = tl.load(W + row[:, None] * K + x[None, :], mask=mask, other=0.0)
            v_c -= matmul(W_c, S, DTYPE, PRECISION)
            if SAVE:
                tl.store(v_new + at_v, v_c, mask=real[:, None] & real_y)
        q_c = tl.load(q + at_q, mask=mask, other=0.0)
        P_c = tl.load(P + row[:, None] * C + i[None, :], mask=real[:, None], other=0.0)
        o_c = scale * matmul(q_c, S, DTYPE, PRECISION) + matmul(P_c, v_c, DTYPE, PRECISION)
        tl.store(o + at_v, o_c, mask=real[:, None] & real_y)
        if GATE == "scalar":
            S *= tl.load(decay + c * HV + h)
        if GATE == "channel":
            S *= tl.load(decay + (c * HV + h) * K + x, mask=real_x, other=0.0)[:, None]
        k_c = tl.load(k + at_q, mask=mask, other=0.0)
        S += matmul(tl.trans(k_c), v_c, DTYPE, PRECISION)
        first += C
        c += 1
    if S_last is not None:
        tl.store(S_last + (n * HV + h) * K * V + at_state, S, mask=mask_state)
