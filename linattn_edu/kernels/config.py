"""Tiles, warps and precision for a device: chosen by reasoning from its shared memory and registers, not by a search.

A search at run time would make the first call wait for dozens of compilations. What a choice costs can be read off
the compiler without a GPU, `kernels.compile_all`.
"""

import functools
from typing import NamedTuple

import torch

INTERPRETED = (0, 0)
"""In the place of a compute capability: Triton's interpreter on the CPU."""


class Config(NamedTuple):
    """Chunk, dtype of work arrays and operands, precision of float32 products; (BK, BV, warps, stages) a kernel."""

    C: int
    dtype: torch.dtype
    precision: str
    precise: str
    intra: tuple
    inter: tuple
    inter_backward: tuple
    state_backward: tuple
    intra_backward: tuple


def power_of_two(n):
    return max(16, 1 << (n - 1).bit_length())


@functools.cache
def capability_of(device):
    return INTERPRETED if device.type == "cpu" else torch.cuda.get_device_capability(device)


def choose(device, dtype, K, V, gate, delta, chunk_size):
    return configuration(capability_of(device), dtype, K, V, gate, delta, chunk_size)


@functools.cache
def configuration(capability, dtype, K, V, gate, delta, chunk_size):
    """The configuration for inputs of a dtype and size on a device of a compute capability.

    bfloat16 inputs are multiplied as bfloat16. float16 inputs are multiplied as TF32: as many digits, and the range of
    float32 for states and gradients. float32 inputs take three TF32 products, or plain float32 before Ampere. The
    inverse gets one kind of product more precise than the inputs, since its rounding errors grow with alike keys.
    A longer chunk means fewer states and longer dots; a channel gate pays log2 C levels for it, so its chunk is shorter.
    """
    low, channel = dtype == torch.bfloat16, gate == "channel"
    tensor_cores = capability >= (8, 0) or capability == INTERPRETED
    roomy = low and (capability[:1] >= (9,) or capability in ((8, 0), INTERPRETED))  # 160 KiB of shared memory and more
    precision = "ieee" if not tensor_cores else "tf32" if dtype != torch.float32 else "tf32x3"
    KP, VP = power_of_two(K), power_of_two(V)
    longest = 64 if capability == INTERPRETED or (roomy and KP <= 128 and not channel) else 32 if tensor_cores else 16
    C = max(16, min(longest, 1 << (chunk_size.bit_length() - 1)))
    wide = 64 if roomy else 32 if tensor_cores else 16
    stages = 2 if roomy else 1

    def tiles(most_K, most_V, warps, stages=stages):
        return min(KP, most_K), min(VP, most_V), warps, stages

    walk = tiles(KP, (32 if KP <= 128 else 16) if tensor_cores else 16, 4, stages if KP <= 128 else 1)
    return Config(
        C=C,
        dtype=torch.bfloat16 if low else torch.float32,
        precision=precision,
        precise="ieee" if not tensor_cores else "tf32" if low else "tf32x3",
        intra=tiles(wide, wide, 2 if channel and low else 4),
        inter=walk,
        inter_backward=walk,
        state_backward=tiles(wide, wide, 4),
        intra_backward=tiles(wide, wide, 4),
    )
