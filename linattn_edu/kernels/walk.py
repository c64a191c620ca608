r"""Linear attention with and without decay: one kernel for the forward pass and for all three gradients.

In a chunk of C tokens that starts from the state S, with D_ij = exp(g_{j+1} + ... + g_i) for j <= i, else 0:

    O = (Q K^T * D) V + Diag(start) Q S          S' = decay S + K^T Diag(end) V                                     (1)

start_i = exp(g_1 + ... + g_i), end_i = exp(g_{i+1} + ... + g_C), decay = start_C. The gradients are the same formula
with other letters: a gradient of the state, dS, comes from the future as S comes from the past,

    dQ = (dO V^T * D) K + Diag(start) dO S^T     S'^T = decay S^T + V^T Diag(end) K                                 (2)
    dK = (V dO^T * D^T) Q + Diag(end) V dS^T     dS^T = decay dS'^T + dO^T Diag(start) Q                            (3)
    dV = (K Q^T * D^T) dO + Diag(end) K dS       dS = decay dS' + Q^T Diag(start) dO                                (4)

so that `walk` serves all: A, B, C of a call are Q, K, V in (1), dO, V, K in (2) and, chunks taken from the last to the
first, V, dO, Q in (3) and K, Q, dO in (4). The state stays in registers; scores and states never reach the memory.

Few long sequences leave most of the device idle. Their tokens are then cut into segments that walk side by side: a walk
without outputs finds what each segment adds to a state of zero, `carry` sums that up to the state each starts from.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.blocks import matmul, sum_before, sum_where

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tokens_of_segment(table, s, T, L, NS, PACKED: tl.constexpr):
    """First token and end of the segment s, at most L tokens of one of the sequences, which lie one after another."""
    if PACKED:
        first = tl.load(table + 3 * s)
        stop = tl.load(table + 3 * s + 1)
    else:
        n = s // NS
        first = n * T + (s - n * NS) * L
        stop = (n + 1) * T
    return first, tl.minimum(stop, first + L)


@triton.jit
def running_sums(g, DIGITS: tl.constexpr):
    """G_i = g_1 + ... + g_i in whole multiples of 2^-DIGITS: the difference of two is the exact sum of what lies between.

    float32 sums would lose the weak gates after a strong one. Below -104 the factor exp(g) is 0 in float32, which bounds
    the sums: with C tokens a chunk, 24 - log2 C digits fit into 32 bits.
    """
    whole = tl.maximum(g, -104.0) * (1 << DIGITS) - 0.5  # rounds, as g is not positive
    return tl.cumsum(whole.to(tl.int32 if DIGITS < 24 else tl.int64), 0)


@triton.jit
def decay_matrix(G_i, G_j, allowed, unit):
    """exp(G_i - G_j) where `allowed`, else 0: masked before the exponential."""
    return tl.exp2(tl.where(allowed, (G_i[:, None] - G_j[None, :]).to(tl.float32) * unit, -float("inf")))


@triton.jit(do_not_specialize=["S_x", "S_y", "T", "L", "NS", "tokens", "HX", "HY", "HV"])
def walk(
    a, b, c, g, P, o, S_first, S_last, lost, states, kept, e, sums, table, scale, unit, S_x, S_y, T, L, NS, tokens,
    HX, HY, HV, X: tl.constexpr, Y: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, BY: tl.constexpr,
    GATE: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """Equations 1 to 4 for a, b [tokens, HX, X], c [tokens, HY, Y], o [X / BX, tokens, HV, Y], to be summed over X / BX.

    One program a segment, value head, BY channels of c and BX channels of a and b, with BX x BY of the state in
    registers. S_first is [K, V], here with strides S_x and S_y, and like S_last `unit` times what is carried. Without
    o only the states are found, and the decay of each segment, `lost`. For the gradient of gates a walk forward leaves
    the `states` that chunks start from, a walk back their products with its own, `kept`; `sums` [blocks, tokens, HV]
    are e^T times what o owes to S. With a gate for each channel `channel` has made the scores P, put the decays into
    the operands, and g is the decay of each chunk, of the channels Y if TRANSPOSED, else X. A float32 `a` keeps more
    digits in its products than DTYPE, 11: it is dO beside a normaliser, whose gradient takes most of the others' away.

    Bytes a token and head: reads 2 X for each of the Y / BY programs and Y for each of the X / BX; writes Y.
    FLOPs: 4 X Y + 2 C (X + Y).
    """
    s = tl.program_id(0).to(tl.int64) // HV
    h = tl.program_id(0) % HV
    first, stop = tokens_of_segment(table, s, T, L, NS, PACKED)
    chunks = tl.cdiv(tl.maximum(stop - first, 0), C).to(tl.int32)
    i = tl.arange(0, C)
    x = tl.program_id(2) * BX + tl.arange(0, BX)
    y = tl.program_id(1) * BY + tl.arange(0, BY)
    real_x = (x < X)[None, :]
    real_y = (y < Y)[None, :]
    h_x = h // (HV // HX)
    h_y = h // (HV // HY)
    at_x = i[:, None] * (HX * X) + x[None, :]
    at_y = i[:, None] * (HY * Y) + y[None, :]
    at_o = i[:, None] * (HV * Y) + y[None, :]
    at_S = x[:, None] * Y + y[None, :]
    mask_S = (x < X)[:, None] & real_y
    split = tl.program_id(2).to(tl.int64)
    allowed = i[:, None] <= i[None, :] if REVERSE else i[:, None] >= i[None, :]

    S = tl.zeros([BX, BY], tl.float32)
    if S_first is not None:
        at_first = (s * HV + h) * X * Y + x[:, None] * S_x + y[None, :] * S_y
        S += tl.load(S_first + at_first, mask=mask_S, other=0.0) / unit
    unit_G = LOG2_E / (1 << DIGITS)
    total = tl.full([BX], 1.0, tl.float32)
    for n in range(chunks):
        m = chunks - 1 - n if REVERSE else n
        t = first + m * C
        real = (i < stop - t)[:, None]
        chunk = (s * (L // C) + m) * HV + h
        b_c = tl.load(b + (t * HX + h_x) * X + at_x, mask=real & real_x, other=0.0).to(DTYPE)
        c_c = tl.load(c + (t * HY + h_y) * Y + at_y, mask=real & real_y, other=0.0)
        if GATE == "scalar":
            G = running_sums(tl.load(g + (t + i) * HV + h, mask=i < stop - t, other=0.0), DIGITS)
            G_C = tl.min(G, 0)
            decay = tl.exp2(G_C.to(tl.float32) * unit_G)
            start = tl.exp2(G.to(tl.float32) * unit_G)[:, None]
            end = tl.exp2((G_C - G).to(tl.float32) * unit_G)[:, None]
        if GATE == "channel":
            channel = y if TRANSPOSED else x
            K: tl.constexpr = Y if TRANSPOSED else X
            decay = tl.load(g + chunk * K + channel, mask=channel < K, other=0.0)
        if states is not None:
            at_chunk = states + chunk * X * Y + at_S
            if REVERSE:
                met = unit * S * tl.load(at_chunk, mask=mask_S, other=0.0).to(tl.float32)
                at = (split * tl.num_programs(0) * (L // C) + chunk) * Y + y
                tl.store(kept + at, tl.sum(met, 0), mask=y < Y)
            else:
                tl.store(at_chunk, S, mask=mask_S)
        if o is not None:
            a_c = tl.load(a + (t * HX + h_x) * X + at_x, mask=real & real_x, other=0.0)
            OWN: tl.constexpr = tl.float32 if a_c.dtype == tl.float32 else DTYPE
            o_c = matmul(a_c, S, OWN, PRECISION)
            if GATE == "scalar":
                o_c *= end if REVERSE else start
            if e is not None:
                e_c = tl.load(e + (t * HY + h_y) * Y + at_y, mask=real & real_y, other=0.0)
                at_token = ((split * tl.num_programs(1) + tl.program_id(1)) * tokens + t + i) * HV + h
                tl.store(sums + at_token, scale * tl.sum(e_c * o_c, 1), mask=i < stop - t)
            if GATE != "channel":
                A = matmul(a_c, tl.trans(b_c), OWN, PRECISION)
                if GATE == "scalar":
                    A *= decay_matrix(-G, -G, allowed, unit_G) if REVERSE else decay_matrix(G, G, allowed, unit_G)
                else:
                    A = tl.where(allowed, A, 0.0)
            elif P is not None:
                at_P = ((t + i) * HV + h)[:, None] * C + i[None, :]
                A = tl.where(split == 0, tl.load(P + at_P, mask=real, other=0.0), 0.0)
                A = tl.trans(A) if REVERSE else A
            if GATE != "channel" or P is not None:
                o_c = matmul(A, c_c, DTYPE, PRECISION, o_c)
            tl.store(o + ((split * tokens + t) * HV + h) * Y + at_o, scale * o_c, mask=real & real_y)
        if GATE == "scalar":
            S *= decay
            total *= decay
            c_c = (start if REVERSE else end) * c_c
        if GATE == "channel":
            S *= decay[None, :] if TRANSPOSED else decay[:, None]
            if not TRANSPOSED:
                total *= decay
        S = matmul(tl.trans(b_c), c_c, DTYPE, PRECISION, S)
    if S_last is not None:
        tl.store(S_last + (s * HV + h) * X * Y + at_S, unit * S, mask=mask_S)
    if lost is not None:
        tl.store(lost + (s * HV + h) * X + x, total, mask=x < X)


@triton.jit(do_not_specialize=["NS", "HV"])
def carry(
    S, lost, S_0, S_end, first_segment, NS, HV,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """What each segment adds, S [segments, HV, K, V], becomes the state that it starts from; S_end comes after the last.

    One program a sequence, value head and BLOCK entries of the state. Bytes a segment and head: 8 K V. FLOPs: 2 K V.
    """
    n = tl.program_id(0).to(tl.int64) // HV
    h = tl.program_id(0) % HV
    if PACKED:
        s = tl.load(first_segment + n)
        count = (tl.load(first_segment + n + 1) - s).to(tl.int32)
    else:
        s = n * NS
        count = NS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < K * V
    carried = tl.zeros([BLOCK], tl.float32)
    if S_0 is not None:
        carried += tl.load(S_0 + (n * HV + h) * K * V + at, mask=mask, other=0.0)
    for j in range(count):
        row = (s + (count - 1 - j if REVERSE else j)) * HV + h
        added = tl.load(S + row * K * V + at, mask=mask, other=0.0)
        tl.store(S + row * K * V + at, carried, mask=mask)
        if GATE != "none":
            carried *= tl.load(lost + row * K + at // V, mask=mask, other=0.0)
        carried += added
    if S_end is not None:
        tl.store(S_end + (n * HV + h) * K * V + at, carried, mask=mask)


@triton.jit(do_not_specialize=["T", "L", "NS", "tokens", "H", "HV", "blocks", "splits"])
def gate_gradient(
    q, k, v, do, g, read, written, kept, dg, table, scale, T, L, NS, tokens, H, HV, blocks, splits,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, DIGITS: tl.constexpr,
):  # fmt: skip
    """dg of a gate a token: g_m is in D_ij for j < m <= i, in start_i for i >= m, in end_i for i < m, always in decay.

    Collected are those (value * gradient): no difference of two large sums is formed. One program a chunk and value
    head. Bytes a token and head: reads 2 K + 2 V. FLOPs: 2 C (K + V + 2 C).
    """
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    s = chunk // (L // C)
    first, stop = tokens_of_segment(table, s, T, L, NS, PACKED)
    first += (chunk - s * (L // C)) * C
    if first >= stop:
        return
    i = tl.arange(0, C)
    real = i < stop - first
    row = (first + i) * HV + h
    row_qk = (first + i) * H + h // (HV // H)
    P = tl.zeros([C, C], tl.float32)
    dP = tl.zeros([C, C], tl.float32)
    lasting = tl.zeros([BK], tl.float32)
    for k0 in range(0, K, BK):
        x = k0 + tl.arange(0, BK)
        mask = real[:, None] & (x < K)[None, :]
        q_x = tl.load(q + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
        k_x = tl.load(k + row_qk[:, None] * K + x[None, :], mask=mask, other=0.0)
        P = matmul(q_x, tl.trans(k_x), DTYPE, PRECISION, P)
        for z in range(splits):
            at = kept + ((z * tl.num_programs(0) + chunk) * HV + h) * K + x
            lasting += tl.load(at, mask=x < K, other=0.0)
    for v0 in range(0, V, BV):
        y = v0 + tl.arange(0, BV)
        mask = real[:, None] & (y < V)[None, :]
        do_y = tl.load(do + row[:, None] * V + y[None, :], mask=mask, other=0.0)
        v_y = tl.load(v + row[:, None] * V + y[None, :], mask=mask, other=0.0)
        dP = matmul(do_y, tl.trans(v_y), DTYPE, PRECISION, dP)
    starts = tl.zeros([C], tl.float32)
    ends = tl.zeros([C], tl.float32)
    for z in range(blocks):
        starts += tl.load(read + z * tokens * HV + row, mask=real, other=0.0)
        ends += tl.load(written + z * tokens * HV + row, mask=real, other=0.0)
    G = running_sums(tl.load(g + row, mask=real, other=0.0), DIGITS)
    unit_G = LOG2_E / (1 << DIGITS)
    X = scale * P * dP * decay_matrix(G, G, i[:, None] >= i[None, :], unit_G)
    reach = sum_where(i[:, None] <= i[None, :], X, DTYPE, PRECISION)
    dg_c = tl.sum(tl.where(i[:, None] > i[None, :], reach, 0.0), 1)
    dg_c += tl.sum(lasting, 0) * tl.exp2(tl.min(G, 0).to(tl.float32) * unit_G)
    dg_c += tl.cumsum(starts, 0, reverse=True) + sum_before(ends, i)
    tl.store(dg + row, dg_c, mask=real)
