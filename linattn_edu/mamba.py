"""Mamba's selective state space model: every channel d of u has N states, and every pair (d, n) a decay of its own.

    h_t = exp(Delta_t A) h_{t-1} + Bbar_t u_t        h [D, N], products by channel and state
    y_t = h_t C_t + D u_t

In the letters of linear attention C is the query, B the key and u the value: one head a channel, with V = 1 and K = N,
and the same q and k in all of them. The step size Delta_t > 0 says at once how much of h goes and how much of u comes.

Source: Gu and Dao 2023, eq. 2 and alg. 2. Paper and official code differ: eq. 4 of the paper discretises B by a
zero-order hold, which takes u as constant during Delta; the code makes an Euler step, and adds the term D u.

    "zoh"      Bbar = (exp(Delta A) - 1) / A * B = Delta B + Delta^2 A B / 2 + O(Delta^3)
    "euler"    Bbar = Delta B
"""

import inspect
from functools import partial

import torch
import torch.nn.functional as F

from linattn_edu import kernels, validate
from linattn_edu.algebra import read, scan
from linattn_edu.forms import by_segment, by_token, computing_dtype, fold, full_precision, overwrite
from linattn_edu.validate import Sizes

SEGMENT = 1024
"""Tokens whose D x N decays and states are in memory together."""


def euler(delta, A):
    """The time Delta that u acts, as if nothing decayed meanwhile."""
    return delta


def zoh(delta, A):
    """(exp(Delta A) - 1) / A, which tends to Delta for A -> 0.

    Written Delta f(Delta A), where f(x) = (exp(x) - 1) / x is 0 / 0 at 0, and near 0 its derivative cancels: there f is
    1 + x/2! + x^2/3! + ..., exact to float64 for |x| < 0.01.
    """
    x = delta * A
    small = x.abs() < 0.01
    near, far = torch.where(small, x, 0.0), torch.where(small, 1.0, x)
    series = 1 + near / 2 * (1 + near / 3 * (1 + near / 4 * (1 + near / 5 * (1 + near / 6 * (1 + near / 7)))))
    return delta * torch.where(small, series, torch.expm1(far) / far)


DISCRETIZATIONS = {"euler": euler, "zoh": zoh}


def transition(A, hold, B, u, delta):
    """Decay exp(Delta A) and write Bbar u of every token: `u`, `delta [..., D]`, `B [..., N]` -> `[..., D, N]`."""
    delta = delta[..., None]
    return (delta * A).exp(), hold(delta, A) * B[..., None, :] * u[..., None]


def update(A, hold, C, B, u, delta, h):
    """h_t = exp(Delta_t A) h_{t-1} + Bbar_t u_t,   y_t = h_t C_t."""
    decay, write = transition(A, hold, B, u, delta)
    h = decay * h + write
    return read(h.mT, C), h


def by_scan(A, hold, xs, h):
    """The two steps h -> a h + x and h -> a' h + x' in a row are the step h -> (a' a) h + (a' x + x'): `scan`.

    The state of the beginning goes into the first token's x.
    """
    C, B, u, delta = xs
    decay, write = transition(A, hold, B, u, delta)
    states = scan(decay, torch.cat([decay[:, :1] * h[:, None] + write[:, :1], write[:, 1:]], 1))
    return read(states.mT, C), states[:, -1].clone()  # or the last state would hold the memory of all


def by_chunk(A, hold, size, xs, h):
    """All chunks side by side, each from the state 0; then what the true state at the chunk's beginning adds.

    The step is linear in h, so the two may be summed. Delta since the beginning of the chunk being s_t, the state
    h of the beginning has become exp(s_t A) h at token t. Padding has Delta = 0: it decays nothing and writes nothing.
    """
    T = xs[0].shape[1]
    size = min(size, T)
    xs = [F.pad(x, [0, 0, 0, -T % size]).unflatten(1, (-1, size)) for x in xs]  # [B, chunks, C, ...]
    batch, chunks = xs[0].shape[:2]
    zero = h.new_zeros(batch * chunks, *h.shape[1:])
    from_zero = by_token(partial(update, A, hold), [x.flatten(0, 1) for x in xs], zero)
    y, written = (x.unflatten(0, (batch, chunks)) for x in from_zero)
    C, delta = xs[0], xs[3]
    since_start = (delta.cumsum(2)[..., None] * A).exp()
    before, h = fold(_pass_on, h, [x.transpose(0, 1) for x in (since_start[:, :, -1], written)])
    before = torch.stack(before, 1)[:, :, None]
    y = y + read((since_start * before).mT, C)
    return y.flatten(1, 2)[:, :T], h


def _pass_on(decay, written, h):
    """The state before a chunk, and the one after it."""
    return h, decay * h + written


def _check(u, delta, A, B, C, D, discretization, mark="", T="T "):
    sizes, like = Sizes(), (f"u{mark}", u)
    validate.floating_tensor(f"u{mark}", u, f"B {T}D", sizes)
    validate.floating_tensor(f"delta{mark}", delta, f"B {T}D", sizes, like=like)
    validate.floating_tensor("A", A, "D N", sizes, like=like)
    validate.floating_tensor(f"B{mark}", B, f"B {T}N", sizes, like=like, share_dtype=True)
    validate.floating_tensor(f"C{mark}", C, f"B {T}N", sizes, like=like, share_dtype=True)
    if D is not None:
        validate.floating_tensor("D", D, "D", sizes, like=like)
    if discretization not in tuple(DISCRETIZATIONS):
        raise ValueError(f"`discretization`: got {discretization!r}, expected one of {', '.join(DISCRETIZATIONS)}")
    return sizes


def _state_in(name, state, sizes, like):
    _, u = like
    if state is None:
        return u.new_zeros(sizes["B"], sizes["D"], sizes["N"], dtype=computing_dtype(u))
    validate.floating_tensor(name, state, "B D N", sizes, like=like)
    return state.to(computing_dtype(u))


def _run(method, segment, u, delta, A, B, C, D, initial_state, output_final_state, discretization):
    """`method(A, hold, xs, h)`, segment by segment, and the term D u."""
    sizes = _check(u, delta, A, B, C, D, discretization)
    validate.flag("output_final_state", output_final_state)
    h = _state_in("initial_state", initial_state, sizes, ("u", u))
    A, D = A.to(h.dtype), A.new_zeros(1, dtype=h.dtype) if D is None else D.to(h.dtype)
    if u.shape[1] == 0:
        h = h + A[:0].sum() + D[:0].sum()  # 0, and part of their graph

    def with_skip(xs, h):
        y, h = method(A, DISCRETIZATIONS[discretization], xs, h)
        return y + D * xs[2], h

    with full_precision(u):
        y, h = by_segment(with_skip, lambda *xs: xs, lambda y: y, segment, (C, B, u, delta), h)
    return y, h if output_final_state else None


ARGUMENTS = """

    h_t = exp(Delta_t A) h_{t-1} + Bbar_t u_t,   y_t = h_t C_t + D u_t

Args:
    u: [B, T, D]; u, B and C share one floating dtype.
    delta: [B, T, D], the step sizes Delta > 0, after softplus.
    A: [D, N], negative.
    B, C: [B, T, N], how u enters the states and how they are read.
    D: [D], the skip from u to y; none if None.
    initial_state: [B, D, N]; zero if None.
    output_final_state: return the last state, else None in its place.
    discretization: "euler", Bbar = Delta B as in the official code, or "zoh", Bbar = (exp(Delta A) - 1) / A * B as in
        the paper.

Returns:
    y [B, T, D] in the dtype of u, and the last state in float32, or float64 for float64 inputs.

Raises:
    ValueError: a wrong shape, dtype, device or value.
    TypeError: an argument that is missing, or is no tensor.

Source: Gu and Dao 2023, eqs. 2 and 4, alg. 2."""

BLOCKS = """
    chunk_size: tokens a chunk; for the kernel a hint."""
BACKEND = """
    backend: "triton" insists on the kernel, which has first derivatives alone, "torch" on `chunkwise`; None takes what
        serves here."""


def _form(function):
    """Complete the docstring, and check the arguments' names."""
    parameters = inspect.signature(function).parameters
    more = BLOCKS * ("chunk_size" in parameters) + BACKEND * ("backend" in parameters)
    function.__doc__ += ARGUMENTS.replace("\n\nReturns:", f"{more}\n\nReturns:")
    return validate.named(function)


@_form
def recurrent(u, delta, A, B, C, *, D=None, initial_state=None, output_final_state=False, discretization="euler"):
    """One token after another: the definition."""

    def by_update(A, hold, xs, h):
        return by_token(partial(update, A, hold), xs, h)

    return _run(by_update, SEGMENT, u, delta, A, B, C, D, initial_state, output_final_state, discretization)


@_form
def parallel(u, delta, A, B, C, *, D=None, initial_state=None, output_final_state=False, discretization="euler"):
    """An associative scan over the tokens, 2 log2(T) levels deep: all T states are in memory, 1024 tokens at a time."""
    return _run(by_scan, SEGMENT, u, delta, A, B, C, D, initial_state, output_final_state, discretization)


@_form
def chunkwise(
    u, delta, A, B, C, *, D=None, initial_state=None, output_final_state=False, discretization="euler", chunk_size=64
):
    """`chunk_size` steps in all chunks at once, then one step a chunk: T / C + C dependent steps in place of T."""
    chunk_size = validate.count("chunk_size", chunk_size)

    def method(A, hold, xs, h):
        return by_chunk(A, hold, chunk_size, xs, h)

    segment = max(SEGMENT // chunk_size, 1) * chunk_size
    return _run(method, segment, u, delta, A, B, C, D, initial_state, output_final_state, discretization)


@_form
def fused(
    u,
    delta,
    A,
    B,
    C,
    *,
    D=None,
    initial_state=None,
    output_final_state=False,
    discretization="euler",
    chunk_size=64,
    backend=None,
):
    """One kernel a pass, the states in registers all the way, where Triton and the device serve; else `chunkwise`."""
    chunk_size = validate.count("chunk_size", chunk_size)
    if kernels.wanted(backend, u):
        sizes = _check(u, delta, A, B, C, D, discretization)
        validate.flag("output_final_state", output_final_state)
        h = None if initial_state is None else _state_in("initial_state", initial_state, sizes, ("u", u))
        if kernels.serve(backend, u, sizes["N"]):
            y, h = kernels.selective_scan(u, delta, A, B, C, D, h, discretization == "zoh")
            return y, h if output_final_state else None
    return chunkwise(
        u, delta, A, B, C, D=D, initial_state=initial_state, output_final_state=output_final_state,
        discretization=discretization, chunk_size=chunk_size,
    )  # fmt: skip


@validate.named
def step(u_t, delta_t, A, B_t, C_t, state, *, D=None, discretization="euler", inplace=False, backend=None):
    """One token, for decoding: h_t = exp(Delta_t A) h_{t-1} + Bbar_t u_t,   y_t = h_t C_t + D u_t.

    Args:
        u_t, delta_t: [B, D]; u_t, B_t and C_t share one floating dtype.
        A: [D, N], negative.
        B_t, C_t: [B, N].
        state: [B, D, N].
        D: [D], the skip from u to y; none if None.
        discretization: "euler" or "zoh", as in `recurrent`.
        inplace: overwrite `state` and return it.
        backend: "triton" insists on the kernel, which keeps no graph for gradients, "torch" on PyTorch; None takes what
            serves here.

    Returns:
        y_t [B, D] in the dtype of u_t, and the new state.

    Raises:
        ValueError: a wrong shape, dtype, device or value.
        TypeError: an argument that is missing, or is no tensor.

    Source: Gu and Dao 2023, eqs. 2 and 4, alg. 2.
    """
    sizes = _check(u_t, delta_t, A, B_t, C_t, D, discretization, "_t", "")
    validate.flag("inplace", inplace)
    if state is None:
        raise TypeError("`state`: got nothing (None), expected the state that a form returned, or zeros")
    h = _state_in("state", state, sizes, ("u_t", u_t))
    given = [x for x in (u_t, delta_t, A, B_t, C_t, D, state) if x is not None]
    if kernels.wanted(backend, u_t) and kernels.serve(backend, u_t, sizes["N"]) and kernels.may_step(backend, given):
        y, new = kernels.selective_step(u_t, delta_t, A, B_t, C_t, D, state, discretization == "zoh", inplace)
        return y, overwrite(state, new) if inplace and new is not state else new
    with full_precision(u_t):
        A, C, B, u, delta = (x.to(h.dtype) for x in (A, C_t, B_t, u_t, delta_t))
        y, h = update(A, DISCRETIZATIONS[discretization], C, B, u, delta, h)
        y = (y if D is None else y + D.to(h.dtype) * u).to(u_t.dtype)
    return y, overwrite(state, h) if inplace else h
