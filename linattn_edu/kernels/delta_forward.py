r"""The forward pass of the delta rule in two launches: `delta_intra`, all chunks at once, and `delta_inter`, which
carries the state through them.

In the letters of the variants' `intra`, for a chunk of C tokens that starts from the state S:

    P = scale tril(Q K^T * D)      A = tril(Diag(beta) K K^T * D, -1)      M = (I + A)^{-1}
    W = M (beta * start * K)       U = M (beta * V)                        V' = U - W S
    O = (scale * start * Q) S + P V'          S' = Diag(decay) S + (end * K)^T V'

D, start, end and decay are 1 without a gate, one number a token with a scalar gate, one a channel with a channel gate.

Between the launches everything lies chunk by chunk, [chunks, HV, C, KP] and the like, filled up with zeros: what the
sequential kernel reads is contiguous, needs no mask, and has addresses that are one number plus constants.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import (
    chunk_of_program,
    decay_of_chunk,
    decay_matrix,
    decay_vectors,
    matmul,
    tokens_of_sequence,
    unit_lower_inverse,
)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def delta_intra(
    q, k, v, g, beta, A, P, M, W, U, q_start, k_end, decay, chunks, scale, T, NT, H, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """One program a chunk and value head: P, W, U^T, the decayed q and k, decay; `SAVE` keeps M for the backward pass.

    With a channel gate `channel_intra` has left A, start * k in the place of W, and all but U and M.
    Bytes a token and head: reads 2 K + V and writes C + 3 K + V, with a channel gate K + V, the float32 A and K + V; to
    save C more. FLOPs: 4 C K for the scores, 2 C (K + V) for W and U, 4 C^2 log2 (C / 16) for M.
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
    if GATE == "scalar":
        g_c = tl.load(g + row, mask=real, other=0.0)
        start, end = decay_vectors(g_c, i)
        tl.store(decay + tile, tl.exp(tl.sum(g_c, 0)))
    if GATE == "channel":
        A_c = tl.load(A + in_C)
    else:
        P_c = tl.zeros([C, C], tl.float32)
        A_c = tl.zeros([C, C], tl.float32)
        for k0 in range(0, KP, BK):
            x = k0 + tl.arange(0, BK)
            mask = real[:, None] & (x < K)[None, :]
            in_k = tile * C * KP + i[:, None] * KP + x[None, :]
            q_x = tl.load(q + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
            k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
            P_c += matmul(q_x, tl.trans(k_x), DTYPE, PRECISION)
            A_c += matmul(k_x, tl.trans(k_x), DTYPE, PRECISION)
            if GATE == "scalar":
                tl.store(q_start + in_k, scale * start * q_x)
                tl.store(k_end + in_k, end * k_x)
            else:
                tl.store(q_start + in_k, scale * q_x)
                tl.store(k_end + in_k, k_x)
        if GATE == "scalar":
            D = decay_matrix(g_c, i, DTYPE, PRECISION)
            P_c *= D
            A_c *= D
        tl.store(P + in_C, tl.where(i[:, None] >= i[None, :], scale * P_c, 0.0))

    b = tl.load(beta + row, mask=real, other=0.0)
    M_c = unit_lower_inverse(b[:, None] * tl.where(i[:, None] > i[None, :], A_c, 0.0), i, C, PRECISE)
    if SAVE:
        tl.store(M + in_C, M_c)
    M_c *= b[None, :]
    M_T = tl.trans(M_c).to(DTYPE)
    for v0 in range(0, VP, BV):
        y = v0 + tl.arange(0, BV)
        v_y = tl.load(v + row[:, None] * V + y[None, :], mask=real[:, None] & (y < V)[None, :], other=0.0)
        tl.store(U + tile * VP * C + y[:, None] * C + i[None, :], matmul(tl.trans(v_y), M_T, DTYPE, PRECISION))
    if GATE == "scalar":
        M_c *= tl.trans(start)
    for k0 in range(0, KP, BK):
        x = k0 + tl.arange(0, BK)
        in_k = tile * C * KP + i[:, None] * KP + x[None, :]
        if GATE == "channel":
            k_x = tl.load(W + in_k)  # start * k, which W replaces
        else:
            mask = real[:, None] & (x < K)[None, :]
            k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
        tl.store(W + in_k, matmul(M_c, k_x, DTYPE, PRECISION))


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def delta_inter(
    q_start, k_end, W, U, P, decay, S_first, o, states, S_last, cu_seqlens, first_chunk, T, NT, HV,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr, SAVE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a sequence, value head and BV value channels: the state stays in registers, in float32.

    It is carried as S^T [BV, K]: a tile in registers can be the left operand of a product, so that neither the state nor
    V'^T has to move on its way into the next one. `SAVE` keeps the state at the start of every chunk, as [V, K], and
    puts V'^T in the place of U^T.
    Bytes a token and head: reads 3 K + C for each of the V / BV programs, and V; writes V. Saving adds K V / C + V.
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
    S = tl.zeros([BV, KP], tl.float32)
    if S_first is not None:
        S += tl.load(S_first + at_state, mask=mask_state, other=0.0)
    end_c = c + chunks
    ahead = decay_of_chunk(decay, c * HV + h, x, KP, GATE)  # one chunk ahead: the chain never waits for it
    for _ in range(chunks):
        tile = c * HV + h
        if GATE != "none":
            kept, ahead = ahead, decay_of_chunk(decay, tl.minimum(c + 1, end_c - 1) * HV + h, x, KP, GATE)
        S_low = S.to(DTYPE)
        if SAVE:
            tl.store(states + tile * VP * KP + in_states, S_low)
        v_c = tl.load(U + tile * VP * C + in_v).to(tl.float32)
        v_c -= matmul(S_low, tl.trans(tl.load(W + tile * C * KP + in_k)), DTYPE, PRECISION)
        v_low = v_c.to(DTYPE)
        if GATE != "none":
            S *= kept
        S += matmul(v_low, tl.load(k_end + tile * C * KP + in_k), DTYPE, PRECISION)
        o_c = matmul(S_low, tl.trans(tl.load(q_start + tile * C * KP + in_k)), DTYPE, PRECISION)
        o_c += matmul(v_low, tl.trans(tl.load(P + tile * C * C + in_P)), DTYPE, PRECISION)
        if SAVE:
            tl.store(U + tile * VP * C + in_v, v_low)
        tl.store(o + (first * HV + h) * V + in_o, o_c, mask=(y < V)[:, None] & (i < stop - first)[None, :])
        first += C
        c += 1
    if S_last is not None:
        tl.store(S_last + at_state, S, mask=mask_state)
