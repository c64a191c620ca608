"""Tiles, warps and precision for a device: chosen by reasoning from its shared memory and registers, not by a search.

A search at run time would make the first call wait for dozens of compilations. What a choice costs can be read off
the compiler without a GPU, `kernels.compile_all`.
"""

import functools
from typing import NamedTuple

import torch

INTERPRETED = (0, 0)
"""In the place of a compute capability: Triton's interpreter on the CPU."""


def power_of_two(n):
    return max(16, 1 << (n - 1).bit_length())


@functools.cache
def capability_of(device):
    return INTERPRETED if device.type == "cpu" else torch.cuda.get_device_capability(device)


def most_registers(device, K):
    """What to tell the assembler of a walk over chunks. Before Hopper, and with more than 128 features, that of CUDA 12 and
    13 may settle for 32 registers a thread and spill 5 to 7 kB, unless it hears that 255 are there; else it does better unasked.
    """
    return 255 if K > 128 or capability_of(device) < (9, 0) else None


class Additive(NamedTuple):
    """Chunk, dtype and precision of products; widest tiles of features and outputs, warps and stages of a walk, programs
    that a multiprocessor takes at once, tokens that are worth a segment; (BK, BV, warps, stages) of the other kernels.
    """

    C: int
    dtype: torch.dtype
    precision: str
    most: int
    most_out: int
    warps: int
    stages: int
    programs: int
    least: int
    narrowest: int
    gate_gradient: tuple
    intra: tuple
    intra_backward: tuple

    def tile(self, X, Y):
        BX, BY = (max(power_of_two(n), self.narrowest) for n in (X, Y))
        return min(BX, self.most), min(BY, self.most_out), self.warps, self.stages


@functools.cache
def multiprocessors(device):
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def additive(device, dtype, K, V, gate, chunk_size):
    return additive_configuration(capability_of(device), dtype, K, V, gate, chunk_size)


@functools.cache
def additive_configuration(capability, dtype, K, V, gate, chunk_size):
    """As `delta_configuration`, for the additive rules: the state of a program is `most` x `most_out` numbers in registers."""
    low = dtype == torch.bfloat16
    tensor_cores = capability >= (8, 0) or capability == INTERPRETED
    hopper = capability[:1] >= (9,)
    precision = "ieee" if not tensor_cores else "tf32" if dtype != torch.float32 else "tf32x3"
    longest = 64 if (low and tensor_cores) or capability == INTERPRETED else 32 if tensor_cores else 16
    C = max(16, min(longest, 1 << (chunk_size.bit_length() - 1)))
    state = (32, 16) if not tensor_cores else (64, 32) if not low else (128, 64)
    wide = min(state[0], 64)
    # Triton 3.6 gives wrong results, or crashes, where a warp group of Hopper multiplies bfloat16 tiles narrower than 64
    narrowest = 64 if low and hopper else 16

    warps = 8 if low and not hopper else 4

    def tiles(warps, wide=wide):
        return min(max(power_of_two(K), narrowest), wide), min(max(power_of_two(V), narrowest), wide), warps, 1

    # Before Hopper 64 channels at a time leave the registers: 4.6 kB a thread on an A100.
    narrower = min(wide, 32) if low and not hopper else wide

    return Additive(
        C=C, dtype=torch.bfloat16 if low else torch.float32, precision=precision, most=state[0], most_out=state[1],
        warps=warps, stages=2 if low and hopper else 1, programs=2,
        least=16 if capability == INTERPRETED else 32 * C, narrowest=narrowest, gate_gradient=tiles(4), intra=tiles(4),
        intra_backward=tiles(8, narrower),
    )  # fmt: skip


class Delta(NamedTuple):
    """For the delta rule: chunk; dtype of work arrays and operands; precision of float32 products, in the inverse too;
    features padded, and tiles of features and value channels; stages of the sequential kernels and of the parallel backward
    one; tile of features and most registers a thread, if bounded, of the two kernels of a channel gate.
    """

    C: int
    dtype: torch.dtype
    precision: str
    precise: str
    KP: int
    BK: int
    BV: int
    stages: tuple
    channel: tuple


def delta(device, dtype, K, chunk_size):
    return delta_configuration(capability_of(device), dtype, K, chunk_size)


@functools.cache
def delta_configuration(capability, dtype, K, chunk_size):
    """bfloat16 inputs are multiplied as bfloat16. float16 inputs are multiplied as TF32: as many digits, and the range of
    float32 for states and gradients. float32 inputs take three TF32 products, or plain float32 before Ampere. The
    inverse gets one kind of product more precise than the inputs, since its rounding errors grow with alike keys. Where a
    product is three, the registers hold no more than 16 value channels of the state; with 256 features not even those.

    On Hopper bfloat16 chunks of 64 tokens run on warp groups, with S^T and V'^T in registers; Triton 3.6 gives wrong
    results there for tiles narrower than 64, so that none is. Shorter chunks keep to tiles of at most 32 rows, which are
    multiplied warp by warp, as are the tiles of a channel gate, whose programs are one warp.
    """
    low = dtype == torch.bfloat16
    tensor_cores = capability >= (8, 0) or capability == INTERPRETED
    roomy = low and (capability[:1] >= (9,) or capability in ((8, 0), INTERPRETED))
    precision = "ieee" if not tensor_cores else "tf32" if dtype != torch.float32 else "tf32x3"
    three = precision == "tf32x3"
    longest = 64 if capability == INTERPRETED or (roomy and K <= 128) else 32 if tensor_cores else 16
    C = max(16, min(longest, 1 << (chunk_size.bit_length() - 1)))
    groups = low and C == 64 and capability >= (9, 0)
    KP = max(power_of_two(K), 64 if groups else 16)
    wide = 64 if groups else 32 if tensor_cores else 16
    narrow = min(KP, 16 if precision != "tf32" else 32)
    return Delta(
        C=C, dtype=torch.bfloat16 if low else torch.float32, precision=precision,
        precise="ieee" if not tensor_cores else "tf32" if low else "tf32x3",
        KP=KP, BK=min(KP, wide), BV=min(wide, 16) if KP > 128 or three else wide,
        stages=(3, 2) if groups else (2, 1) if roomy and KP <= 128 else (1, 1), channel=((narrow, None), (narrow, None)),
    )  # fmt: skip
