"""The additive rules, S' = Diag(decay) S + k v^T: which walks over which tensors make a forward and a backward pass."""

import functools

import torch

from linattn_edu.kernels import channel, walk
from linattn_edu.kernels.config import additive, most_registers, multiprocessors, power_of_two
from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import DTYPES, Launch, chunk_table


class Plan:
    """Sizes, segments and launches of all calls with inputs of one shape, dtype and device."""

    def __init__(self, shape, HV, V, dtype, device, gate, sequences, chunk_size):
        B, T, H, self.K = shape
        self.T, self.H, self.HV, self.V, self.gate, self.dtype, self.device = T, H, HV, V, gate, dtype, device
        self.by_channel, self.packed = gate == "channel", sequences is not None
        self.N = sequences if self.packed else B
        self.config = c = additive(device, dtype, self.K, V, gate, chunk_size)
        self.parts, self.launches = {}, {}
        programs = B * HV * min(self.blocks(self.K, V), self.blocks(V, self.K))
        self.NS, self.L = self.cut(programs)
        self.segments = T // self.L + self.N if self.packed else B * self.NS
        self.several = self.packed or self.NS > 1
        self.chunks = self.segments * (self.L // c.C)
        self.sizes = T, self.L, self.NS
        self.rows = B, T, HV
        digits = 24 - (c.C.bit_length() - 1) if c.dtype == torch.bfloat16 else 40
        self.whole = torch.int32 if digits < 24 else torch.int64
        self.shared = dict(PACKED=self.packed, C=c.C, DTYPE=DTYPES[c.dtype], PRECISION=c.precision, DIGITS=digits)

    def cut(self, programs):
        """Segments a sequence and their tokens: none are cut if the sequences alone give every multiprocessor work."""
        c, wanted = self.config, multiprocessors(self.device)
        NS = 1 if programs >= wanted else max(1, min(c.programs * wanted // programs, self.T // c.least))
        L = -(-self.T // (NS * c.C)) * c.C
        return -(-self.T // L), L

    def splits(self, X):
        """Programs that share X features, each with a part of the sum in o."""
        if X not in self.parts:
            self.parts[X] = -(-X // self.config.tile(X, 1)[0])
        return self.parts[X]

    def blocks(self, X, Y):
        return self.splits(X) * -(-Y // self.config.tile(X, Y)[1])

    def empty(self, *shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=self.device)

    def output(self, Y, dtype, X=1):
        """[B, T, HV, Y], or as many parts of it as programs share X; 0 at first where a token may have no sequence."""
        n, make = self.splits(X), torch.zeros if self.packed else torch.empty
        shape = (*self.rows, *Y) if n == 1 else (n, *self.rows, *Y)
        return make(shape, dtype=dtype if n == 1 else torch.float32, device=self.device)

    def walk(self, X, Y, reverse, transposed):
        """The launch of `walk` for operands of X and Y channels."""
        key = X, Y, reverse, transposed
        if key not in self.launches:
            BX, BY, warps, stages = self.config.tile(X, Y)
            self.launches[key] = Launch(
                walk.walk, (self.segments * self.HV, -(-Y // BY), -(-X // BX)),
                X=X, Y=Y, BX=BX, BY=BY, GATE=self.gate, REVERSE=reverse, TRANSPOSED=transposed,
                num_warps=warps, num_stages=stages, maxnreg=most_registers(self.device, self.K), **self.shared,
            )  # fmt: skip
        return self.launches[key]

    def carry(self, reverse):
        """The launch of `carry`."""
        if reverse not in self.launches:
            BLOCK = min(1024, power_of_two(self.K * self.V))
            self.launches[reverse] = Launch(
                walk.carry, (self.N * self.HV, -(-self.K * self.V // BLOCK)),
                K=self.K, V=self.V, BLOCK=BLOCK, GATE=self.gate, REVERSE=reverse, PACKED=self.packed,
            )  # fmt: skip
        return self.launches[reverse]

    def each_chunk(self, kernel, tiles, **more):
        """The launch of a kernel with one program a chunk and value head."""
        if kernel not in self.launches:
            BK, _, warps, stages = tiles
            self.launches[kernel] = Launch(
                kernel, (self.chunks, self.HV), K=self.K, BK=BK, num_warps=warps, num_stages=stages, **more, **self.shared
            )
        return self.launches[kernel]


cached_plan = functools.lru_cache(maxsize=1024)(Plan)


def plan(q, v, g, cu_seqlens, chunk_size, traced):
    gate = "none" if g is None else "scalar" if g.dim() == 3 else "channel"
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    make = Plan if traced else cached_plan  # symbolic sizes cannot be looked up
    return make(q.shape, *v.shape[2:], q.dtype, q.device, gate, sequences, chunk_size)


def go(
    p, table, a, b, c, g, *, o=None, first=None, last=None, lost=None, scale=1.0, unit=1.0, reverse=False,
    transposed=False, P=None, states=None, kept=None, e=None, sums=None,
):  # fmt: skip
    """Walk over a, b and c; `transposed` if they carry the transpose of the state."""
    *rows, HX, X = b.shape
    HY, Y = c.shape[2:]
    strides = (1, X) if transposed else (Y, 1)
    p.walk(X, Y, reverse, transposed and p.by_channel)(
        a, b, c, g, P, o, first, last, lost, states, kept, e, sums, table, scale, unit, *strides, *p.sizes,
        rows[0] * rows[1], HX, HY, p.HV,
    )  # fmt: skip


def table_of(p, cu_seqlens):
    return chunk_table(cu_seqlens, p.T, p.L) if p.packed else (None, None)


def whole(o, like, dtype):
    """The sum of the parts of o, and over value heads that share a head of `like`."""
    if o.dim() == 5:
        o = o.sum(0)
    if o.shape[2] > like.shape[2]:
        o = o.unflatten(2, (like.shape[2], -1)).sum(3)
    return o.to(dtype)


def kept_names(p):
    """The arrays of the forward pass that the backward pass reads."""
    segments = ["S", *(["lost"] if p.gate != "none" else [])] if p.several else []
    return segments + (["q_start", "k_end", "decay", "P", "G"] if p.by_channel else [])


def forward_buffers(p):
    x, K = {}, p.K
    if p.several:
        x["S"] = p.empty(p.segments, p.HV, K, p.V)
        x["lost"] = p.empty(p.segments, p.HV, K) if p.gate != "none" else None
    if p.by_channel:
        x |= dict(q_start=p.output([K], p.config.dtype), k_end=p.output([K], p.config.dtype))
        x |= dict(P=p.output([p.config.C], p.config.dtype), G=p.empty(*p.rows, K, dtype=p.whole))
        x |= dict(decay=p.empty(p.chunks, p.HV, K))
    return x


def run_forward(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, save, final, out_dtype, traced=False
):  # fmt: skip
    """o, the last state if `final`, and if `save` the arrays that `run_backward` takes as `kept`."""
    p = plan(q, v, g, cu_seqlens, chunk_size, traced)
    x = forward_buffers(p)
    kept = [x[name] for name in kept_names(p)] if save else []
    first_segment, table = (None, None) if traced else table_of(p, cu_seqlens)
    if p.by_channel and not traced:
        with on_device(q):
            p.each_chunk(channel.intra, p.config.intra)(
                q, k, g, x["G"], x["P"], x["q_start"], x["k_end"], x["decay"], table, *p.sizes, p.H, p.HV
            )
        q, k, g = x["q_start"], x["k_end"], x["decay"]
    x.pop("G", None)  # only the backward pass reads it again: without one its memory is free for o
    o = p.output([p.V], out_dtype, p.K)
    last = p.empty(p.N, p.HV, p.K, p.V) if final else None
    if not traced:
        with on_device(v):
            first, end = initial_state, last
            if p.several:
                go(p, table, None, k, v, g, last=x["S"], lost=x["lost"])
                p.carry(False)(x["S"], x["lost"], initial_state, last, first_segment, p.NS, p.HV)
                first, end = x["S"], None
            go(p, table, q, k, v, g, o=o, first=first, last=end, scale=scale, P=x.get("P"))
    return whole(o, v, out_dtype), last, kept


def run_backward(
    do, dlast, q, k, v, g, beta, initial_state, cu_seqlens, kept, scale, chunk_size, traced=False
):  # fmt: skip
    """dq, dk, dv, dg, None and the gradient of the initial state, None for an input that is None."""
    p = plan(q, v, g, cu_seqlens, chunk_size, traced)
    dtype, parts = torch.float32 if p.HV > p.H else q.dtype, 1 if p.by_channel else p.V
    dq, dk = p.output([p.K], dtype, parts), p.output([p.K], dtype, parts)
    dv = p.output([p.V], v.dtype, p.K)
    dfirst = None if initial_state is None else p.empty(p.N, p.HV, p.K, p.V)
    dg = None if g is None else p.output(g.shape[3:], torch.float32)
    if not traced:
        x = dict(zip(kept_names(p), kept))
        with on_device(q):
            walk_back(p, x, do, dlast, q, k, v, g, initial_state, cu_seqlens, scale, dq, dk, dv, dg, dfirst)
    return whole(dq, q, q.dtype), whole(dk, k, k.dtype), whole(dv, v, v.dtype), dg, None, dfirst


def walk_back(p, x, do, dlast, q, k, v, g, initial_state, cu_seqlens, scale, dq, dk, dv, dg, dfirst):
    """The launches of the backward pass."""
    first_segment, table = table_of(p, cu_seqlens)
    c, dS, end = p.config, dlast, dfirst
    q_, k_, g_ = (x["q_start"], x["k_end"], x["decay"]) if p.by_channel else (q, k, g)
    if p.several:
        dS, end = p.empty(p.segments, p.HV, p.K, p.V), None
        go(p, table, None, q_, do, g_, last=dS, unit=scale, reverse=True)
        p.carry(True)(dS, x.get("lost"), dlast, dfirst, first_segment, p.NS, p.HV)
    forth = dict(first=x.get("S", initial_state), scale=scale, transposed=True)
    back = dict(first=dS, scale=scale, unit=scale, reverse=True)
    splits, dq_, dk_, read, written, states, lasting = p.splits(p.V), dq, dk, None, None, None, None
    if g is not None:
        states, lasting = p.empty(p.chunks, p.HV, p.K, p.V), p.empty(splits, p.chunks, p.HV, p.K)
    if p.by_channel:
        dq_, dk_ = p.output([p.K], c.dtype, p.V), p.output([p.K], c.dtype, p.V)
    if p.gate == "scalar":
        blocks = p.blocks(p.V, p.K)
        read, written = p.empty(2, blocks, *p.rows)
        forth |= dict(e=q, sums=read)
        go(p, table, do, v, k_, g_, o=dq_, states=states, **forth)
        go(p, table, v, do, q_, g_, o=dk_, states=states, kept=lasting, transposed=True, e=k, sums=written, **back)
        p.each_chunk(walk.gate_gradient, c.gate_gradient, V=p.V, BV=c.gate_gradient[1])(
            q, k, v, do, g, read, written, lasting, dg, table, scale, *p.sizes, v.shape[0] * p.T, p.H, p.HV,
            blocks, splits,
        )  # fmt: skip
    else:
        go(p, table, do, v, k_, g_, o=dq_, states=states, **forth)
        go(p, table, v, do, q_, g_, o=dk_, states=states, kept=lasting, transposed=True, **back)
    go(p, table, k_, q_, do, g_, o=dv, last=end, P=x.get("P"), **back)
    if p.by_channel:
        dq_, dk_ = whole(dq_, v, c.dtype), whole(dk_, v, c.dtype)
        p.each_chunk(channel.intra_backward, c.intra_backward, V=p.V, BV=c.intra_backward[1])(
            q, k, v, do, x["G"], dq_, dk_, lasting, dq, dk, dg, table, scale, *p.sizes, p.H, p.HV, splits
        )
