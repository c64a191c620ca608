"""Short convolution: every channel mixes its last W tokens, before q, k and v are used.

    y_t = f(sum_{j<W} weight_j * x_{t-W+1+j} + bias)        products by channel, f the identity or SiLU

The last tap, weight[:, W-1], belongs to the token itself: the order in which `torch.nn.Conv1d` (groups = D) and
checkpoints hold it, which is that of time, not of the lag. What precedes the sequence comes from the state, the last
W - 1 inputs, oldest first, or is zero.

Source: the block of Gu and Dao 2023 (W = 4); on q, k and v with SiLU in Yang et al. 2024 (2406.06484) and successors.
"""

from functools import partial

import torch
import torch.nn.functional as F

from linattn_edu import kernels, validate
from linattn_edu.forms import computing_dtype, full_precision, overwrite
from linattn_edu.validate import Sizes

ACTIVATIONS = {None: lambda x: x, "silu": F.silu}


@validate.named
def causal_conv(
    x, weight, bias=None, *, activation=None, initial_state=None, output_final_state=False, cu_seqlens=None
):
    """Depthwise causal convolution, y_t = f(sum_{j<W} weight_j * x_{t-W+1+j} + bias).

    Args:
        x: [B, T, D].
        weight: [D, W]; the last tap belongs to the token itself. `Conv1d.weight[:, 0]` has this order.
        bias: [D]; none if None.
        activation: None or "silu".
        initial_state: [N, D, W-1], the inputs before the first token, oldest first, cast to the dtype of x; zero if
            None.
        output_final_state: return the last W - 1 inputs, else None in their place.
        cu_seqlens: integers [N+1], the bounds of N sequences packed into one row (B = 1).

    Returns:
        y [B, T, D] in the dtype of x, and the state [N, D, W-1] in the dtype of x, since it holds inputs and sums
        nothing; or None.

    Raises:
        ValueError: a wrong shape, dtype, device or value.
        TypeError: an argument that is missing or no tensor.
    """
    sizes = _check(x, weight, bias, activation, "x", "T ")
    validate.flag("output_final_state", output_final_state)
    packed = cu_seqlens is not None
    N = validate.sequence_count(cu_seqlens, sizes, x.device) if packed else sizes["B"]
    sizes.bind("N", N, "`cu_seqlens`" if packed else "`x`")
    if initial_state is None:
        initial_state = x.new_zeros(N, sizes["D"], sizes["W-1"])
    validate.floating_tensor("initial_state", initial_state, "N D W-1", sizes, like=("x", x))
    convolve = partial(_convolve_packed, cu_seqlens.to(x.device, torch.int64)) if packed else _convolve
    y, state = convolve(x, weight, bias, activation, initial_state)
    return y, state if output_final_state else None


@validate.named
def step(x_t, weight, state, bias=None, *, activation=None, inplace=False):
    """One token, for decoding: `x_t [B, D]`, `state [B, D, W-1]` -> y_t [B, D] and the new state.

    Other arguments and errors are those of `causal_conv`; `inplace` overwrites `state` and returns it.
    """
    sizes = _check(x_t, weight, bias, activation, "x_t", "")
    validate.flag("inplace", inplace)
    validate.floating_tensor("state", state, "B D W-1", sizes, like=("x_t", x_t))
    y, new = _convolve(x_t[:, None], weight, bias, activation, state)
    return y[:, 0], overwrite(state, new) if inplace else new


def _check(x, weight, bias, activation, name, T):
    sizes, like = Sizes(), (name, x)
    validate.floating_tensor(name, x, f"B {T}D", sizes)
    validate.floating_tensor("weight", weight, "D W", sizes, like=like)
    sizes.bind("W-1", sizes["W"] - 1, "`weight`")
    if bias is not None:
        validate.floating_tensor("bias", bias, "D", sizes, like=like)
    if activation not in tuple(ACTIVATIONS):
        raise ValueError(f"`activation`: got {activation!r}, expected None or 'silu'")
    return sizes


def _convolve(x, weight, bias, activation, state):
    """The state in front of the tokens, then one shifted product a tap, in at least float32."""
    T, dtype = x.shape[1], computing_dtype(x)
    with full_precision(x):
        seen = torch.cat([state.to(x.dtype).mT, x], 1)  # [B, W-1 + T, D]
        slide = _slide if kernels.transformed() else _Taps.apply
        y = slide(seen.to(dtype), weight.to(dtype))
        y = y if bias is None else y + bias.to(dtype)
        return ACTIVATIONS[activation](y).to(x.dtype), seen[:, T:].mT.clone()


class _Taps(torch.autograd.Function):
    """`_slide`, and as its gradient one more `_slide`; autograd's own writes a sequence of zeros for every tap.

    No `jvp`, since torch.compile takes no function that has one: in forward mode `_slide` itself serves.
    """

    @staticmethod
    def forward(seen, weight):
        return _slide(seen, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        seen, weight = ctx.saved_tensors
        T, W = dy.shape[1], weight.shape[1]
        dweight = [(dy * seen[:, j : j + T]).sum((0, 1)) for j in range(W)]
        return _slide(F.pad(dy, (0, 0, W - 1, W - 1)), weight.flip(1)), torch.stack(dweight, 1)


def _slide(x, weight):
    """x [B, T + W-1, D], weight [D, W] -> y [B, T, D], y_t = sum_j weight_j * x_{t+j}."""
    W = weight.shape[1]
    T = x.shape[1] - W + 1
    y = x[:, :T] * weight[:, 0]
    for j in range(1, W):
        y = torch.addcmul(y, x[:, j : j + T], weight[:, j])
    return y


def _convolve_packed(bounds, x, weight, bias, activation, state):
    """Each sequence behind its own past, all in one row; outputs and last inputs are picked out of it."""
    N, D, past = state.shape
    begin = bounds + past * torch.arange(N + 1, device=x.device)  # where the past of each sequence lies in the row
    before = begin[:-1, None] + torch.arange(past, device=x.device)  # [N, W-1]
    token = torch.arange(x.shape[1], device=x.device)
    place = token + past * torch.searchsorted(bounds[:-1], token, right=True)
    inputs = torch.cat([state.to(x.dtype).mT.flatten(0, 1), x[0]])
    row = torch.empty_like(inputs).index_copy(0, torch.cat([before.flatten(), place]), inputs)
    y, _ = _convolve(row[None], weight, bias, activation, x.new_zeros(1, D, past))
    return y.index_select(1, place), row[before + bounds.diff()[:, None]].mT.contiguous()
