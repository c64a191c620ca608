"""One small call of each kernel, for a checker of memory accesses to watch; odd sizes, so that every mask is needed.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m linattn_edu.kernels.one_call

Without its cache PyTorch asks the driver for every tensor, so that a read beyond one is a read of nothing.
"""

import sys

import torch

from linattn_edu.check.cases import inputs
from linattn_edu.kernels.verify import CASES, VARIANTS, one_token, results, rounded, selective_scan

SIZES = dict(H=1, HV=2, K=20, V=36)


def main(device="cuda", *dtypes):
    """One token of every variant and Mamba's scan; then forward and backward of every variant, packed and whole."""
    dtypes = [getattr(torch, x) for x in dtypes] or [torch.float32, torch.bfloat16]
    names = [(name, "weak" if "g" in CASES[name].gates else "zero") for name in ("linear", *VARIANTS)]
    for dtype in dtypes:
        assert selective_scan("zoh", "weak", dtype, B=1, T=17, D=5, N=3, device=device)["ok"]
        for name, regime in names:
            assert one_token(name, regime, dtype, B=1, **SIZES, device=device)["ok"]
    print("one token and the scan: done")
    bounds = torch.tensor([0, 20, 37], device=device)
    for dtype in dtypes:
        for name, regime in names:
            fused = CASES[name].module.fused
            packed = rounded(inputs(name, regime, B=1, T=37, N=2, **SIZES), dtype, device)
            results(fused, packed, backend="triton", cu_seqlens=bounds)
            results(fused, rounded(inputs(name, regime, B=1, T=37, **SIZES), dtype, device), backend="triton")
    print("all: done")


if __name__ == "__main__":
    main(*sys.argv[1:])
