"""The kernels as one differentiable operation: an autograd function, and two custom ops for torch.compile.

torch.compile cannot look into a launch; a custom op it takes as it is. A call of one costs a CPU some 100 us, more than
all that is left here, so that an eager call goes without.
"""

from typing import List  # noqa: UP035, PyTorch 2.4 knows no other list in the schema of an operator

import torch
from torch import Tensor

from linattn_edu.kernels import additive, delta
from linattn_edu.kernels.device import on_device
from linattn_edu.kernels.launch import first_derivatives, side_by_side


def family(beta):
    """The module whose `run_forward` and `run_backward` serve a call."""
    return additive if beta is None else delta


compiled = set()


def compile_ahead(inputs, scale, chunk_size, save, final, out_dtype):
    """Before the first call of its kind: the kernels of the forward pass, if `save` also of the backward pass, side by side.

    Compiled one after another when they are first needed, they would make the reader of a notebook wait several times as
    long. What a call needs is asked of the call itself, made without running anything.
    """
    q, k, v, *others = inputs
    axes = tuple(None if x is None else x.dim() for x in others)
    kind = q.device, q.dtype, q.shape[3], v.shape[3], q.shape[2] == v.shape[2], axes, chunk_size, save, final, out_dtype
    if kind in compiled:
        return
    compiled.add(kind)
    rule = family(others[1])
    with on_device(q), side_by_side(q):
        o, last, kept = rule.run_forward(*inputs, scale, chunk_size, save, final, out_dtype)
        if save:
            rule.run_backward(o, last, *inputs, kept, scale, chunk_size)


class Chunk(torch.autograd.Function):
    """o and the last state (None unless `final`)."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, final, out_dtype):
        inputs = q, k, v, g, beta, initial_state, cu_seqlens
        o, last, kept = family(beta).run_forward(*inputs, scale, chunk_size, True, final, out_dtype)
        ctx.save_for_backward(*inputs, *kept)
        ctx.scale, ctx.chunk_size = scale, chunk_size
        ctx.set_materialize_grads(False)
        return o, last

    @staticmethod
    @first_derivatives
    def backward(ctx, do, dlast):
        q, k, v, g, beta, initial_state, cu_seqlens, *kept = ctx.saved_tensors
        do = torch.zeros_like(v) if do is None else do.contiguous()
        dlast = None if dlast is None else dlast.contiguous()
        gradients = family(beta).run_backward(
            do, dlast, q, k, v, g, beta, initial_state, cu_seqlens, kept, ctx.scale, ctx.chunk_size
        )  # fmt: skip
        return *gradients, None, None, None, None, None


def chunk(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, final, out_dtype):
    """o in `out_dtype`, and the last state if `final`, else None: differentiable in every floating tensor."""
    inputs = q, k, v, g, beta, initial_state, cu_seqlens
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if torch.compiler.is_compiling():
        o, *others = chunk_forward(*inputs, scale, chunk_size, save, final, out_dtype)
        return o, others[0] if final else None
    if q.is_cuda:
        compile_ahead(inputs, scale, chunk_size, save, final, out_dtype)
    if save:
        return Chunk.apply(*inputs, scale, chunk_size, final, out_dtype)
    return family(beta).run_forward(*inputs, scale, chunk_size, False, final, out_dtype)[:2]


def _forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, save, final, out_dtype, traced=False):
    inputs = q, k, v, g, beta, initial_state, cu_seqlens
    o, last, kept = family(beta).run_forward(*inputs, scale, chunk_size, save, final, out_dtype, traced)
    return [o, *([last] if final else []), *kept]


@torch.library.custom_op("linattn_edu::chunk_forward", mutates_args=())
def chunk_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int, save: bool, final: bool, out_dtype: torch.dtype,
) -> List[Tensor]:  # fmt: skip
    """[o], then the last state if `final`, then if `save` the arrays that the backward pass reads."""
    return _forward(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size, save, final, out_dtype)


@chunk_forward.register_fake
def _(*args):
    return _forward(*args, traced=True)


def _backward(do, dlast, q, k, v, g, beta, initial_state, cu_seqlens, kept, scale, chunk_size, traced=False):
    inputs = q, k, v, g, beta, initial_state, cu_seqlens
    gradients = family(beta).run_backward(do, dlast, *inputs, kept, scale, chunk_size, traced)
    return [dx for dx in gradients if dx is not None]


@torch.library.custom_op("linattn_edu::chunk_backward", mutates_args=())
def chunk_backward(
    do: Tensor, dlast: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, kept: List[Tensor], scale: float, chunk_size: int,
) -> List[Tensor]:  # fmt: skip
    """The gradients of those of q, k, v, g, beta and initial_state that are there."""
    return _backward(do, dlast, q, k, v, g, beta, initial_state, cu_seqlens, kept, scale, chunk_size)


@chunk_backward.register_fake
def _(*args):
    return _backward(*args, traced=True)


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.chunk_size, ctx.saved, ctx.final, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1 + ctx.final :])


def _differentiate(ctx, grads):
    q, k, v, g, beta, initial_state, cu_seqlens, *kept = ctx.saved_tensors
    do, dlast = grads[0], grads[1] if ctx.final else None
    if not ctx.saved or any(x is not None for x in grads[1 + ctx.final :]):
        raise RuntimeError("the arrays that the backward pass needs were not kept, or are not differentiable")
    do = torch.zeros_like(v) if do is None else do.contiguous()
    dlast = None if dlast is None else dlast.contiguous()
    inputs = q, k, v, g, beta, initial_state
    found = iter(chunk_backward(do, dlast, *inputs, cu_seqlens, kept, ctx.scale, ctx.chunk_size))
    return *(None if x is None else next(found) for x in inputs), None, None, None, None, None, None


chunk_forward.register_autograd(_differentiate, setup_context=_setup)
