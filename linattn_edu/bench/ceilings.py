"""What a machine can do at most, measured: bytes moved, products made and operations started in a second.

No form is faster than its bytes at the rate of a copy and its FLOPs at the rate of a matrix product; a form of many
small operations takes at least a launch for each.
"""

import time

import torch

from linattn_edu.bench.measure import seconds


def copy_rate(device="cpu"):
    """Bytes read plus bytes written a second by a copy that no cache holds.

    A CPU also reads what it is about to overwrite, and that is not counted.
    """
    size = 2**30 if torch.device(device).type == "cuda" else 2**28
    x, y = torch.ones(2, size, dtype=torch.uint8, device=device)
    t = seconds(lambda: y.copy_(x), device=device, at_least=3, budget=0.1)
    return 2 * size / t.median


def product_rate(dtype=torch.float32, device="cpu"):
    """FLOPs a second of PyTorch's product of two square matrices of random numbers."""
    n = 8192 if torch.device(device).type == "cuda" else 1024
    draw = torch.Generator(device).manual_seed(0)
    x, y = torch.randn(2, n, n, generator=draw, device=device).to(dtype)
    t = seconds(lambda: x @ y, device=device, at_least=3, budget=0.1)
    return 2 * n**3 / t.median


def launch_seconds(device="cpu", count=200):
    """Seconds of the host for one operation on one number, in a row of `count` that nobody waits for."""
    x = torch.zeros(1, device=device)

    def row():
        start = time.perf_counter()
        for _ in range(count):
            x.add_(1)
        spent = time.perf_counter() - start
        x.item()
        return spent / count

    return sorted(row() for _ in range(11))[5]


def ceilings(dtype=torch.float32, device="cpu"):
    """All three, for the head of a recorded table."""
    return {
        "copy_bytes_a_second": f"{copy_rate(device):.4g}",
        "product_flops_a_second": f"{product_rate(dtype, device):.4g}",
        "launch_seconds": f"{launch_seconds(device):.3g}",
    }
