"""How long the kernels take on this machine's GPU: ``python -m linattn_edu.kernels.speed speed.csv``.

Median of repeated eager calls by CUDA events, host work included, in milliseconds, with the quartiles; peak memory of
forward and backward above what the inputs hold. Beside `fused`: `chunkwise` in PyTorch, and causal softmax attention by
torch's own kernel (SDPA). bfloat16, H heads, K = V.
"""

import csv
import datetime
import sys

import torch
import triton

import linattn_edu
from linattn_edu.bench.measure import peak_bytes, seconds
from linattn_edu.check.cases import CASES

SHAPES = [(8, 512, 16, 128), (1, 1024, 16, 128), (8, 2048, 16, 128), (2, 8192, 16, 128), (1, 32768, 16, 128), (8, 4096, 16, 64)]
NAMES = ["linear-plain", "decay", "gla", "deltanet", "gated_deltanet", "kda"]
COLUMNS = ["op", "form", "B", "T", "H", "K", "pass", "ms", "ms_low", "ms_high", "peak_MiB"]


def arguments(name, B, T, H, K):
    """Random inputs in bfloat16, gates in float32: weak decay, write strengths in (0, 1), keys of unit length."""
    case = CASES[name]
    q, k, v = (torch.randn(B, T, H, K, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    x = {"q": q, "k": linattn_edu.l2norm(k), "v": v}
    for gate, axes in case.gates.items():
        value = torch.rand(B, T, H, *[K] * ("K" in axes), device="cuda")
        x[gate] = -0.1 * value if gate == "g" else value
    return {key: y.requires_grad_() for key, y in x.items()}, case.options


def sdpa(q, k, v):
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return o.transpose(1, 2), None


def rows(op, form, function, inputs, shape):
    def forward():
        with torch.no_grad():
            function(**inputs)

    def both():
        o, _ = function(**inputs)
        torch.autograd.grad(o, list(inputs.values()), torch.ones_like(o))

    for name, run in (("forward", forward), ("forward+backward", both)):
        t = seconds(run, device="cuda", at_least=5, budget=0.2, warmup=3)
        peak = peak_bytes(run, device="cuda") / 2**20
        yield [op, form, *shape, name, *(f"{1e3 * s:.3f}" for s in (t.median, t.low, t.high)), f"{peak:.0f}"]


def main(path):
    table = []
    for shape in SHAPES:
        inputs, _ = arguments("linear-plain", *shape)
        table += rows("softmax", "SDPA", sdpa, inputs, shape)
        for name in NAMES:
            inputs, options = arguments(name, *shape)
            for form in ("fused", "chunkwise"):
                function = getattr(CASES[name].module, form)
                if form == "fused" or shape[0] * shape[1] <= 4096:
                    table += rows(name, form, lambda **x: function(**x, **options), inputs, shape)  # noqa: B023
    with open(path, "w", newline="") as file:
        file.write(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, ")
        file.write(f"linattn_edu {linattn_edu.__version__}, {datetime.date.today()}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(table)
    for row in table:
        print(*row)


if __name__ == "__main__":
    main(sys.argv[1])
