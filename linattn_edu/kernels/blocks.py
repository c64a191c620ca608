"""What the kernels share: whose tokens a program works on, products, decays of scalar gates, the inverse."""

import triton
import triton.language as tl


@triton.jit
def chunk_of_program(chunks, T, NT, HV, C: tl.constexpr, PACKED: tl.constexpr):
    """Chunk, value head, first token and end of the sequence; neighbouring programs are neighbouring heads in memory."""
    c = tl.program_id(0).to(tl.int64) // HV
    if PACKED:
        first = tl.load(chunks + 3 * c)
        stop = tl.load(chunks + 3 * c + 1)
    else:
        n = c // NT
        first = n * T + (c - n * NT) * C
        stop = (n + 1) * T
    return c, tl.program_id(0) % HV, first, stop


@triton.jit
def sequence_of_chunk(chunks, cu_seqlens, c, T, NT, PACKED: tl.constexpr):
    """The sequence of a chunk, and its first token."""
    if PACKED:
        n = tl.load(chunks + 3 * c + 2)
        start = tl.load(cu_seqlens + n)
    else:
        n = c // NT
        start = n * T
    return n, start


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
def decay_of_chunk(decay, tile, x, KP: tl.constexpr, GATE: tl.constexpr):
    """What a chunk leaves of the state that it starts from: one factor, or one a channel."""
    if GATE == "channel":
        return tl.load(decay + tile * KP + x)[None, :]
    elif GATE == "scalar":
        return tl.load(decay + tile)
    else:
        return 1.0


@triton.jit
def operand(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """x as a tensor core takes it: in DTYPE, and for a TF32 product rounded to 11 binary digits.

    The device would cut the others off, an error twice as large at worst and always towards zero, which sums add up.
    """
    x = x.to(DTYPE)
    if PRECISION == "tf32" and DTYPE == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # the sum would carry a NaN over into a number
    return x


@triton.jit
def matmul(a, b, DTYPE: tl.constexpr, PRECISION: tl.constexpr, acc=None):
    """a b, added to `acc` if given: operands rounded to DTYPE, summed in float32."""
    return tl.dot(operand(a, DTYPE, PRECISION), operand(b, DTYPE, PRECISION), acc, input_precision=PRECISION)


@triton.jit
def two_terms(x, DTYPE: tl.constexpr):
    """x as two terms of the same sign, with the 8 digits of bfloat16 each, or the 11 of TF32: no product rounds them."""
    kept: tl.constexpr = -65536 if DTYPE == tl.bfloat16 else -8192
    high = (x.to(tl.int32, bitcast=True) & kept).to(tl.float32, bitcast=True)
    return high.to(DTYPE), operand(x - high, DTYPE, "tf32")


@triton.jit
def sum_where(chosen, x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Row i is the sum of the rows j of `x` with chosen_ij: on tensor cores cheaper than a scan, and nothing cancels.

    Where products round their operands, x goes in `two_terms`; ones are exact.
    """
    ones = tl.where(chosen, 1.0, 0.0).to(DTYPE)
    if DTYPE == tl.bfloat16 or PRECISION == "tf32":
        high, low = two_terms(x, DTYPE)
        return tl.dot(ones, low, tl.dot(ones, high, input_precision=PRECISION), input_precision=PRECISION)
    else:
        return tl.dot(ones, x, input_precision=PRECISION)


@triton.jit
def sum_before(x, i):
    """x_1 + ... + x_{i-1} for every i: not as a running sum less x_i, which would take the digits of what is left."""
    return tl.sum(tl.where(i[:, None] > i[None, :], x[None, :], 0.0), 1)


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
    """True where i and j lie in the two blocks of 2^level tokens of one pair, whose numbers differ in the last bit."""
    block = i >> level
    return (block[:, None] ^ block[None, :]) == 1


@triton.jit
def unit_lower_inverse(A, i, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^{-1} for a strictly lower A [C, C] in float32.

    The inverse of [[X, 0], [Y, Z]] is [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]]. Blocks of one token are their own inverse; each
    level joins pairs of them. No power of A is formed: those grow far beyond their sum where keys are alike. Up to
    blocks of 16 tokens the diagonal alone counts, and its C / 16 tiles go through the levels as a batch.
    """
    tile = tl.arange(0, C // 16)
    own = tile[:, None, None, None] == tile[None, None, :, None]
    j = tl.arange(0, 16)
    D = tl.sum(tl.where(own, tl.reshape(A, [C // 16, 16, C // 16, 16]), 0.0), 2)
    X = tl.where((j[:, None] == j[None, :])[None], 1.0, 0.0) - tl.where(pairs(j, 0)[None], D, 0.0)
    for level in range(1, 4):
        Y = tl.where(pairs(j, level)[None], D, 0.0)
        X -= tl.dot(X, tl.dot(Y, X, input_precision=PRECISION), input_precision=PRECISION)
    M = tl.reshape(tl.where(own, X[:, :, None, :], 0.0), [C, C])
    for level in range(4, C.bit_length() - 1):
        Y = tl.where(pairs(i, level), A, 0.0)
        M -= tl.dot(M, tl.dot(Y, M, input_precision=PRECISION), input_precision=PRECISION)
    return M
