"""The launches of `forward` and `backward`: five kernels, for every gate, with the delta rule and without."""

import torch

from linattn_edu.kernels import backward, forward
from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import chunk_table, plan, shared_heads


def kept_names(p):
    """The work arrays of the forward pass that the backward pass reads."""
    gated = ["q_start", "k_end", "decay"] if p.gate != "none" else []
    return ["P", *gated, *(["M", "W", "U", "v_new"] if p.delta else []), "states"]


def forward_buffers(p, save, final, out_dtype):
    x = dict(o=p.rows(p.V, dtype=out_dtype), last=p.state() if final else None, P=p.rows(p.config.C))
    if p.gate != "none":
        x |= dict(q_start=p.rows(p.K), k_end=p.rows(p.K), decay=p.per_chunk(p.K if p.gate == "channel" else 1))
    if p.delta:
        x |= dict(M=p.rows(p.config.C), W=p.rows(p.K), U=p.rows(p.V))
    if save:
        x |= dict(states=p.per_chunk(p.K, p.V, dtype=p.config.dtype))
        x |= dict(v_new=p.rows(p.V)) if p.delta else {}
    return x


def run_forward(
    q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, save, final, out_dtype, traced=False
):  # fmt: skip
    """o, the last state if `final`, and if `save` the arrays that `run_backward` takes as `kept`."""
    p = plan(q, v, g, beta, cu_seqlens, chunk_size, traced)
    x = forward_buffers(p, save, final, out_dtype)
    get, plain = x.get, p.gate == "none"
    if not traced:
        first_chunk, table = chunk_table(cu_seqlens, p.T, p.config.C) if p.packed else (None, None)
        with on_device(q):
            if p.chunks:
                forward.intra[p.chunks, p.HV](
                    q, k, v, g, beta, get("P"), get("M"), get("W"), get("U"), get("q_start"), get("k_end"),
                    get("decay"), table, scale, p.T, p.NT, p.H, p.HV, PRECISE=p.config.precise,
                    **p.switches, **p.tiles("intra"),
                )  # fmt: skip
            if p.N:
                grid, tiles = p.walk("inter")
                forward.inter[grid](
                    q if plain else get("q_start"), k if plain else get("k_end"), get("U", v), get("P"), get("W"),
                    get("decay"), initial_state, get("o"), get("v_new"), get("states"), get("last"), cu_seqlens,
                    first_chunk, scale if plain else 1.0, p.T, p.NT, p.H if plain else p.HV, p.HV,
                    SAVE=save, **p.switches, **tiles,
                )  # fmt: skip
    return x["o"].view(v.shape), x["last"], [x[name] for name in kept_names(p)] if save else []


def run_backward(
    do, dlast, q, k, v, g, beta, initial_state, cu_seqlens, kept, scale, chunk_size, traced=False
):  # fmt: skip
    """dq, dk, dv, dg, dbeta and the gradient of the initial state, None for an input that is None."""
    p = plan(q, v, g, beta, cu_seqlens, chunk_size, traced)
    plain, shared = p.gate == "none", torch.float32 if p.HV > p.H else v.dtype
    dq, dk, dv = p.rows(p.K, dtype=shared), p.rows(p.K, dtype=shared), p.rows(p.V, dtype=v.dtype)
    dfirst = None if initial_state is None else p.state()
    dg = None if plain else p.rows(*g.shape[3:], dtype=torch.float32)
    dbeta = p.rows(dtype=torch.float32) if p.delta else None
    if not traced:
        get = dict(zip(kept_names(p), kept)).get
        first_chunk, table = chunk_table(cu_seqlens, p.T, p.config.C) if p.packed else (None, None)
        dv_new = p.rows(p.V) if p.delta else dv
        dstates = p.per_chunk(p.K, p.V, dtype=p.config.dtype)
        dq_start, dk_end = p.rows(p.K), p.rows(p.K)
        dK_b = p.rows(p.K) if p.delta else None
        ddecay = None if plain else p.per_chunk(p.K)
        with on_device(q):
            if p.N:
                grid, tiles = p.walk("inter_backward")
                backward.inter_backward[grid](
                    q if plain else get("q_start"), k if plain else get("k_end"), get("P"), get("W"), get("decay"),
                    do, dlast, dv_new, dstates, dfirst, cu_seqlens, first_chunk, scale if plain else 1.0,
                    p.T, p.NT, p.H if plain else p.HV, p.HV, **p.switches, **tiles,
                )  # fmt: skip
            if p.chunks:
                tiles = p.tiles("state_backward")
                backward.state_backward[p.chunks, p.HV, -(-p.K // tiles["BK"])](
                    get("M"), do, get("v_new", v), dv_new, get("states"), dstates, dq_start, dk_end, dK_b, ddecay,
                    table, p.T, p.NT, p.HV, **p.switches, **tiles,
                )  # fmt: skip
                backward.intra_backward[p.chunks, p.HV](
                    q, k, v, g, beta, get("P"), get("M"), get("W"), get("U"), do, get("v_new", v), dv_new, dq_start,
                    dk_end, dK_b, ddecay, dq, dk, dv, dg, dbeta, table, scale,
                    p.T, p.NT, p.H, p.HV, **p.switches, **p.tiles("intra_backward"),
                )  # fmt: skip
    dg, dbeta = (None if x is None else dx.view(x.shape) for dx, x in ((dg, g), (dbeta, beta)))
    return shared_heads(dq, q), shared_heads(dk, k), dv.view(v.shape), dg, dbeta, dfirst
