"""The launches of the delta rule: the kernels of `delta_forward` and `delta_backward`, with a channel gate `delta_channel`'s."""

import functools
import math

import torch

from linattn_edu.kernels import config, delta_backward, delta_channel, delta_forward
from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import DTYPES, Launch, chunk_table, shared_heads


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
        walk = dict(**common, V=V, VP=self.VP, BV=c.BV, GATE=gate, num_warps=4)
        each_chunk, each_sequence = self.chunks * HV, (self.N * HV, self.VP // c.BV)
        in_turn = dict(**walk, num_stages=c.stages[0], maxnreg=config.most_registers(device, self.K))
        forward, backward = delta_forward, delta_backward

        def saving(save):
            return (
                Launch(forward.delta_intra, (each_chunk,), **walk, BK=c.BK, SAVE=save, PRECISE=c.precise, num_stages=1),
                Launch(forward.delta_inter, each_sequence, **in_turn, SAVE=save),
            )

        self.forward = {save: saving(save) for save in (False, True)}
        self.inter_backward = Launch(backward.delta_inter_backward, each_sequence, **in_turn)
        self.intra_backward = Launch(
            backward.delta_intra_backward, (each_chunk,), **walk, BK=c.BK, num_stages=c.stages[1]
        )
        by_channel = dict(**common, B=16, num_warps=1, num_stages=1)
        (BK, registers), (BK_back, registers_back) = c.channel
        self.parts = c.KP // BK_back if gate == "channel" else 1
        self.channel = Launch(
            delta_channel.channel_intra, (each_chunk * max(c.C // 32, 1),), **by_channel, BK=BK, maxnreg=registers
        )
        self.channel_backward = Launch(
            delta_channel.channel_intra_backward, (each_chunk * self.parts,), **by_channel, BK=BK_back, maxnreg=registers_back
        )

    def rows(self, *shape, dtype, parts=1):
        """A buffer with one row a token, or several to be added up; zero at first where a token may have no sequence."""
        make = torch.zeros if self.packed else torch.empty
        return make(parts * self.tokens, self.HV, *shape, dtype=dtype, device=self.device)

    def work(self, shapes, dtype=None):
        """Memory for arrays with one tile of a shape a chunk and value head, in one piece: an allocation costs 8 us."""
        entries = self.chunks * self.HV * sum(map(math.prod, shapes.values()))
        return torch.empty(entries, dtype=dtype or self.config.dtype, device=self.device)

    def cut(self, work, shapes):
        """The arrays by name, that lie one after another in `work`."""
        tiles = self.chunks * self.HV
        return dict(zip(shapes, work.split([tiles * math.prod(shape) for shape in shapes.values()])))

    def state(self):
        return torch.empty(self.N, self.HV, self.K, self.V, dtype=torch.float32, device=self.device)


cached_plan = functools.lru_cache(maxsize=1024)(Plan)


def plan(q, v, g, cu_seqlens, chunk_size, symbolic=False):
    """The `Plan` of a call; `symbolic` sizes, while torch.compile traces, cannot be looked up."""
    gate = "none" if g is None else "scalar" if g.dim() == 3 else "channel"
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    make = Plan if symbolic else cached_plan
    return make(q.shape, *v.shape[2:], q.dtype, q.device, gate, sequences, chunk_size)


def kept_shapes(p, save=True):
    """The work arrays of the forward pass that the backward pass reads, U in the end V'; those in float32 apart."""
    C, KP, VP = p.config.C, p.config.KP, p.VP
    shapes = dict(P=(C, C), W=(C, KP), U=(VP, C), q_start=(C, KP), k_end=(C, KP))
    shapes |= dict(M=(C, C), states=(VP, KP)) if save else {}
    return shapes, {"none": {}, "scalar": dict(decay=(1,)), "channel": dict(decay=(KP,))}[p.gate]


def named(p, kept, save=True):
    """The arrays of `kept_shapes`, by name."""
    pairs = zip(kept, kept_shapes(p, save))
    return {name: array for work, shapes in pairs for name, array in p.cut(work, shapes).items()}


def handed_shapes(p):
    """What the sequential half of the backward pass hands to the parallel one, and what that hands to a channel gate's."""
    C, KP, VP = p.config.C, p.config.KP, p.VP
    handed = dict(dP=(C, C), dA=(C, C), dQ_s=(C, KP), dK_e=(C, KP), dK_s=(C, KP)) if p.gate == "channel" else {}
    return dict(dv_new=(VP, C), dstates=(VP, KP)), handed


def run_forward(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, save, final, out_dtype, traced=False
):  # fmt: skip
    """o, the last state if `final`, and if `save` the arrays that `run_backward` takes as `kept`."""
    p = plan(q, v, g, cu_seqlens, chunk_size, traced)
    o, last = p.rows(p.V, dtype=out_dtype), p.state() if final else None
    shapes, float_shapes = kept_shapes(p, save)
    kept = [p.work(shapes), *([p.work(float_shapes, torch.float32)] if float_shapes else [])]
    if not traced:
        get = named(p, kept, save).get
        sizes, A = (p.T, p.NT, p.H, p.HV), None
        first_chunk, table = chunk_table(cu_seqlens, p.T, p.config.C) if p.packed else (None, None)
        intra, inter = p.forward[save]
        with on_device(q):
            if p.gate == "channel":
                A = p.work(dict(A=(p.config.C, p.config.C)), torch.float32)
                p.channel(
                    q, k, g, get("P"), A, get("W"), get("q_start"), get("k_end"), get("decay"), table, scale, *sizes
                )
            intra(
                q, k, v, g, beta, A, get("P"), get("M"), get("W"), get("U"), get("q_start"), get("k_end"), get("decay"),
                table, scale, *sizes,
            )  # fmt: skip
            inter(
                get("q_start"), get("k_end"), get("W"), get("U"), get("P"), get("decay"), initial_state, o, get("states"),
                last, cu_seqlens, first_chunk, p.T, p.NT, p.HV,
            )  # fmt: skip
    return o.view(v.shape), last, kept if save else []


def run_backward(
    do, dlast, q, k, v, g, beta, initial_state, cu_seqlens, kept, scale, chunk_size, traced=False
):  # fmt: skip
    """dq, dk, dv, dg, dbeta and the gradient of the initial state, None for an input that is None."""
    p = plan(q, v, g, cu_seqlens, chunk_size, traced)
    shared = torch.float32 if p.HV > p.H else v.dtype
    dq, dk, dv = p.rows(p.K, dtype=shared), p.rows(p.K, dtype=shared), p.rows(p.V, dtype=v.dtype)
    dg = None if g is None else p.rows(*g.shape[3:], dtype=torch.float32)
    dbeta = p.rows(dtype=torch.float32, parts=p.parts)
    dfirst = None if initial_state is None else p.state()
    if not traced:
        sizes = p.T, p.NT, p.H, p.HV
        get = named(p, kept).get
        first_chunk, table = chunk_table(cu_seqlens, p.T, p.config.C) if p.packed else (None, None)
        shapes, handed_on = handed_shapes(p)
        dv_new, dstates, *handed = p.cut(p.work(shapes | handed_on), shapes | handed_on).values()
        if p.gate == "channel":
            handed.append(p.work(dict(ddecay=(p.config.KP,)), torch.float32))
        with on_device(q):
            p.inter_backward(
                get("q_start"), get("k_end"), get("W"), get("P"), get("decay"), do, dlast, dv_new, dstates, dfirst,
                cu_seqlens, first_chunk, p.T, p.NT, p.HV,
            )  # fmt: skip
            p.intra_backward(
                q, k, v, g, beta, get("P"), get("M"), get("decay"), do, get("U"), dv_new, get("states"), dstates,
                initial_state, dlast, *(handed or [None] * 6), dq, dk, dv, dg, dbeta, cu_seqlens, table, scale, *sizes,
            )  # fmt: skip
            if p.gate == "channel":
                p.channel_backward(
                    q, k, g, beta, get("decay"), *handed, dq, dk, dg, dbeta, table, scale, *sizes, p.tokens
                )
    dg = None if g is None else dg.view(g.shape)
    dbeta = dbeta.view(beta.shape) if p.parts == 1 else dbeta.view(p.parts, *beta.shape).sum(0)
    return shared_heads(dq, q), shared_heads(dk, k), dv.view(v.shape), dg, dbeta, dfirst
