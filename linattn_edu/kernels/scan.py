r"""Mamba's selective scan, forward and backward in one launch each.

    h_t = a_t h_{t-1} + w_t,   y_t = h_t C_t + D u_t,   a_t = exp(Delta_t A),   w_t = hold(Delta_t, A) B_t u_t

A program has one sequence and BD channels with all their N states, and walks through time L tokens at a time. Two steps
in a row are one step, (a', w') after (a, w) is (a' a, a' w + w'), so that the L states of a tile are an associative scan
of its L steps, and the first step takes the incoming state with it: w_1 + a_1 h. The decays and writes, D N numbers a
token, exist in registers alone; written are y and, for the backward pass, one state every L tokens.

Backward, with dh for the gradient of h_t and e = a_t dh for that of h_{t-1} through it: dh_t = dy_t C_t + e_{t+1}, so
that e_t = a_t e_{t+1} + a_t dy_t C_t is the same scan against time. Both are read before a step as well as after it:
h_{t-1} beside h_t, e_{t+1} beside e_t. With p = h_{t-1} all gradients follow token by token:

    du = dh hold B + D dy,   dB = dh hold u,   dC = dy h
    dDelta = e p A + dh B u dhold/dDelta,   dA = e p Delta + dh B u dhold/dA

Every program adds its channels' share of dB and dC to an array of its own, and PyTorch sums those: no atomics, so that
two runs give the same bits.
"""

import functools
from typing import List  # noqa: UP035, as in `op`

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.config import multiprocessors
from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import Launch, first_derivatives

MOST_N = 256
L = 16
"""Tokens a tile: longer tiles spill, shorter ones keep more states."""


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
def after_and_before(a1, w1, b1, p1, a2, w2, b2, p2):
    """Step 1, then step 2, and as b, p what turns all that came before into the state between the two."""
    return a1 * a2, a2 * w1 + w2, a1 * b2, b2 * w1 + p2


@triton.jit
def scanned(a, w, incoming, first):
    """The states after and before each step of a tile, the incoming one before its first."""
    w += tl.where(first, a * incoming, 0.0)
    before = tl.where(first, incoming, 0.0)
    _, w, _, before = tl.associative_scan((a, w, tl.full(a.shape, 1.0, tl.float32), before), 0, after_and_before)
    return w, before


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


@triton.jit(do_not_specialize=["T", "NT", "groups"])
def selective_scan_backward(
    u, delta, A, B, C, skip, states, dy, du, ddelta, dA, dB, dC, dskip, e, T, NT, D, groups,
    N: tl.constexpr, L: tl.constexpr, BD: tl.constexpr, NP: tl.constexpr, ZOH: tl.constexpr,
):  # fmt: skip
    """One program a sequence and `groups` of BD channels, from the last tile to the first, in each all groups in turn.

    What a group carries from tile to tile lies in memory: e, the gradient of the last state at first and of the first one
    in the end, dA and dskip, which start from 0.
    Numbers a token: reads 3 D, and 2 N for each of the D / (BD groups) programs, and 4 D N / L; writes 2 D, and 2 N for
    each program, and 2 D N / L. FLOPs: 28 D N and as many exponentials as D N; the zero-order hold adds 25 D N.
    """
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, L)
    s = tl.arange(0, NP)
    share = (n * tl.num_programs(1) + tl.program_id(1)) * T * N
    first, last = (i == 0)[:, None, None], (i == L - 1)[:, None, None]
    for j in range(NT):
        c = NT - 1 - j
        t = c * L + i
        at_s = t[:, None] * N + s[None, :]
        in_s = (t < T)[:, None] & (s < N)[None, :]
        B_t = tl.load(B + n * T * N + at_s, mask=in_s, other=0.0).to(tl.float32)[:, None, :]
        C_t = tl.load(C + n * T * N + at_s, mask=in_s, other=0.0).to(tl.float32)[:, None, :]
        dB_t = tl.zeros([L, NP], tl.float32)
        dC_t = tl.zeros([L, NP], tl.float32)
        for group in range(groups):
            x = (tl.program_id(1) * groups + group) * BD + tl.arange(0, BD)
            at_state = x[:, None] * N + s[None, :]
            in_state = (x < D)[:, None] & (s < N)[None, :]
            carried = n * D * N + at_state
            at_x = (n * T + t)[:, None] * D + x[None, :]
            in_x = (t < T)[:, None] & (x < D)[None, :]
            A_x = tl.load(A + at_state, mask=in_state, other=0.0).to(tl.float32)[None, :, :]
            u_t = tl.load(u + at_x, mask=in_x, other=0.0).to(tl.float32)
            d_t = tl.load(delta + at_x, mask=in_x, other=0.0).to(tl.float32)[:, :, None]
            dy_t = tl.load(dy + at_x, mask=in_x, other=0.0).to(tl.float32)
            h = tl.load(states + (n * NT + c) * D * N + at_state, mask=in_state, other=0.0)[None, :, :]
            e_next = tl.load(e + carried, mask=in_state, other=0.0)[None, :, :]
            dA_x = tl.load(dA + carried, mask=in_state, other=0.0)

            a = exp(d_t * A_x)
            hold, dhold_ddelta, dhold_dA = hold_of(d_t, A_x, a, ZOH)
            Bu = B_t * u_t[:, :, None]
            hs, before = scanned(a, hold * Bu, h, first)
            dC_t += tl.sum(hs * dy_t[:, :, None], 1)

            g = dy_t[:, :, None] * C_t
            es, dh = scanned(tl.flip(a, 0), tl.flip(a * g, 0), e_next, first)
            tl.store(e + carried, row_of(es, last), mask=in_state)
            es, dh = tl.flip(es, 0), g + tl.flip(dh, 0)

            dB_t += tl.sum(dh * hold * u_t[:, :, None], 1)
            du_t = tl.sum(dh * hold * B_t, 2)
            if skip is not None:
                du_t += tl.load(skip + x, mask=x < D, other=0.0).to(tl.float32)[None, :] * dy_t
                dskip_x = tl.load(dskip + n * D + x, mask=x < D, other=0.0)
                tl.store(dskip + n * D + x, dskip_x + tl.sum(dy_t * u_t, 0), mask=x < D)
            tl.store(du + at_x, du_t, mask=in_x)
            tl.store(ddelta + at_x, tl.sum(es * before * A_x + dh * Bu * dhold_ddelta, 2), mask=in_x)
            tl.store(dA + carried, dA_x + tl.sum(es * before * d_t + dh * Bu * dhold_dA, 0), mask=in_state)
        tl.store(dB + share + at_s, dB_t, mask=in_s)
        tl.store(dC + share + at_s, dC_t, mask=in_s)
        tl.debug_barrier()  # what is carried may be read by another thread than wrote it


def tile(D, N, states):
    """How many channels have so many states together, at least one, and N as a power of two."""
    NP = 1 << (N - 1).bit_length()
    return min(max(1, states // NP), 1 << (D - 1).bit_length()), NP


@functools.lru_cache(maxsize=1024)
def prepared_forward(device, batch, T, D, N, L, zoh, save):
    """The launch for all calls with inputs of these sizes: 16 numbers a thread of each array up to N = 128, of one token 8."""
    BD, NP = tile(D, N, 128 if L > 1 else 256)
    sizes = dict(T=T, NT=-(-T // L), D=D, N=N, L=L, BD=BD, NP=NP)
    warps = max(1, min(4, BD * NP // 32)) if L > 1 else 1
    return Launch(selective_scan, (batch, -(-D // BD)), **sizes, ZOH=zoh, SAVE=save, num_warps=warps, num_stages=1)


@functools.lru_cache(maxsize=1024)
def prepared_backward(device, batch, T, D, N, zoh):
    """The launch for all calls with inputs of these sizes, and its programs a sequence.

    A program has one state a thread and is one warp if it can be: several wait for one another wherever channels or states
    are summed. Every program writes gradients of B and C, which is memory that counts: up to 8 groups of channels follow
    one another in one if three programs are left for each multiprocessor.
    """
    BD, NP = tile(D, N, 32)
    blocks = -(-D // BD)
    groups = max(1, min(8, batch * blocks // (3 * multiprocessors(device))))
    programs = -(-blocks // groups)
    sizes = dict(T=T, NT=-(-T // L), D=D, groups=groups, N=N, L=L, BD=BD, NP=NP, ZOH=zoh)
    return Launch(selective_scan_backward, (batch, programs), **sizes, num_warps=max(1, NP // 32), num_stages=1), programs


def run_forward(u, delta, A, B, C, skip, first, zoh, save, last=None, L=L):
    """y, the last state (in the memory of `last` if given), and with `save` one state every L tokens."""
    (batch, T, D), N = u.shape, A.shape[1]
    y = torch.empty_like(u)
    last = u.new_empty(batch, D, N, dtype=torch.float32) if last is None else last
    states = u.new_empty(batch, -(-T // L), D, N, dtype=torch.float32) if save else None
    with on_device(u):
        start = prepared_forward(u.device, batch, T, D, N, L, zoh, save)
        start(u, delta, A, B, C, skip, first, y, last, states)
    return y, last, states


def run_backward(dy, dlast, u, delta, A, B, C, skip, states, zoh):
    """The gradients of u, delta, A, B, C, skip (None without one) and the first state."""
    (batch, T, D), N = u.shape, A.shape[1]
    start, programs = prepared_backward(u.device, batch, T, D, N, zoh)
    zeros = functools.partial(u.new_zeros, dtype=torch.float32)
    du, ddelta = torch.empty_like(u), torch.empty_like(delta)
    dA, e = zeros(batch, D, N), zeros(batch, D, N) if dlast is None else dlast.clone()
    dB, dC = (u.new_empty(batch, programs, T, N, dtype=torch.float32) for _ in range(2))
    dskip = None if skip is None else zeros(batch, D)
    with on_device(u):
        start(u, delta, A, B, C, skip, states, dy, du, ddelta, dA, dB, dC, dskip, e)
    dskip = None if skip is None else dskip.sum(0).to(skip.dtype)
    return du, ddelta, dA.sum(0).to(A.dtype), dB.sum(1).to(B.dtype), dC.sum(1).to(C.dtype), dskip, e


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
    @first_derivatives
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
) -> List[Tensor]:  # fmt: skip
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
