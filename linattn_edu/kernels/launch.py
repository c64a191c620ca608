"""What the launches of all families need: the launch itself, dtypes, the chunks of packed sequences, the sum over shared heads."""

import contextlib
import contextvars
import functools
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.device import on_device


def first_derivatives(backward):
    """The `backward` of an autograd function whose gradients have no graph: raises where one is asked for.

    PyTorch's `once_differentiable` raises only on a way back through the gradient; where another way leads to the same
    input, the second derivative would be dropped without a word.
    """

    @functools.wraps(backward)
    def checked(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError("the kernels' gradients have no graph (create_graph=True, second derivatives): backend='torch'")
        return backward(ctx, *gradients)

    return checked


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


collected = contextvars.ContextVar("launches that `side_by_side` compiles", default=None)


class Launch:
    """A kernel with its grid and constants, to be called with the other arguments on one device.

    Triton's own launch asks each argument anew what it is: 27 us on the host of an H200, where this takes 17, and a kernel
    for a short sequence not always more. What Triton compiles anew for is the dtype of a tensor, whether it starts at a multiple
    of 16 bytes, and whether it is there at all; arguments of a kind seen before go to what was compiled for them. The
    integers are the same, or of the same width, in all calls.
    """

    def __init__(self, kernel, grid, **constants):
        self.kernel, self.grid, self.constants, self.compiled = kernel, (*grid, 1, 1)[:3], constants, {}

    def __call__(self, *arguments):
        if collected.get() is not None:
            collected.get().append((self, arguments))
            return
        kind = tuple([
            (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else x is None for x in arguments
        ])  # fmt: skip
        if kind in self.compiled:
            run, values = self.compiled[kind]
            run(*arguments, *values)
            return
        compiled = self.kernel[self.grid](*arguments, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            values = [self.constants[name] for name in self.kernel.arg_names if name in self.constants]
            self.compiled[kind] = compiled[self.grid], values


@contextlib.contextmanager
def side_by_side(x):
    """Launches made inside run nothing; their kernels are compiled at once, on all cores, for the device of the tensor `x`."""
    launches = []
    token = collected.set(launches)
    try:
        yield
    finally:
        collected.reset(token)

    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5: each is compiled when it is first needed
        return

    def compiled(launch, arguments):
        return launch.kernel.warmup(*arguments, grid=launch.grid, **launch.constants)

    def load(kernel, grid):
        with on_device(x):  # every thread has a current device of its own
            kernel[grid]  # for which Triton writes and compiles a little C the first time

    with ThreadPoolExecutor() as pool:
        with triton.AsyncCompileMode(pool):
            for launch, arguments in launches:
                compiled(launch, arguments)
        list(pool.map(load, *zip(*((compiled(launch, arguments), launch.grid) for launch, arguments in launches))))


def chunk_table(cu_seqlens, T, C):
    """First token, end and number of the sequence of every chunk of packed ones, and each one's first chunk; nothing is read back.

    How many chunks there are only the device knows; T // C + N suffice, and those left over are empty.
    """
    N = len(cu_seqlens) - 1
    first_chunk = torch.zeros_like(cu_seqlens)
    first_chunk[1:] = ((cu_seqlens.diff() + C - 1) // C).cumsum(0)
    c = torch.arange(T // C + N, device=cu_seqlens.device)
    n = torch.searchsorted(first_chunk[1:], c, right=True).clamp(max=N - 1)
    stop = cu_seqlens[n + 1]
    first = torch.minimum(cu_seqlens[n] + (c - first_chunk[n]) * C, stop)
    return first_chunk, torch.stack([first, stop, n], -1)


def shared_heads(dx, x):
    """A gradient with one row a value head, in the shape and dtype of x: heads that share a row of x are summed."""
    if dx.shape[1] == x.shape[2]:
        return dx.view(x.shape)
    return dx.view(*x.shape[:3], -1, x.shape[3]).sum(3).to(x.dtype)
