"""Compile every kernel for a GPU that is not there, through the launches that a reader's call makes."""

import contextlib
import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from linattn_edu import kernels
from linattn_edu.kernels import additive, config, delta, op, scan, step

SHARED_LIMIT = {(7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448}
"""Shared memory that one block may ask for, in bytes (CUDA C++ programming guide, compute capabilities)."""


VARIANTS = tuple(itertools.product(("none", "scalar", "channel"), (False, True)))
"""The compile-time switches: gate, and whether the delta rule erases."""


class Record(NamedTuple):
    name: str
    dtype: torch.dtype
    shared_bytes: int
    registers: int
    spilled_bytes: int


class Driver:
    """What Triton asks of a driver when it compiles, answered for a device of a compute capability."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # a cache of its own for each architecture

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def forget():
    """Drop the launches that have been prepared: they hold what was compiled for another device."""
    for prepared in (additive.cached_plan, delta.cached_plan, step.prepared, scan.prepared_forward, scan.prepared_backward):
        prepared.cache_clear()


@contextlib.contextmanager
def compiling_for(capability):
    """Launches compile for `capability` and run nothing; yields the list of (name, compiled kernel)."""
    JIT, compiled = triton.runtime.JITFunction, []
    run, device = JIT.run, config.capability_of

    def compile_only(self, *args, grid, warmup, **kwargs):
        compiled.append((self.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    triton.runtime.driver.set_active(Driver(capability))
    JIT.run, config.capability_of = compile_only, lambda _: capability
    forget()
    try:
        yield compiled
    finally:
        JIT.run, config.capability_of = run, device
        forget()
        triton.runtime.driver._active = None


def resources(kernel):
    """Registers and spilled bytes a thread, as the disassembler that comes with Triton reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(kernel.asm["cubin"])
    try:
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    finally:
        os.unlink(file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    return int(found[1]), int(found[2])


def call_chunk(gate, delta, dtype, K=64, V=64):
    """Forward and backward pass of the kernels on CPU tensors; a rule without gates and erasing with the normaliser too."""
    train(gate, delta, dtype, K, V, dtype)
    if gate == "none" and not delta:
        train(gate, delta, dtype, K, V + 1, torch.float32)


def train(gate, delta, dtype, K, V, out_dtype, T=4096, H=1):
    """The passes, long enough to be cut into segments."""
    draw = dict(device="cpu", dtype=dtype)
    q, k, v = torch.zeros(1, T, H, K, **draw), torch.zeros(1, T, H, K, **draw), torch.zeros(1, T, H, V, **draw)
    g = {"none": None, "scalar": torch.zeros(1, T, H), "channel": torch.zeros(1, T, H, K)}[gate]
    beta = torch.zeros(1, T, H) if delta else None
    S = torch.zeros(1, H, K, V)
    o, last, *kept = op.chunk_forward(q, k, v, g, beta, S, None, 1.0, 64, True, True, out_dtype)
    op.chunk_backward(torch.zeros_like(o), torch.zeros_like(last), q, k, v, g, beta, S, None, kept, 1.0, 64)


def call_step(gate, delta, dtype, K=64, V=64):
    """One token on CPU tensors; a rule without gates and erasing with the normaliser too."""
    q, v = torch.zeros(1, 2, K, dtype=dtype), torch.zeros(1, 2, V, dtype=dtype)
    g = {"none": None, "scalar": torch.zeros(1, 2), "channel": torch.zeros(1, 2, K)}[gate]
    beta = torch.zeros(1, 2) if delta else None
    S, z = torch.zeros(1, 2, K, V), torch.zeros(1, 2, K)
    step.launch(q, q, v, g, beta, S, None, S, None, v, 1.0, 0.0, "identity")
    if gate == "none" and not delta:
        step.launch(q, q, v, None, None, S, z, S, z, v, 1.0, 1e-6, "elu1")


def call_scan(gate, delta, dtype, K=64, V=64, T=64):
    """Mamba's scan with both discretizations, forward, backward and one token; it is no case of the other variants."""
    if gate != "none" or delta:
        return
    D, N = 2 * K, 16
    u, B = torch.zeros(1, T, D, dtype=dtype), torch.zeros(1, T, N, dtype=dtype)
    A, skip, h = torch.zeros(D, N), torch.zeros(D), torch.zeros(1, D, N)
    for zoh in (False, True):
        inputs = u, u.float(), A, B, B, skip
        _, last, states = scan.run_forward(*inputs, h, zoh, True)
        scan.run_backward(u, last, *inputs, states, zoh)
        scan.token(u[:, 0], u[:, 0], A, B[:, 0], B[:, 0], skip, h, zoh, True)


FAMILIES = {"chunk": call_chunk, "step": call_step, "scan": call_scan}


def compile_all(capability, dtypes=None, *, sizes=((128, 128),), variants=VARIANTS, families=tuple(FAMILIES)):
    """Compile the kernels of every variant for GPUs of a compute capability; no GPU is needed.

    Args:
        capability: of the device, as torch gives it: (7, 5) is a T4, (8, 0) an A100, (8, 9) an L4, (9, 0) an H100.
        dtypes: of q, k and v; those that the kernels take on such a device if None.
        sizes: pairs (K, V).
        variants: pairs of the two switches, gate ("none", "scalar", "channel") and delta rule.
        families: of the kernels "chunk" (a training step), "step" (one token) and "scan" (Mamba), those to compile.

    Returns:
        A `Record` for each kernel: name, dtype, shared memory in bytes, registers and spilled bytes a thread.

    Raises:
        ValueError: bfloat16 before compute capability 8.0, or a capability that is no such pair.
        RuntimeError: under TRITON_INTERPRET=1, where nothing is compiled.
    """
    if kernels.mode() == "interpret":
        raise RuntimeError("under TRITON_INTERPRET=1 nothing is compiled: restart Python without it")
    if not (isinstance(capability, tuple) and [type(x) for x in capability] == [int, int]):
        raise ValueError(f"`capability`: got {capability!r}, expected a pair of whole numbers, as (8, 0)")
    supported = [torch.float32, torch.float16, *([torch.bfloat16] if capability >= (8, 0) else [])]
    records = []
    for dtype in dtypes or supported:
        if dtype not in supported:
            raise ValueError(f"`dtypes`: got {dtype}, expected one of {supported}: bfloat16 needs compute capability 8.0")
        for (gate, delta), (K, V) in itertools.product(variants, sizes):
            with compiling_for(capability) as compiled:
                for family in families:
                    FAMILIES[family](gate, delta, dtype, K, V)
            rule = " ".join(["plain" if gate == "none" else gate, *(["delta"] if delta else [])])
            for name, kernel in compiled:
                records.append(Record(f"{name} {rule} {K}x{V}", dtype, kernel.metadata.shared, *resources(kernel)))
    return records
