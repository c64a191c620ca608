"""The kernels as two custom ops, forward and backward: buffers, launches, and the chunks of packed sequences.

Custom ops, since torch.compile cannot look into a launch; these two it takes as they are. Work arrays have one row a
token, [tokens, HV, ...], like v: a chunk's rows lie where its tokens lie.
"""

import contextlib

import torch
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels import backward, forward
from linattn_edu.kernels.config import choose

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def chunk_table(cu_seqlens, T, C):
    """First token and end of every chunk of packed sequences, and each sequence's first chunk; nothing is read back.

    How many chunks there are only the device knows; T // C + N suffice, and those left over are empty.
    """
    N = len(cu_seqlens) - 1
    first_chunk = torch.zeros_like(cu_seqlens)
    first_chunk[1:] = ((cu_seqlens.diff() + C - 1) // C).cumsum(0)
    c = torch.arange(T // C + N, device=cu_seqlens.device)
    n = torch.searchsorted(first_chunk[1:], c, right=True).clamp(max=N - 1)
    stop = cu_seqlens[n + 1]
    first = torch.minimum(cu_seqlens[n] + (c - first_chunk[n]) * C, stop)
    return first_chunk, torch.stack([first, stop], -1)


class Launch:
    """Sizes, tiles, grids and buffers of one call."""

    def __init__(self, q, v, g, beta, cu_seqlens, chunk_size):
        (B, self.T, self.H, self.K), (self.HV, self.V) = q.shape, v.shape[2:]
        self.like, self.tokens = q, B * self.T
        self.gate = "none" if g is None else "scalar" if g.dim() == 3 else "channel"
        self.delta, self.packed = beta is not None, cu_seqlens is not None
        self.config = choose(q, self.V, self.gate, self.delta, chunk_size)
        C = self.config.C
        self.NT = -(-self.T // C)
        self.N = len(cu_seqlens) - 1 if self.packed else B
        self.chunks = self.T // C + self.N if self.packed else B * self.NT
        self.switches = dict(
            K=self.K, V=self.V, C=C, GATE=self.gate, DELTA=self.delta, PACKED=self.packed,
            DTYPE=DTYPES[self.config.dtype], PRECISION=self.config.precision,
        )  # fmt: skip

    @property
    def kept(self):
        """The work arrays of the forward pass that the backward pass reads."""
        gated = ["q_start", "k_end", "decay"] if self.gate != "none" else []
        return ["P", *gated, *(["M", "W", "U", "v_new"] if self.delta else []), "states"]

    def rows(self, *shape, dtype=None):
        """A buffer with one row a token; zero at first where a token may belong to no sequence."""
        make = self.like.new_zeros if self.packed else self.like.new_empty
        return make(self.tokens, self.HV, *shape, dtype=dtype or self.config.dtype)

    def per_chunk(self, *shape, dtype=torch.float32):
        return self.like.new_empty(self.chunks, self.HV, *shape, dtype=dtype)

    def state(self):
        return self.like.new_empty(self.N, self.HV, self.K, self.V, dtype=torch.float32)

    def forward_buffers(self, save, out_dtype):
        x = dict(o=self.rows(self.V, dtype=out_dtype), last=self.state(), P=self.rows(self.config.C))
        if self.gate != "none":
            x |= dict(q_start=self.rows(self.K), k_end=self.rows(self.K))
            x |= dict(decay=self.per_chunk(self.K if self.gate == "channel" else 1))
        if self.delta:
            x |= dict(M=self.rows(self.config.C), W=self.rows(self.K), U=self.rows(self.V))
        if save:
            x |= dict(states=self.per_chunk(self.K, self.V, dtype=self.config.dtype))
            x |= dict(v_new=self.rows(self.V)) if self.delta else {}
        return x

    def backward_buffers(self, dtype):
        shared = torch.float32 if self.HV > self.H else dtype
        x = dict(dq=self.rows(self.K, dtype=shared), dk=self.rows(self.K, dtype=shared), dv=self.rows(self.V, dtype=dtype))
        x |= dict(dfirst=self.state())
        if self.gate != "none":
            x |= dict(dg=self.rows(*[self.K] * (self.gate == "channel"), dtype=torch.float32))
        if self.delta:
            x |= dict(dbeta=self.rows(dtype=torch.float32))
        return x

    def tiles(self, kernel):
        BK, BV, warps, stages = getattr(self.config, kernel)
        return dict(BK=BK, BV=BV, num_warps=warps, num_stages=stages)

    def walk(self, kernel):
        """Grid and tiles of a kernel that walks through the sequences."""
        KP, BV, warps, stages = getattr(self.config, kernel)
        return (self.N * self.HV, -(-self.V // BV)), dict(KP=KP, BV=BV, num_warps=warps, num_stages=stages)


def on_device(x):
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@torch.library.custom_op("linattn_edu::chunk_forward", mutates_args=())
def chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int, save: bool, float_output: bool,
) -> list[Tensor]:  # fmt: skip
    """[o, last state], and with `save` the arrays of `Launch.kept`."""
    c = Launch(q, v, g, beta, cu_seqlens, chunk_size)
    x = c.forward_buffers(save, torch.float32 if float_output else v.dtype)
    get = x.get
    first_chunk, table = chunk_table(cu_seqlens, c.T, c.config.C) if c.packed else (None, None)
    with on_device(q):
        if c.chunks:
            forward.intra[c.chunks, c.HV](
                q, k, v, g, beta, get("P"), get("M"), get("W"), get("U"), get("q_start"), get("k_end"), get("decay"),
                table, scale, c.T, c.NT, c.H, c.HV, PRECISE=c.config.precise, **c.switches, **c.tiles("intra"),
            )  # fmt: skip
        if c.N:
            grid, tiles = c.walk("inter")
            plain = c.gate == "none"
            forward.inter[grid](
                q if plain else get("q_start"), k if plain else get("k_end"), get("U", v), get("P"), get("W"),
                get("decay"), initial_state, get("o"), get("v_new"), get("states"), get("last"), cu_seqlens,
                first_chunk, scale if plain else 1.0, c.T, c.NT, c.H if plain else c.HV, c.HV,
                SAVE=save, **c.switches, **tiles,
            )  # fmt: skip
    return [x["o"].view(v.shape), x["last"], *(x[name] for name in c.kept if save)]


@chunk_forward.register_fake
def _(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, save, float_output):
    c = Launch(q, v, g, beta, cu_seqlens, chunk_size)
    x = c.forward_buffers(save, torch.float32 if float_output else v.dtype)
    return [x["o"].view(v.shape), x["last"], *(x[name] for name in c.kept if save)]


@torch.library.custom_op("linattn_edu::chunk_backward", mutates_args=())
def chunk_backward(
    do: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
    cu_seqlens: Tensor | None, kept: list[Tensor], scale: float, chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    """[dq, dk, dv, dinitial_state], then dg and dbeta where there are g and beta."""
    c = Launch(q, v, g, beta, cu_seqlens, chunk_size)
    x = c.backward_buffers(v.dtype) | dict(zip(c.kept, kept))
    get, plain = x.get, c.gate == "none"
    first_chunk, table = chunk_table(cu_seqlens, c.T, c.config.C) if c.packed else (None, None)
    dv_new = c.rows(c.V) if c.delta else x["dv"]
    dstates = c.per_chunk(c.K, c.V, dtype=c.config.dtype)
    dq_start, dk_end = c.rows(c.K), c.rows(c.K)
    dK_b = c.rows(c.K) if c.delta else None
    ddecay = None if plain else c.per_chunk(c.K)
    with on_device(q):
        if c.N:
            grid, tiles = c.walk("inter_backward")
            backward.inter_backward[grid](
                q if plain else get("q_start"), k if plain else get("k_end"), get("P"), get("W"), get("decay"), do,
                dlast, dv_new, dstates, get("dfirst"), cu_seqlens, first_chunk, scale if plain else 1.0,
                c.T, c.NT, c.H if plain else c.HV, c.HV, **c.switches, **tiles,
            )  # fmt: skip
        if c.chunks:
            tiles = c.tiles("state_backward")
            backward.state_backward[c.chunks, c.HV, -(-c.K // tiles["BK"])](
                get("M"), do, get("v_new", v), dv_new, get("states"), dstates, dq_start, dk_end, dK_b, ddecay,
                table, c.T, c.NT, c.HV, **c.switches, **tiles,
            )  # fmt: skip
            backward.intra_backward[c.chunks, c.HV](
                q, k, v, g, beta, get("P"), get("M"), get("W"), get("U"), do, get("v_new", v), dv_new, dq_start,
                dk_end, dK_b, ddecay, get("dq"), get("dk"), get("dv"), get("dg"), get("dbeta"), table, scale,
                c.T, c.NT, c.H, c.HV, **c.switches, **c.tiles("intra_backward"),
            )  # fmt: skip
    return _gradients(x, q, k, v, g, beta)


@chunk_backward.register_fake
def _(do, dlast, q, k, v, g, beta, cu_seqlens, kept, scale, chunk_size):
    return _gradients(Launch(q, v, g, beta, cu_seqlens, chunk_size).backward_buffers(v.dtype), q, k, v, g, beta)


def _gradients(x, q, k, v, g, beta):
    """The gradients in the shapes of the inputs; those of shared query/key heads are summed."""
    dq, dk = x["dq"].view(*q.shape[:3], -1, q.shape[3]), x["dk"].view(*k.shape[:3], -1, k.shape[3])
    dq, dk = (y.sum(3).to(q.dtype) if y.shape[3] > 1 else y.squeeze(3) for y in (dq, dk))
    gates = [x[name].view(like.shape) for name, like in (("dg", g), ("dbeta", beta)) if like is not None]
    return [dq, dk, x["dv"].view(v.shape), x["dfirst"], *gates]


def _setup(ctx, inputs, output):
    q, k, v, g, beta, initial_state, cu_seqlens, ctx.scale, ctx.chunk_size, ctx.saved, _ = inputs
    ctx.has_state = initial_state is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, *output)


def _backward(ctx, grads):
    q, k, v, g, beta, cu_seqlens, o, last, *kept = ctx.saved_tensors
    do, dlast = grads[:2]
    if not ctx.saved or any(x is not None for x in grads[2:]):
        raise RuntimeError("the arrays that the backward pass needs were not kept, or are not differentiable")
    do = torch.zeros_like(o) if do is None else do.contiguous()
    dlast = torch.zeros_like(last) if dlast is None else dlast.contiguous()
    args = do, dlast, q, k, v, g, beta, cu_seqlens, kept, ctx.scale, ctx.chunk_size
    dq, dk, dv, dfirst, *gates = chunk_backward(*args)
    gates = iter(gates)
    dg, dbeta = (None if x is None else next(gates) for x in (g, beta))
    return dq, dk, dv, dg, dbeta, dfirst if ctx.has_state else None, None, None, None, None, None


chunk_forward.register_autograd(_backward, setup_context=_setup)
