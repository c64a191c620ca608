"""Linear attention with a scalar decay: before each write the whole state shrinks by alpha_t = exp(g_t).

    S_t = exp(g_t) S_{t-1} + k_t v_t^T
    o_t = scale * S_t^T q_t

Without feature map and without normaliser. A constant g_t = log(gamma) for each head is RetNet (Sun et al. 2023, eqs.
5-7), a g_t that depends on the token is Mamba-2 (Dao and Gu 2024).

Where the papers differ: RetNet's code scales k instead of q and rotates both by xPos, which belongs to the layer; its
normalisation of scores is invisible behind the head-wise norm. Mamba-2 ties decay and write by one step size,
g_t = Delta_t A and v_t = Delta_t x_t, with k = B, q = C and no scale; here g and v are independent.
"""

import torch

from linattn_edu import linear, validate
from linattn_edu.algebra import decay_matrix, outer, scan, since_start, to_end
from linattn_edu.forms import Operator, computing_dtype, full_precision, share_heads
from linattn_edu.validate import Sizes


def update(q, k, v, g, S):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t."""
    return linear.update(q, k, v, g.exp()[..., None, None] * S)


def intra(q, k, v, g):
    """In a block from the state S, D_ij = exp(g_{j+1} + ... + g_i) for i >= j, else 0:

    O = (Q K^T * D) V + Diag(since_start) Q S,   S' = decay S + (Diag(to_end) K)^T V,
    since_start_i = exp(g_1 + ... + g_i),   to_end_i = exp(g_{i+1} + ... + g_C),
    decay = since_start_C.
    """
    start, end = since_start(g[..., None]), to_end(g[..., None])
    return (q @ k.mT * decay_matrix(g)) @ v, start * q, (end * k).mT @ v, start[..., -1:, :]


def inter(o, q, kv, decay, S):
    return o + q @ S, decay * S + kv


operator = Operator(
    update,
    intra,
    inter,
    gates={"g": "B T HV or HV"},
    source="Sun et al. 2023, RetNet, eqs. 5-7 (constant g); Dao and Gu 2024 (2405.21060), Mamba-2 (g by token).",
)
recurrent, parallel, chunkwise, fused, step = operator.forms(__name__)


def retnet_log_decay(H, *, dtype=None, device=None):
    """RetNet's decay of each head, g_h = log(1 - 2^(-5-h)).

    The half-life is 21.8 tokens in head 0 and about twice that of the head before in every other.

    Args:
        H: number of heads.
        dtype, device: of the result; torch's defaults if None.

    Returns:
        g [H].

    Source: Sun et al. 2023, eq. 8. The paper's experiments (section 3.1) use 1 - exp(linspace(log 1/32, log 1/512, H)).
    """
    H = validate.count("H", H)
    g = torch.log1p(-(2.0 ** (-5 - torch.arange(H, dtype=torch.float64))))
    return g.to(device=device, dtype=dtype or torch.get_default_dtype())


@validate.named
def convolution(q, k, v, *, g, scale=None):
    """With one constant decay a head the state is a convolution over time, computed by FFT.

    S_t = sum_{i<=t} exp(g (t - i)) k_i v_i^T,   o_t = scale * S_t^T q_t.

    Each of the K x V entries of the state is filtered by the same kernel exp(g n): O(T log T) for each entry, where
    the recurrence needs O(T), and errors that are small beside the largest entry instead of each one. With a g_t that
    depends on the token the weight of token i is exp(g_{i+1} + ... + g_t), no function of t - i, and no kernel exists.

    Args:
        q, k: [B, T, H, K]; q, k and v share one floating dtype.
        v: [B, T, HV, V]; value head i reads query/key head i // (HV // H).
        g: [HV], natural-log decay, finite and at most 0.
        scale: factor of the output, K ** -0.5 if None.

    Returns:
        o [B, T, HV, V] in the dtype of v, and None in the place of a state.

    Raises:
        ValueError: a wrong shape, dtype, device, head ratio or value; a g that depends on the token.
        TypeError: an argument that is missing, or is no tensor or number.

    Source: Gu and Dao 2023, eq. 3, for a scalar decay.
    """
    if isinstance(g, torch.Tensor) and g.dim() != 1:
        raise ValueError(f"`g`: got shape {list(g.shape)}, expected [HV]: only a constant decay makes a convolution")
    validate.floating_tensor("g", g, "HV", Sizes())
    space, sizes, _ = operator.check(q, k, v, {"g": g})
    scale = space.scale(scale, sizes["K"])
    with full_precision(q):
        q, k, x, g = (y.to(computing_dtype(q)) for y in (q, k, v, g))
        q, k = share_heads(scale * q, k, sizes["HV"])
        return causal_filter(q, k, x, g).to(v.dtype), None


def causal_filter(q, k, v, g):
    """o_t = sum_c q_tc sum_{i<=t} exp(g (t - i)) k_ic v_i, one key channel c at a time to keep the memory at O(T V)."""
    T = q.shape[1]
    if T == 0:
        return v + (q.sum() + k.sum() + g.sum())
    n = 2 * T  # zeros behind the sequence, so that the circle of the FFT does not bring the end back to the start
    lag = torch.arange(T, dtype=g.dtype, device=g.device)[:, None]
    kernel = torch.fft.rfft((lag * g).exp(), n, dim=0)[..., None]
    o = 0
    for q_c, k_c in zip(q.split(1, -1), k.split(1, -1)):
        o = o + q_c * torch.fft.irfft(kernel * torch.fft.rfft(k_c * v, n, dim=1), n, dim=1)[:, :T]
    return o


@validate.named
def prefix_states(k, v, *, g=None):
    """All states of a sequence at once, S_t = exp(g_t) S_{t-1} + k_t v_t^T, by an associative scan.

    Without decay S_t is a prefix sum, and the sum of pairs may be taken first: two tokens act like one with decay
    exp(g_1 + g_2) and write exp(g_2) k_1 v_1^T + k_2 v_2^T. The T dependent steps become 2 log2(T) levels of
    independent ones, in about twice the work of the recurrence. What it costs is memory: T states of K V numbers, where
    a chunkwise form needs T / C of them and the recurrence one.

    Args:
        k: [B, T, H, K]; k and v share one floating dtype.
        v: [B, T, HV, V]; value head i reads key head i // (HV // H).
        g: [B, T, HV] or [HV], natural-log decay, finite and at most 0; none if None.

    Returns:
        S [B, T, HV, K, V] in float32, or float64 for float64 inputs; S[:, -1] is the final state of the forms.

    Raises:
        ValueError: a wrong shape, dtype, device or head ratio.
        TypeError: an argument that is missing or no tensor.

    Source: Blelloch 1990.
    """
    sizes, like = Sizes(), ("k", k)
    validate.floating_tensor("k", k, "B T H K", sizes)
    validate.floating_tensor("v", v, "B T HV V", sizes, like=like, share_dtype=True)
    validate.head_ratio("HV", "H", sizes, "v")
    if g is None:
        g = k.new_zeros(sizes["HV"])
    validate.floating_tensor("g", g, "HV" if torch.is_tensor(g) and g.dim() == 1 else "B T HV", sizes, like=like)
    with full_precision(k):
        k, v, g = (x.to(computing_dtype(k)) for x in (k, v, g.expand(v.shape[:-1])))
        _, k = share_heads(k, k, sizes["HV"])
        return scan(g.exp()[..., None, None], outer(k, v))
