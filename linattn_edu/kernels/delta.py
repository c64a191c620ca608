"""The launches of the delta rule: the kernels of `delta_forward` and `delta_backward`, with a channel gate `delta_channel`'s."""

import functools

import torch

from linattn_edu.kernels import config, delta_backward, delta_channel, delta_forward
from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import DTYPES, chunk_table, shared_heads


class Plan:
    """Sizes, tiles and grids of all calls with inputs of one shape, dtype and device."""

    def __init__(self, shape, HV, V, dtype, device, gate, sequences, chunk_size):
        B, self.T, self.H, self.K = shape
        self.HV, self.V, self.gate, self.device = HV, V, gate, device
        c = self.config = config.delta(device, dtype, self.K, chunk_size)
        self.tokens, self.NT, self.VP = B * self.T, -(-self.T // c.C), -(-V // c.BV) * c.BV
        self.packed = sequences is not None
        self.N = sequences if self.packed else B
        self.chunks = self.T // c.C + self.N if self.packed else B * self.NT
        common = dict(K=self.K, C=c.C, KP=c.KP, PACKED=self.packed, DTYPE=DTYPES[c.dtype], PRECISION=c.precision)
        walk = dict(**common, V=V, VP=self.VP, BV=c.BV, GATE=gate, num_warps=4, num_stages=c.stages[0])
        self.walk_grid, self.walk = (self.N * HV, self.VP // c.BV), walk
        self.intra = walk | dict(BK=c.BK, PRECISE=c.precise, num_stages=1)
        self.intra_backward = walk | dict(BK=c.BK, num_stages=c.stages[1])
        by_channel = dict(**common, B=16, num_warps=1, num_stages=1)
        self.channel, self.channel_backward = (by_channel | dict(BK=BK, maxnreg=most) for BK, most in c.channel)
        self.parts = c.KP // c.channel[1][0] if gate == "channel" else 1

    def rows(self, *shape, dtype):
        """A buffer with one row a token; zero at first where a token may belong to no sequence."""
        make = torch.zeros if self.packed else torch.empty
        return make(self.tokens, self.HV, *shape, dtype=dtype, device=self.device)

    def tiles(self, *shape, dtype=None):
        """A buffer with one tile for every chunk and value head."""
        return torch.empty(self.chunks, self.HV, *shape, dtype=dtype or self.config.dtype, device=self.device)

    def state(self):
        return torch.empty(self.N, self.HV, self.K, self.V, dtype=torch.float32, device=self.device)


cached_plan = functools.lru_cache(maxsize=1024)(Plan)


def plan(q, v, g, cu_seqlens, chunk_size, symbolic=False):
    """The `Plan` of a call; `symbolic` sizes, while torch.compile traces, cannot be looked up."""
    gate = "none" if g is None else "scalar" if g.dim() == 3 else "channel"
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    make = Plan if symbolic else cached_plan
    return make(q.shape, *v.shape[2:], q.dtype, q.device, gate, sequences, chunk_size)


def kept_shapes(p):
    """The work arrays of the forward pass that the backward pass reads, U in the end V'."""
    C, KP, VP = p.config.C, p.config.KP, p.VP
    shapes = dict(P=(C, C), M=(C, C), W=(C, KP), U=(VP, C), q_start=(C, KP), k_end=(C, KP), states=(VP, KP))
    float_shapes = {"none": {}, "scalar": dict(decay=(1,)), "channel": dict(decay=(KP,))}[p.gate]
    return shapes, float_shapes


def forward_buffers(p, save):
    shapes, float_shapes = kept_shapes(p)
    x = {name: p.tiles(*shape) for name, shape in shapes.items() if save or name not in ("M", "states")}
    return x | {name: p.tiles(*shape, dtype=torch.float32) for name, shape in float_shapes.items()}


def run_forward(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, save, final, out_dtype, traced=False
):  # fmt: skip
    """o, the last state if `final`, and if `save` the arrays that `run_backward` takes as `kept`."""
    p = plan(q, v, g, cu_seqlens, chunk_size, traced)
    o, last, x = p.rows(p.V, dtype=out_dtype), p.state() if final else None, forward_buffers(p, save)
    get, sizes = x.get, (p.T, p.NT, p.H, p.HV)
    if not traced and p.N:
        first_chunk, table = chunk_table(cu_seqlens, p.T, p.config.C) if p.packed else (None, None)
        A = p.tiles(p.config.C, p.config.C, dtype=torch.float32) if p.gate == "channel" else None
        programs = p.chunks * p.HV
        with on_device(q):
            if programs and p.gate == "channel":
                delta_channel.channel_intra[programs * max(p.config.C // 32, 1),](
                    q, k, g, get("P"), A, get("W"), get("q_start"), get("k_end"), get("decay"), table, scale,
                    *sizes, **p.channel,
                )  # fmt: skip
            if programs:
                delta_forward.delta_intra[programs,](
                    q, k, v, g, beta, A, get("P"), get("M"), get("W"), get("U"), get("q_start"), get("k_end"),
                    get("decay"), table, scale, *sizes, SAVE=save, **p.intra,
                )  # fmt: skip
            delta_forward.delta_inter[p.walk_grid](
                get("q_start"), get("k_end"), get("W"), get("U"), get("P"), get("decay"), initial_state, o,
                get("states"), last, cu_seqlens, first_chunk, p.T, p.NT, p.HV, SAVE=save, **p.walk,
            )  # fmt: skip
    return o.view(v.shape), last, list(x.values()) if save else []


def run_backward(
    do, dlast, q, k, v, g, beta, initial_state, cu_seqlens, kept, scale, chunk_size, traced=False
):  # fmt: skip
    """dq, dk, dv, dg, dbeta and the gradient of the initial state, None for an input that is None."""
    p = plan(q, v, g, cu_seqlens, chunk_size, traced)
    shared = torch.float32 if p.HV > p.H else v.dtype
    dq, dk, dv = p.rows(p.K, dtype=shared), p.rows(p.K, dtype=shared), p.rows(p.V, dtype=v.dtype)
    dg = None if g is None else p.rows(*g.shape[3:], dtype=torch.float32)
    make = torch.zeros if p.packed else torch.empty
    dbeta = make(p.parts, *beta.shape, dtype=torch.float32, device=p.device)
    dfirst = None if initial_state is None else p.state()
    if not traced and p.N:
        C, KP, sizes, programs = p.config.C, p.config.KP, (p.T, p.NT, p.H, p.HV), p.chunks * p.HV
        get = dict(zip([name for shapes in kept_shapes(p) for name in shapes], kept)).get
        first_chunk, table = chunk_table(cu_seqlens, p.T, C) if p.packed else (None, None)
        dv_new, dstates = p.tiles(p.VP, C), p.tiles(p.VP, KP)
        handed = [None] * 6
        if p.gate == "channel":
            handed = [p.tiles(*shape) for shape in ((C, C), (C, C), (C, KP), (C, KP), (C, KP))]
            handed.append(p.tiles(KP, dtype=torch.float32))
        with on_device(q):
            delta_backward.delta_inter_backward[p.walk_grid](
                get("q_start"), get("k_end"), get("W"), get("P"), get("decay"), do, dlast, dv_new, dstates, dfirst,
                cu_seqlens, first_chunk, p.T, p.NT, p.HV, **p.walk,
            )  # fmt: skip
            if programs:
                delta_backward.delta_intra_backward[programs,](
                    q, k, v, g, beta, get("P"), get("M"), get("decay"), do, get("U"), dv_new, get("states"), dstates,
                    *handed, dq, dk, dv, dg, dbeta, table, scale, *sizes, **p.intra_backward,
                )  # fmt: skip
            if programs and p.gate == "channel":
                delta_channel.channel_intra_backward[programs * p.parts,](
                    q, k, g, beta, get("decay"), *handed, dq, dk, dg, dbeta, table, scale, *sizes, p.tokens,
                    **p.channel_backward,
                )  # fmt: skip
    dg = None if g is None else dg.view(g.shape)
    dbeta = dbeta.sum(0) if p.parts > 1 else dbeta[0]
    return shared_heads(dq, q), shared_heads(dk, k), dv.view(v.shape), dg, dbeta, dfirst
