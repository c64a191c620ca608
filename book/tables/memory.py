"""What attention takes beside its inputs, counted by the allocator: the table that note C announces and lacks."""

import torch

from linattn_edu import linear, softmax
from linattn_edu.bench.measure import peak_bytes

LENGTHS = (512, 1024, 2048, 4096)
D = 64


def table():
    """Peak MiB of one head in float32 on the CPU, causal, forward pass, output included."""
    forms = {
        "naive softmax": softmax.parallel,
        "softmax in blocks": softmax.chunkwise,
        "linear, parallel": linear.parallel,
        "linear, chunkwise": linear.chunkwise,
    }
    rows = [["Tokens", "One map", *forms]]
    for T in LENGTHS:
        q, k, v = torch.randn(3, 1, T, 1, D)
        peaks = [peak_bytes(lambda: form(q, k, v)) / 2**20 for form in forms.values()]
        rows.append([f"{T:,}", f"{T * T * 4 / 2**20:.0f}", *(f"{peak:.1f}" for peak in peaks)])
    return rows
