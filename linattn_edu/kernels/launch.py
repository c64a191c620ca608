"""What the launches of all families need: dtypes, the chunks of packed sequences, the sum over shared heads."""

import torch
import triton.language as tl

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


def shared_heads(dx, x):
    """A gradient with one row a value head, in the shape and dtype of x: heads that share a row of x are summed."""
    if dx.shape[1] == x.shape[2]:
        return dx.view(x.shape)
    return dx.view(*x.shape[:3], -1, x.shape[3]).sum(3).to(x.dtype)
