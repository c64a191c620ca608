"""One token of every variant in one launch: decay, erase, write, read, with the state read once and written once.

A token costs 2 K V state elements of traffic and about 6 K V operations, so a step is as fast as memory moves the state
and nothing else counts. No value channel needs another, which cuts the state into tiles of all K rows and some columns:
enough programs to fill a device, and no sum over K leaves its program. A tile of 8192 elements takes 64 registers of
each of 128 threads; rows of 64 columns are 256 bytes close together, and on an H200 half of that costs a twentieth
of the speed, a quarter of it half.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.config import power_of_two
from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import Launch

TILE = 8192
MAPS = ("identity", "elu1", "relu", "relu2", "exp")
"""The maps of `feature_maps` that act on each channel alone; the kernel applies them itself."""


@triton.jit
def features(x, real, MAP: tl.constexpr):
    """phi(x) in float32; the padding, where phi(0) need not be 0, stays 0."""
    x = x.to(tl.float32)
    if MAP == "elu1":
        x = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    if MAP == "relu":
        x = tl.maximum(x, 0.0)
    if MAP == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    if MAP == "exp":
        x = tl.exp(x)
    return tl.where(real, x, 0.0)


@triton.jit(do_not_specialize=["HQ", "HV"])
def step(
    q, k, v, g, beta, S, z, S_next, z_next, o, scale, eps, HQ, HV,
    K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr,
    WIDTH: tl.constexpr, S_ROW: tl.constexpr, Z_ROW: tl.constexpr,
    S_ROW_NEXT: tl.constexpr, Z_ROW_NEXT: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """S~ = Diag(exp g) S,   S' = S~ + beta k (v - S~^T k)^T,   o = S'^T (scale q);
    with z: z' = z + k,   o / (z'^T q + eps).

    One program a sequence, value head and WIDTH value channels, taken BV at a time. The
    normaliser belongs to all value channels, so with it WIDTH is V: were z in place, a
    second program might read it updated. A row of the state starts S_ROW elements after the
    one before: V, or V + 1 in the state of a prefill, whose last column is z.

    Bytes a head: 8 K V for the state in float32; 2 K + 2 V numbers more. FLOPs: 4 K V, with
    a gate K V, with delta 2 K V more.
    """
    head = tl.program_id(0).to(tl.int64)
    n = head // HV
    head_qk = n * HQ + (head - n * HV) // (HV // HQ)
    x = tl.arange(0, KP)
    real = x < K
    q_t = scale * features(tl.load(q + head_qk * K + x, mask=real, other=0.0), real, MAP)
    k_t = features(tl.load(k + head_qk * K + x, mask=real, other=0.0), real, MAP)
    if GATE == "scalar":
        alpha = tl.exp(tl.load(g + head).to(tl.float32))
    if GATE == "channel":
        g_t = tl.load(g + head * K + x, mask=real, other=0.0)
        alpha = tl.exp(g_t.to(tl.float32))[:, None]
    if NORMALIZE:
        z_t = k_t + tl.load(z + (head * K + x) * Z_ROW, mask=real, other=0.0).to(tl.float32)
        tl.store(z_next + (head * K + x) * Z_ROW_NEXT, z_t, mask=real)
    for y0 in range(0, WIDTH, BV):
        y = tl.program_id(1) * WIDTH + y0 + tl.arange(0, BV)
        mask = real[:, None] & (y < V)[None, :]
        at = S + (head * K + x)[:, None] * S_ROW + y[None, :]
        S_t = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(v + head * V + y, mask=y < V, other=0.0).to(tl.float32)
        if GATE != "none":
            S_t *= alpha
        if DELTA:
            w = tl.load(beta + head).to(tl.float32) * (w - tl.sum(S_t * k_t[:, None], 0))
        S_t += k_t[:, None] * w[None, :]
        at = S_next + (head * K + x)[:, None] * S_ROW_NEXT + y[None, :]
        tl.store(at, S_t, mask=mask)
        o_t = tl.sum(S_t * q_t[:, None], 0)
        if NORMALIZE:
            o_t /= tl.sum(z_t * q_t, 0) + eps
        tl.store(o + head * V + y, o_t, mask=y < V)


@functools.cache
def tiles(K, V, normalize):
    """KP, BV, the value channels of a program, and programs a head; a loop over V keeps two tiles at once, so half ones."""
    KP = power_of_two(K)
    BV = max(16, min(power_of_two(V), TILE // KP // (1 + normalize)))
    blocks = -(-V // BV)
    return (KP, BV, BV * blocks, 1) if normalize else (KP, BV, BV, blocks)


@functools.lru_cache(maxsize=1024)
def prepared(device, N, HQ, HV, K, V, rows, gate, delta, feature_map, normalize):
    """The launch for all calls with inputs of these sizes."""
    KP, BV, WIDTH, blocks = tiles(K, V, normalize)
    S_ROW, Z_ROW, S_ROW_NEXT, Z_ROW_NEXT = rows
    return Launch(
        step, (N * HV, blocks), HQ=HQ, HV=HV, K=K, V=V, KP=KP, BV=BV, WIDTH=WIDTH, S_ROW=S_ROW, Z_ROW=Z_ROW,
        S_ROW_NEXT=S_ROW_NEXT, Z_ROW_NEXT=Z_ROW_NEXT, GATE=gate, DELTA=delta, MAP=feature_map, NORMALIZE=normalize,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def row(x, width):
    """Elements from one row of the state, or from one entry of z, to the next; `width` if they lie close."""
    return width if x.is_contiguous() else x.stride(2)


def launch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, S: Tensor, z: Tensor | None,
    S_next: Tensor, z_next: Tensor | None, o: Tensor, scale: float, eps: float, feature_map: str,
) -> None:  # fmt: skip
    (N, HQ, K), (_, HV, V) = q.shape, v.shape
    normalize = z is not None
    rows = row(S, V), row(z, 1) if normalize else 1, row(S_next, V), row(z_next, 1) if normalize else 1
    gate = "none" if g is None else "scalar" if g.dim() == 2 else "channel"
    start = prepared(q.device, N, HQ, HV, K, V, rows, gate, beta is not None, feature_map, normalize)
    with on_device(q):
        start(q, k, v, g, beta, S, z, S_next, z_next, o, scale, eps)


traced = torch.library.custom_op("linattn_edu::step", launch, mutates_args=("S_next", "z_next", "o"))
traced.register_fake(lambda *_: None)


def in_rows(x, width):
    """`x`, or a copy whose rows lie at even distances: as in a state, or beside the normaliser's column in one."""
    step = x.stride(2)
    even = x.dim() == 3 or x.stride(3) == 1
    even = even and step >= width and x.stride(1) == x.shape[2] * step and x.stride(0) == x.shape[1] * x.stride(1)
    return x if even else x.contiguous()


def decode(q, k, v, g, beta, states, scale, eps, feature_map, inplace):
    """`launch` on tensors as they come, `states` [S] or [S, z]: o and the next states, with `inplace` where the old ones
    are, if they are float32 in rows.
    """
    read = [in_rows(x, width) for x, width in zip(states, (v.shape[-1], 1))]
    own = inplace and all(x is y and x.dtype == torch.float32 for x, y in zip(states, read))
    written = states if own else [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in states]
    o = torch.empty(v.shape, dtype=v.dtype if v.is_cuda else torch.float32, device=v.device)
    inputs = [None if x is None else x.contiguous() for x in (q, k, v, g, beta)]
    compiling = torch.compiler.is_compiling()
    both = [y for x in (read, written) for y in (*x, None)[:2]]
    (traced if compiling else launch)(*inputs, *both, o, scale, eps, feature_map)
    if own and not compiling and not any(x.is_inference() for x in states):
        for x in states:
            torch.autograd.graph.increment_version(x)
    return o.to(v.dtype), written
