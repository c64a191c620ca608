r"""Mamba's selective scan, forward and backward in one launch each.

    h_t = a_t h_{t-1} + w_t,   y_t = h_t C_t + D u_t,   a_t = exp(Delta_t A),   w_t = hold(Delta_t, A) B_t u_t

A program has one sequence and BD channels with all their N states, and walks through time L tokens at a time. Two steps
in a row are one step, (a', w') after (a, w) is (a' a, a' w + w'), so that the L states of a tile are an associative scan
of its L steps, and the first step takes the incoming state with it: w_1 + a_1 h. The decays and writes, D N numbers a
token, exist in registers alone; written are y and, for the backward pass, one state every L tokens.

Backward, with dh for the gradient of h_t: dh_t = dy_t C_t + a_{t+1} dh_{t+1} is the same scan against time. Its products
with what stood before a token need a_t h_{t-1}, which is not taken as h_t - w_t, a difference of like numbers, but
carried along as a third number of a step: what is left of the past, p' = a' w + p'. All gradients follow token by token:

    du = dh hold B + D dy,   dB = dh hold u,   dC = dy h,   dDelta = dh (p A + B u dhold/dDelta),   dA = dh (p Delta + B u dhold/dA)

Every program adds its channels' share of dB and dC to an array of its own, and PyTorch sums those: no atomics, so that
two runs give the same bits.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import Launch

MOST_N = 256
L = 16
"""Tokens a tile, and with it numbers of each array a thread: longer tiles spill, shorter ones keep more states."""


@triton.jit
def exp(x):
    """exp(x) = 2^n exp(r) with n the whole number nearest to x / ln 2, and exp(r), |r| < 0.35, by its series.

    Triton's own takes 2^(x / ln 2) from a table: |x| units in the last place, which T decays in a row multiply up.
    """
    x = tl.maximum(x, -1000.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = x - n * 0.693145751953125 - n * 1.4286068203094172e-6
    p = 1 + r * (1 / 5) * (1 + r * (1 / 6) * (1 + r * (1 / 7)))
    p = 1 + r * (1 + r * (1 / 2) * (1 + r * (1 / 3) * (1 + r * (1 / 4) * p)))
    return p * tl.exp2(n)


@triton.jit
def hold_of(d, A, a, ZOH: tl.constexpr):
    """hold, dhold/dDelta and dhold/dA: for Euler's step Delta, 1, 0; for the zero-order hold Delta f(x), a, Delta^2 f'(x).

    f(x) = (exp(x) - 1) / x at x = Delta A. Near 0 both f and f' cancel: there f' is its series, and f = exp(x) - x f'.
    """
    if ZOH:
        x = d * A
        near = tl.abs(x) < 1.0
        s = tl.where(near, x, 0.0)
        slope = 10 / 39916800 + s * (11 / 479001600)
        slope = 9 / 3628800 + s * slope
        slope = 8 / 362880 + s * slope
        slope = 7 / 40320 + s * slope
        slope = 6 / 5040 + s * slope
        slope = 5 / 720 + s * slope
        slope = 4 / 120 + s * slope
        slope = 3 / 24 + s * slope
        slope = 2 / 6 + s * slope
        slope = 1 / 2 + s * slope
        far = tl.where(near, 1.0, x)
        f = tl.where(near, a - x * slope, (a - 1) / far)
        slope = tl.where(near, slope, (a - f) / far)
        return d * f, a, d * d * slope
    else:
        return d, tl.full([1, 1, 1], 1.0, tl.float32), tl.zeros([1, 1, 1], tl.float32)


@triton.jit
def after(a1, w1, a2, w2):
    """Step 1, then step 2."""
    return a1 * a2, a2 * w1 + w2


@triton.jit
def after_with_past(a1, w1, p1, a2, w2, p2):
    """Step 1, then step 2, and what the second leaves of all before it."""
    return a1 * a2, a2 * w1 + w2, a2 * w1 + p2


@triton.jit
def row_of(tile, chosen):
    """The one row of a [L, BD, N] tile that is chosen."""
    return tl.sum(tl.where(chosen, tile, 0.0), 0)


@triton.jit(do_not_specialize=["T", "NT"])
def selective_scan(
    u, delta, A, B, C, skip, first, y, last, states, T, NT, D,
    N: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, NP: tl.constexpr, ZOH: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """One program a sequence and BD channels.

    Numbers a token: reads 2 D, and 2 N for each of the D / BD programs; writes D, with SAVE D N / L more. FLOPs: 8 D N
    and as many exponentials as D N; the zero-order hold adds 25 D N.
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, L)
    x = tl.program_id(1) * BD + tl.arange(0, BD)
    s = tl.arange(0, NP)
    at_state = x[:, None] * N + s[None, :]
    in_state = (x < D)[:, None] & (s < N)[None, :]
    A_x = tl.load(A + at_state, mask=in_state, other=0.0).to(tl.float32)[None, :, :]
    h = tl.zeros([BD, NP], tl.float32)
    if first is not None:
        h += tl.load(first + n * D * N + at_state, mask=in_state, other=0.0).to(tl.float32)
    if skip is not None:
        skip_x = tl.load(skip + x, mask=x < D, other=0.0).to(tl.float32)[None, :]
    for c in range(NT):
        t = c * L + i
        at_x = (n * T + t)[:, None] * D + x[None, :]
        in_x = (t < T)[:, None] & (x < D)[None, :]
        at_s = (n * T + t)[:, None] * N + s[None, :]
        in_s = (t < T)[:, None] & (s < N)[None, :]
        if SAVE:
            tl.store(states + (n * NT + c) * D * N + at_state, h, mask=in_state)
        u_t = tl.load(u + at_x, mask=in_x, other=0.0).to(tl.float32)
        d_t = tl.load(delta + at_x, mask=in_x, other=0.0).to(tl.float32)[:, :, None]
        B_t = tl.load(B + at_s, mask=in_s, other=0.0).to(tl.float32)
        C_t = tl.load(C + at_s, mask=in_s, other=0.0).to(tl.float32)
        a = exp(d_t * A_x)
        hold, _, _ = hold_of(d_t, A_x, a, ZOH)
        w = hold * (B_t[:, None, :] * u_t[:, :, None])
        w += tl.where((i == 0)[:, None, None], a * h[None, :, :], 0.0)
        _, hs = tl.associative_scan((a, w), 0, after)
        y_t = tl.sum(hs * C_t[:, None, :], 2)
        if skip is not None:
            y_t += skip_x * u_t
        tl.store(y + at_x, y_t, mask=in_x)
        h = row_of(hs, (i == L - 1)[:, None, None])
    tl.store(last + n * D * N + at_state, h, mask=in_state)


@triton.jit(do_not_specialize=["T", "NT"])
def selective_scan_backward(
    u, delta, A, B, C, skip, states, dy, dlast, du, ddelta, dA, dB, dC, dskip, dfirst, T, NT, D,
    N: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, NP: tl.constexpr, ZOH: tl.constexpr,
):  # fmt: skip
    """One program a sequence and BD channels, from the last tile to the first; dA and dskip are sums over its tokens.

    Numbers a token: reads 4 D, and 2 N for each of the D / BD programs, and D N / L; writes 2 D, and 2 N for each
    program. FLOPs: 30 D N and twice D N exponentials; the zero-order hold adds 25 D N.
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, L)
    x = tl.program_id(1) * BD + tl.arange(0, BD)
    s = tl.arange(0, NP)
    at_state = x[:, None] * N + s[None, :]
    in_state = (x < D)[:, None] & (s < N)[None, :]
    A_0 = tl.load(A + at_state, mask=in_state, other=0.0).to(tl.float32)
    A_x = A_0[None, :, :]
    dh_next = tl.zeros([BD, NP], tl.float32)
    if dlast is not None:
        dh_next += tl.load(dlast + n * D * N + at_state, mask=in_state, other=0.0)
    dA_x = tl.zeros([BD, NP], tl.float32)
    dskip_x = tl.zeros([BD], tl.float32)
    if skip is not None:
        skip_x = tl.load(skip + x, mask=x < D, other=0.0).to(tl.float32)[None, :]
    share = (n * tl.num_programs(1) + tl.program_id(1)) * T
    for j in range(NT):
        c = NT - 1 - j
        t = c * L + i
        at_x = (n * T + t)[:, None] * D + x[None, :]
        in_x = (t < T)[:, None] & (x < D)[None, :]
        at_s = (n * T + t)[:, None] * N + s[None, :]
        in_s = (t < T)[:, None] & (s < N)[None, :]
        u_t = tl.load(u + at_x, mask=in_x, other=0.0).to(tl.float32)
        d_t = tl.load(delta + at_x, mask=in_x, other=0.0).to(tl.float32)[:, :, None]
        B_t = tl.load(B + at_s, mask=in_s, other=0.0).to(tl.float32)[:, None, :]
        C_t = tl.load(C + at_s, mask=in_s, other=0.0).to(tl.float32)[:, None, :]
        dy_t = tl.load(dy + at_x, mask=in_x, other=0.0).to(tl.float32)
        h = tl.load(states + (n * NT + c) * D * N + at_state, mask=in_state, other=0.0)[None, :, :]

        a = exp(d_t * A_x)
        hold, dhold_ddelta, dhold_dA = hold_of(d_t, A_x, a, ZOH)
        Bu = B_t * u_t[:, :, None]
        past = tl.where((i == 0)[:, None, None], a * h, 0.0)
        _, hs, past = tl.associative_scan((a, hold * Bu + past, past), 0, after_with_past)
        tl.store(dC + share * N + t[:, None] * N + s[None, :], tl.sum(hs * dy_t[:, :, None], 1), mask=in_s)

        in_next = (t < T - 1)[:, None] & (x < D)[None, :]
        a_next = exp(tl.load(delta + at_x + D, mask=in_next, other=0.0).to(tl.float32)[:, :, None] * A_x)
        g = dy_t[:, :, None] * C_t + tl.where((i == L - 1)[:, None, None], a_next * dh_next[None, :, :], 0.0)
        _, dh = tl.associative_scan((a_next, g), 0, after, reverse=True)
        dh_next = row_of(dh, (i == 0)[:, None, None])

        tl.store(dB + share * N + t[:, None] * N + s[None, :], tl.sum(dh * hold * u_t[:, :, None], 1), mask=in_s)
        du_t = tl.sum(dh * hold * B_t, 2)
        if skip is not None:
            du_t += skip_x * dy_t
            dskip_x += tl.sum(dy_t * u_t, 0)
        tl.store(du + at_x, du_t, mask=in_x)
        tl.store(ddelta + at_x, tl.sum(dh * (past * A_x + Bu * dhold_ddelta), 2), mask=in_x)
        dA_x += tl.sum(dh * (past * d_t + Bu * dhold_dA), 0)
    tl.store(dA + n * D * N + at_state, dA_x, mask=in_state)
    if skip is not None:
        tl.store(dskip + n * D + x, dskip_x, mask=x < D)
    d_0 = tl.load(delta + n * T * D + x, mask=x < D, other=0.0).to(tl.float32)
    tl.store(dfirst + n * D * N + at_state, exp(d_0[:, None] * A_0) * dh_next, mask=in_state)


class Tiles(NamedTuple):
    BD: int
    NP: int
    warps: int


def tiles(D, N):
    """So many channels that a thread of at most 8 warps holds L numbers of each array."""
    NP = 1 << (N - 1).bit_length()
    BD = min(max(1, 256 // NP), 1 << (D - 1).bit_length())
    return Tiles(BD, NP, max(1, min(8, BD * NP // 32)))


@functools.lru_cache(maxsize=1024)
def prepared(kernel, device, batch, T, D, N, L, **switches):
    """The launch of one of the two kernels for all calls with inputs of these sizes."""
    BD, NP, warps = tiles(D, N)
    sizes = dict(T=T, NT=-(-T // L), D=D, N=N, L=L, BD=BD, NP=NP)
    return Launch(kernel, (batch, -(-D // BD)), **sizes, **switches, num_warps=warps, num_stages=1)


def run_forward(u, delta, A, B, C, skip, first, zoh, save, last=None, L=L):
    """y, the last state (in the memory of `last` if given), and with `save` one state every L tokens."""
    (batch, T, D), N = u.shape, A.shape[1]
    y = torch.empty_like(u)
    last = u.new_empty(batch, D, N, dtype=torch.float32) if last is None else last
    states = u.new_empty(batch, -(-T // L), D, N, dtype=torch.float32) if save else None
    with on_device(u):
        start = prepared(selective_scan, u.device, batch, T, D, N, L, ZOH=zoh, SAVE=save)
        start(u, delta, A, B, C, skip, first, y, last, states)
    return y, last, states


def run_backward(dy, dlast, u, delta, A, B, C, skip, states, zoh):
    """The gradients of u, delta, A, B, C, skip (None without one) and the first state."""
    (batch, T, D), N = u.shape, A.shape[1]
    blocks = -(-D // tiles(D, N).BD)
    make = u.new_empty
    du, ddelta = make(u.shape), make(u.shape, dtype=delta.dtype)
    dA, dfirst = (make(batch, D, N, dtype=torch.float32) for _ in range(2))
    dB, dC = (make(batch, blocks, T, N, dtype=torch.float32) for _ in range(2))
    dskip = None if skip is None else make(batch, D, dtype=torch.float32)
    with on_device(u):
        start = prepared(selective_scan_backward, u.device, batch, T, D, N, L, ZOH=zoh)
        start(u, delta, A, B, C, skip, states, dy, dlast, du, ddelta, dA, dB, dC, dskip, dfirst)
    dskip = None if skip is None else dskip.sum(0).to(skip.dtype)
    return du, ddelta, dA.sum(0).to(A.dtype), dB.sum(1).to(B.dtype), dC.sum(1).to(C.dtype), dskip, dfirst


class Scan(torch.autograd.Function):
    """y and the last state."""

    @staticmethod
    def forward(ctx, *args):
        *inputs, ctx.zoh = args
        y, last, states = run_forward(*inputs, ctx.zoh, True)
        ctx.save_for_backward(*inputs[:-1], states)
        ctx.has_first = inputs[-1] is not None
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dlast):
        u, *others, states = ctx.saved_tensors
        dy = torch.zeros_like(u) if dy is None else dy.contiguous()
        dlast = None if dlast is None else dlast.contiguous()
        *found, dfirst = run_backward(dy, dlast, u, *others, states, ctx.zoh)
        return *found, dfirst if ctx.has_first else None, None


def scan(u, delta, A, B, C, skip, first, zoh):
    """y and the last state, differentiable in every tensor."""
    inputs = [None if x is None else x.contiguous() for x in (u, delta, A, B, C, skip, first)]
    if torch.compiler.is_compiling():
        return scan_forward(*inputs, zoh)[:2]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return Scan.apply(*inputs, zoh)
    return run_forward(*inputs, zoh, False)[:2]


def token(u, delta, A, B, C, skip, state, zoh, inplace):
    """y [B, D] of one token, u [B, D], and the next state, with `inplace` where the old one is if it is float32 and close."""
    u, delta, B, C = (x[:, None] for x in (u, delta, B, C))
    if torch.compiler.is_compiling():
        y, last = scan(u, delta, A, B, C, skip, state.float(), zoh)
        return y[:, 0], last
    own = inplace and state.is_contiguous() and state.dtype == torch.float32
    inputs = [None if x is None else x.contiguous() for x in (u, delta, A, B, C, skip, state)]
    y, last, _ = run_forward(*inputs, zoh, False, last=state if own else None, L=1)
    if own and not state.is_inference():
        torch.autograd.graph.increment_version(state)
    return y[:, 0], last


@torch.library.custom_op("linattn_edu::scan_forward", mutates_args=())
def scan_forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None, first: Tensor | None, zoh: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states that the backward pass reads."""
    return run_forward(u, delta, A, B, C, skip, first, zoh, True)


@scan_forward.register_fake
def _(u, delta, A, B, C, skip, first, zoh):
    (batch, T, D), N = u.shape, A.shape[1]
    state = u.new_empty(batch, D, N, dtype=torch.float32)
    return torch.empty_like(u), state, u.new_empty(batch, -(-T // L), D, N, dtype=torch.float32)


@torch.library.custom_op("linattn_edu::scan_backward", mutates_args=())
def scan_backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None,
    states: Tensor, zoh: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of u, delta, A, B, C, of skip if it is there, and of the first state."""
    return [x for x in run_backward(dy, dlast, u, delta, A, B, C, skip, states, zoh) if x is not None]


@scan_backward.register_fake
def _(dy, dlast, u, delta, A, B, C, skip, states, zoh):
    given = [x for x in (u, delta, A, B, C, skip) if x is not None]
    return [*(torch.empty_like(x) for x in given), u.new_empty(u.shape[0], *A.shape, dtype=torch.float32)]


def _setup(ctx, inputs, output):
    *tensors, first, ctx.zoh = inputs
    ctx.has_first, ctx.has_skip = first is not None, tensors[-1] is not None
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dlast, dstates):
    u, *others, states = ctx.saved_tensors
    dy = torch.zeros_like(u) if dy is None else dy.contiguous()
    dlast = None if dlast is None else dlast.contiguous()
    *found, dfirst = scan_backward(dy, dlast, u, *others, states, ctx.zoh)
    return *found, *([] if ctx.has_skip else [None]), dfirst if ctx.has_first else None, None


scan_forward.register_autograd(_differentiate, setup_context=_setup)
