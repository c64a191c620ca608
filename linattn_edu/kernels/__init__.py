"""Triton kernels behind `fused`: one family for every variant with q, k, v.

The additive rules have one kernel, `walk`, for the outputs and for every gradient (`additive` says over what it walks);
the delta rule has kernels of its own (`delta`). A compile-time switch says which gate there is: none, scalar, channel.
`step` is one token of every variant, `scan` is Mamba's selective scan, forward and back.
This module imports no Triton: the kernels are loaded at their first call, so that the package works without.
"""

import functools
import os
import sys

import torch

MOST_K, MOST_V, MOST_K_BEFORE_AMPERE = 256, 513, 128
"""Widths of features and values that the kernels take; a normaliser is one value channel more, hence 513."""

MOST_STATES = 256
"""States of a channel that the selective scan takes."""

ADVICE = {
    "missing": "Triton is not installed: pip install triton (Linux), or backend='torch'",
    "old": "Triton is older than 3.4, the least that compiles the kernels: upgrade torch to 2.8 or newer, or backend='torch'",
    "late": "TRITON_INTERPRET was set after Triton's first import: restart Python and set it first",
    "no-gpu": "no CUDA device: backend='torch', or set TRITON_INTERPRET=1 before Python starts to run the kernels on the CPU",
}


FLOAT64 = "float64 is computed in PyTorch: backend='torch'"


@functools.cache
def mode_of(triton_imported, interpret):
    from linattn_edu.doctor import triton_mode  # which imports this module

    return triton_mode()


def present_mode():
    """`mode`, asked again only if the answer may have changed."""
    return mode_of("triton" in sys.modules, os.environ.get("TRITON_INTERPRET"))


def mode():
    """How kernels run in this process, in the words of `doctor.triton_mode`."""
    if not torch.compiler.is_compiling():
        return present_mode()
    from linattn_edu.kernels.probe import mode

    return mode()


@functools.cache
def capability_of(device):
    return torch.cuda.get_device_capability(device)


def transformed():
    """Whether torch.func or forward-mode derivatives are at work: a kernel would not see what they add to a tensor."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def obstacle_to_scan(u, N):
    """`obstacle` for the selective scan, which bounds the states of a channel instead of K and V."""
    if N > MOST_STATES:
        return f"the kernel serves N <= {MOST_STATES} states a channel, got N = {N}: backend='torch'"
    return obstacle(u, 1, 1)


def obstacle(q, K, V):
    """Why the kernels cannot take queries like `q` with K features and V value channels, with advice; None if they can."""
    how = mode()
    if how in ADVICE:
        return ADVICE[how]
    if q.dtype == torch.float64:
        return FLOAT64
    if transformed():
        return "torch.func and forward-mode derivatives need the formulas in PyTorch: backend='torch'"
    if how == "gpu" and not q.is_cuda:
        return f"the tensors are on the {q.device.type}: move them to the CUDA device, or backend='torch'"
    if how == "interpret" and q.device.type != "cpu":
        return "under TRITON_INTERPRET=1 kernels run on CPU tensors alone: restart Python without it"
    before_ampere = q.is_cuda and capability_of(q.device) < (8, 0)
    if before_ampere and q.dtype == torch.bfloat16:
        return "bfloat16 needs compute capability 8.0 (A100, L4 or newer): use float16 or float32, or backend='torch'"
    most_K = MOST_K_BEFORE_AMPERE if before_ampere else MOST_K
    if K > most_K or V > MOST_V:
        return f"the kernels serve K <= {most_K} and V <= {MOST_V - 1} here, got K = {K} and V = {V}: backend='torch'"
    return None


def wanted(backend, q):
    """Whether to try the kernels: always if asked for, else where a CUDA device or the interpreter could run them."""
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"`backend`: got {backend!r}, expected None, 'triton' or 'torch'")
    if backend == "torch" or not isinstance(q, torch.Tensor):
        return backend == "triton"
    if q.dtype == torch.float64:  # before a feature map with weights in float64 meets anything in float32
        if backend == "triton":
            raise ValueError(f"`backend`: got 'triton', but {FLOAT64}")
        return False
    if backend == "triton":
        return True
    return q.is_cuda or ("TRITON_INTERPRET" in os.environ and mode() == "interpret")


def serve(backend, q, *widths):
    """Whether the kernels can take the call; if they are asked for and cannot, this raises and says what to do.

    The widths are K and V, for the selective scan N.
    """
    reason = obstacle(q, *widths) if len(widths) == 2 else obstacle_to_scan(q, *widths)
    if backend == "triton" and reason is not None:
        raise ValueError(f"`backend`: got 'triton', but {reason}")
    return reason is None and 0 not in q.shape


def chunk(q, k, v, gates, initial_state, cu_seqlens, scale, chunk_size, final, float_output):
    """The kernels on checked arguments: o in the dtype of v or float32, and the last state if `final`; differentiable."""
    from linattn_edu.kernels import op

    if q.dtype == torch.bfloat16 and mode() == "interpret":  # the interpreter cannot multiply bfloat16
        q, k, v = q.float(), k.float(), v.float()
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(q.device, torch.int64).contiguous()
    g, beta = (gates[name].float().contiguous() if name in gates else None for name in ("g", "beta"))
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if scale == 0:  # gradients of the state are carried in units of the scale
        q, scale = 0 * q, 1
    out_dtype = torch.float32 if float_output else v.dtype
    return op.chunk(q, k, v, g, beta, initial_state, cu_seqlens, float(scale), chunk_size, final, out_dtype)


def may_step(backend, tensors):
    """Whether no gradient is wanted: the step kernels keep no graph, so that such a call stays in PyTorch."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
        return True
    if backend == "triton":
        raise ValueError("`backend`: got 'triton', but a gradient is wanted: step under torch.no_grad(), or train with `fused`")
    return False


def decode(q, k, v, gates, states, scale, eps, feature_map, inplace):
    """The step kernel on checked arguments: o in the dtype of v, and the new states [S] or [S, z]."""
    from linattn_edu.kernels import step

    return step.decode(q, k, v, gates.get("g"), gates.get("beta"), states, scale, eps, feature_map, inplace)


def selective_scan(u, delta, A, B, C, skip, initial_state, zoh):
    """The selective scan on checked arguments: y in the dtype of u and the last state, differentiable."""
    from linattn_edu.kernels import scan

    if u.dtype == torch.bfloat16 and mode() == "interpret":  # the interpreter rounds to bfloat16 by cutting off
        y, last = scan.scan(u.float(), delta, A, B.float(), C.float(), skip, initial_state, zoh)
        return y.to(u.dtype), last
    return scan.scan(u, delta, A, B, C, skip, initial_state, zoh)


def selective_step(u, delta, A, B, C, skip, state, zoh, inplace):
    """One token of the selective scan on checked arguments: y in the dtype of u, and the new state."""
    from linattn_edu.kernels import scan

    dtype, interpreted = u.dtype, u.dtype == torch.bfloat16 and mode() == "interpret"
    u = u.float() if interpreted else u
    y, new = scan.token(u, delta, A, B, C, skip, state, zoh, inplace)
    return y.to(dtype), new


def compile_all(capability, dtypes=None, **more):
    """Compile every kernel for a GPU that need not be there, through the launches that a reader's call makes.

    Args:
        capability: the compute capability, as (8, 0).
        dtypes: of the inputs; None is what such a device supports.
        more: `sizes`, `variants` and `families` of `kernels.compiling.compile_all`, to compile fewer.

    Returns:
        Records with `name`, `dtype`, `shared_bytes`, `registers` and `spilled_bytes` (a thread).

    Raises:
        ValueError: bfloat16 before compute capability 8.0.
    """
    from linattn_edu.kernels.compiling import compile_all

    return compile_all(capability, dtypes, **more)
