"""Softmax attention, the baseline: exact, with a cache of keys and values that grows with every token.

    o_t = sum_i p_ti v_i,    p_ti = exp(s_ti) / sum_j exp(s_tj),    s_ti = scale * q_t^T k_i,    i <= t if causal

Source: Vaswani et al. 2017, eq. 1. Query heads come in groups: head i reads key/value head i // (HQ // H), so that
q is [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V] and o [B, T, HQ, V]. The state is the KV cache, the keys and values
of the L tokens so far.

Each `attend_*` below computes this one function for queries [..., T, K] over keys [..., L, K] and values [..., L, V];
the queries are the last T of the L tokens.
"""

from functools import partial

import torch
import torch.nn.functional as F

from linattn_edu import validate
from linattn_edu.forms import computing_dtype, full_precision
from linattn_edu.validate import Sizes


def seen(T, L, causal, device):
    """The mask [T, L]: query t is token L - T + t; it sees that token and those before it, or all of them."""
    mask = torch.ones(T, L, dtype=torch.bool, device=device)
    return mask.tril(L - T) if causal else mask


def attend_at_once(q, k, v, scale, causal):
    """The T x L matrix of weights, in full."""
    scores = scale * q @ k.mT
    scores = scores.masked_fill(~seen(*scores.shape[-2:], causal, q.device), -torch.inf)
    return scores.softmax(-1) @ v


def attend_by_row(q, k, v, scale, causal):
    """One query after another, each over the keys that it sees: what decoding with a KV cache computes."""
    T, L = q.shape[-2], k.shape[-2]
    rows = []
    for t in range(T):
        past = L - T + t + 1 if causal else L
        rows.append(attend_at_once(q[..., t : t + 1, :], k[..., :past, :], v[..., :past, :], scale, False))
    return torch.cat(rows, -2)


def attend_online(q, k, v, scale, causal, C):
    """The online softmax: keys come in blocks of C; each query holds a running maximum m, sum z and output o.

        m' = max(m, max_i s_i)    z' = e^(m - m') z + sum_i e^(s_i - m')    o' = e^(m - m') o + sum_i e^(s_i - m') v_i

    and o / z is returned, without a T x L matrix. Source: Milakov and Gimelshein 2018; Dao et al. 2022, alg. 1.
    """
    T, L = q.shape[-2], k.shape[-2]
    rows = []
    for a in range(0, T, C):
        q_a = q[..., a : a + C, :]
        visible = L - T + a + q_a.shape[-2] if causal else L
        mask = seen(q_a.shape[-2], visible, causal, q.device)
        m = q_a.new_full((*q_a.shape[:-1], 1), -torch.inf)
        z, o = torch.zeros_like(m), q_a.new_zeros(*q_a.shape[:-1], v.shape[-1])
        for b in range(0, visible, C):
            block = slice(b, min(b + C, visible))
            s = (scale * q_a @ k[..., block, :].mT).masked_fill(~mask[:, block], -torch.inf)
            m, before = torch.maximum(m, s.amax(-1, keepdim=True)), m
            p, shrink = (s - m).exp(), (before - m).exp()
            z, o = shrink * z + p.sum(-1, keepdim=True), shrink * o + p @ v[..., block, :]
        rows.append(o / z)
    return torch.cat(rows, -2)


def attend_sdpa(q, k, v, scale, causal):
    """torch's scaled_dot_product_attention: FlashAttention where the device has it."""
    T, L = q.shape[-2], k.shape[-2]
    if causal and T == L:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    mask = seen(T, L, True, q.device) if causal and T > 1 else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _check(q, k, v, scale, mark="", T="T "):
    sizes, like = Sizes(), (f"q{mark}", q)
    validate.floating_tensor(f"q{mark}", q, f"B {T}HQ K", sizes)
    validate.floating_tensor(f"k{mark}", k, f"B {T}H K", sizes, like=like, share_dtype=True)
    validate.floating_tensor(f"v{mark}", v, f"B {T}H V", sizes, like=like, share_dtype=True)
    validate.head_ratio("HQ", "H", sizes, f"q{mark}")
    return sizes, sizes["K"] ** -0.5 if scale is None else validate.number("scale", scale)


def _check_cache(state, sizes, like, name):
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"`{name}`: got {validate.describe(state)}, expected the tuple (k, v)")
    validate.floating_tensor(f"{name}[0]", state[0], "B L H K", sizes, like=like, share_dtype=True)
    validate.floating_tensor(f"{name}[1]", state[1], "B L H V", sizes, like=like, share_dtype=True)


def _extended(state, k, v):
    """The KV cache with the new keys and values appended."""
    return torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)


def _heads(attend, q, k, v):
    """Run `attend` head by head on tensors [B, T, H, ...]."""
    if q.shape[1] == 0:
        nothing = sum(x[:, :0].sum() for x in (q, k, v))  # 0, and part of every input's graph
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + nothing
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) if group > 1 else x for x in (k, v))
    return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()


def _run(attend, q, k, v, causal, scale, initial_state, output_final_state, cu_seqlens, upcast=True):
    sizes, scale = _check(q, k, v, scale)
    validate.flag("causal", causal)
    validate.flag("output_final_state", output_final_state)
    keys, values = k, v
    if initial_state is not None:
        _check_cache(initial_state, sizes, ("q", q), "initial_state")
        keys, values = _extended(initial_state, k, v)
    bounds = None
    if cu_seqlens is not None:
        if initial_state is not None or output_final_state:
            raise ValueError(
                "`cu_seqlens`: got packed sequences together with `initial_state` or `output_final_state`, "
                "expected one or the other: a KV cache holds sequences of one length"
            )
        bounds = validate.sequence_bounds(cu_seqlens, sizes, q.device)
    attend = partial(_heads, partial(attend, scale=scale, causal=causal))
    with full_precision(q):
        xs = [x.to(computing_dtype(q) if upcast else q.dtype) for x in (q, keys, values)]
        if bounds is None:
            o = attend(*xs)
        else:
            pieces = zip([0, *bounds], bounds)
            o = torch.cat([attend(*(x[:, start:stop] for x in xs)) for start, stop in pieces], 1)
    if not output_final_state:
        return o.to(v.dtype), None
    return o.to(v.dtype), (k.clone(), v.clone()) if initial_state is None else (keys, values)


ARGUMENTS = """

Args:
    q: [B, T, HQ, K]; query head i reads key/value head i // (HQ // H).
    k, v: [B, T, H, K] and [B, T, H, V]; q, k and v share one floating dtype.
    causal: a token sees itself and what precedes it; otherwise all tokens.
    scale: factor of the scores, K ** -0.5 if None.
    initial_state: the KV cache, the tuple k [B, L, H, K], v [B, L, H, V] of L earlier tokens.
    output_final_state: return the cache with the T tokens appended, else None in its place.
    cu_seqlens: integers [N+1], the bounds of N sequences packed into one row (B = 1); not with a state.

Returns:
    o [B, T, HQ, V] in the dtype of v, and the cache or None.

Raises:
    ValueError: a wrong shape, dtype, device, head ratio or value.
    TypeError: an argument that is missing, or is no tensor or number."""


def _form(function):
    """Check the arguments' names, and complete the docstring."""
    function.__doc__ += ARGUMENTS
    return validate.named(function)


@_form
def recurrent(
    q, k, v, *, causal=True, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """One query after another over its own past: o_t = softmax(scale * q_t^T K_t) V_t."""
    return _run(attend_by_row, q, k, v, causal, scale, initial_state, output_final_state, cu_seqlens)


@_form
def parallel(
    q, k, v, *, causal=True, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """All at once: O = softmax(scale * Q K^T + mask) V, with the T x T matrix in memory."""
    return _run(attend_at_once, q, k, v, causal, scale, initial_state, output_final_state, cu_seqlens)


@_form
def chunkwise(
    q, k, v, *, causal=True, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=64
):
    """The online softmax over blocks of `chunk_size` keys: the same sums, O(T) memory (see `attend_online`)."""
    attend = partial(attend_online, C=validate.count("chunk_size", chunk_size))
    return _run(attend, q, k, v, causal, scale, initial_state, output_final_state, cu_seqlens)


@_form
def fused(
    q, k, v, *, causal=True, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=64
):
    """torch's scaled_dot_product_attention in the dtype of the inputs; it chooses its own blocks."""
    validate.count("chunk_size", chunk_size)
    return _run(attend_sdpa, q, k, v, causal, scale, initial_state, output_final_state, cu_seqlens, upcast=False)


@validate.named
def step(q_t, k_t, v_t, state, *, scale=None):
    """One token, for decoding: append k_t and v_t to the cache, o_t = softmax(scale * q_t^T K_t) V_t.

    Args:
        q_t: [B, HQ, K].
        k_t, v_t: [B, H, K] and [B, H, V].
        state: the KV cache, the tuple k [B, L, H, K], v [B, L, H, V].
        scale: factor of the scores, K ** -0.5 if None.

    Returns:
        o_t [B, HQ, V] in the dtype of v_t, and the cache with L + 1 tokens.

    Raises:
        ValueError: a wrong shape, dtype, device, head ratio or value.
        TypeError: an argument that is missing, or is no tensor or number.
    """
    sizes, _ = _check(q_t, k_t, v_t, scale, "_t", "")
    _check_cache(state, sizes, ("q_t", q_t), "state")
    q, k, v = (x[:, None] for x in (q_t, k_t, v_t))
    o, state = _run(attend_at_once, q, k, v, True, scale, state, True, None)
    return o[:, 0], state
