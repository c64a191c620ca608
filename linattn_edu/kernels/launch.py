"""What one call of the kernels needs beside its inputs: sizes, tiles, grids, buffers, and the chunks of packed sequences.

Work arrays have one row a token, [tokens, HV, ...], like v: a chunk's rows lie where its tokens lie.
"""

import functools

import torch
import triton.language as tl

from linattn_edu.kernels.config import choose

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def chunk_table(cu_seqlens, T, C):
    """First token and end of every chunk of packed sequences, and each sequence's first chunk; nothing is read back.

    How many chunks there are only the device knows; T // C + N suffice, and those left over are empty.
    """
    N = len(cu_seqlens) - 1
    first_chunk = torch.zeros_like(cu_seqlens)
    first_chunk[1:] = ((cu_seqlens.diff() + C - 1) // C).cumsum(0)
    c = torch.arange(T // C + N, device=cu_seqlens.device)
    n = torch.searchsorted(first_chunk[1:], c, right=True).clamp(max=N - 1)
    stop = cu_seqlens[n + 1]
    first = torch.minimum(cu_seqlens[n] + (c - first_chunk[n]) * C, stop)
    return first_chunk, torch.stack([first, stop], -1)


class Plan:
    """Sizes, tiles and grids of all calls with inputs of one shape, dtype and device."""

    def __init__(self, shape, HV, V, dtype, device, gate, delta, sequences, chunk_size):
        B, self.T, self.H, self.K = shape
        self.HV, self.V, self.gate, self.delta, self.dtype, self.device = HV, V, gate, delta, dtype, device
        self.config = choose(device, dtype, self.K, V, gate, delta, chunk_size)
        C = self.config.C
        self.tokens, self.NT = B * self.T, -(-self.T // C)
        self.packed = sequences is not None
        self.N = sequences if self.packed else B
        self.chunks = self.T // C + self.N if self.packed else B * self.NT
        self.switches = dict(
            K=self.K, V=V, C=C, GATE=gate, DELTA=delta, PACKED=self.packed,
            DTYPE=DTYPES[self.config.dtype], PRECISION=self.config.precision,
        )  # fmt: skip

    def rows(self, *shape, dtype=None):
        """A buffer with one row a token; zero at first where a token may belong to no sequence."""
        make = torch.zeros if self.packed else torch.empty
        return make(self.tokens, self.HV, *shape, dtype=dtype or self.config.dtype, device=self.device)

    def per_chunk(self, *shape, dtype=torch.float32):
        return torch.empty(self.chunks, self.HV, *shape, dtype=dtype, device=self.device)

    def state(self):
        return torch.empty(self.N, self.HV, self.K, self.V, dtype=torch.float32, device=self.device)

    def tiles(self, kernel):
        BK, BV, warps, stages = getattr(self.config, kernel)
        return dict(BK=BK, BV=BV, num_warps=warps, num_stages=stages)

    def walk(self, kernel):
        """Grid and tiles of a kernel that walks through the sequences."""
        KP, BV, warps, stages = getattr(self.config, kernel)
        return (self.N * self.HV, -(-self.V // BV)), dict(KP=KP, BV=BV, num_warps=warps, num_stages=stages)


cached_plan = functools.lru_cache(maxsize=1024)(Plan)


def plan(q, v, g, beta, cu_seqlens, chunk_size, symbolic=False):
    """The `Plan` of a call; `symbolic` sizes, while torch.compile traces, cannot be looked up."""
    gate = "none" if g is None else "scalar" if g.dim() == 3 else "channel"
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    make = Plan if symbolic else cached_plan
    return make(q.shape, *v.shape[2:], q.dtype, q.device, gate, beta is not None, sequences, chunk_size)


def shared_heads(dx, x):
    """A gradient with one row a value head, in the shape and dtype of x: heads that share a row of x are summed."""
    if dx.shape[1] == x.shape[2]:
        return dx.view(x.shape)
    return dx.view(*x.shape[:3], -1, x.shape[3]).sum(3).to(x.dtype)
