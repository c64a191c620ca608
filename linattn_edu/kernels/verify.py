"""All kernels on this machine's GPU against float64: ``python -m linattn_edu.kernels.verify errors.csv``.

For every variant, dtype, gate regime and size: outputs, last states and all gradients of `fused`, as the relative error
|x - y| / |y| in the Frobenius norm against the chunkwise form in float64 on the same, already rounded inputs; beside it
the error of the PyTorch chunkwise form in the inputs' dtype, which computes in float32.
"""

import csv
import datetime
import itertools
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import triton

import linattn_edu
from linattn_edu.check.cases import CASES, REGIMES_OF, inputs, leaves, tensors, tree_map, with_gradients

SIZES = [(64, 64), (128, 128), (100, 60), (256, 512)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
COLUMNS = ["variant", "regime", "dtype", "B", "T", "H", "HV", "K", "V", "packed", "tensor", "error", "error_pytorch"]


def gradients(form, arguments, **more):
    """Named outputs and gradients of one call, for a fixed random weight of every output."""
    arguments = with_gradients(arguments)
    o, state = form(**arguments, output_final_state=True, **more)
    draw = torch.Generator("cpu").manual_seed(1)
    outputs = [o, *leaves(state)]
    weights = [torch.randn(x.shape, generator=draw).to(x) for x in outputs]
    found = torch.autograd.grad(outputs, tensors(arguments), weights)
    names = [f"d{key}" + str(i) * (len(leaves(x)) > 1) for key, x in arguments.items() for i, _ in enumerate(leaves(x))
             if torch.is_tensor(x) or isinstance(x, tuple)]  # fmt: skip
    return dict(zip(["o", *(f"state{i}" for i in range(len(outputs) - 1)), *names], [*outputs, *found]))


def error(x, y):
    norm = y.norm()
    return ((x.double() - y).norm() / norm).item() if norm > 0 else x.abs().max().item()


def case(name, regime, dtype, *, B, T, H, HV, K, V, bounds=None):
    """Rows of the table for one case."""
    N = None if bounds is None else len(bounds) - 1
    arguments = inputs(name, regime, B=B, T=T, H=H, HV=HV, K=K, V=V, N=N)
    low = {key: x.to(dtype) if key in "qkv" else tree_map(torch.Tensor.float, x) if key in ("g", "beta", "initial_state") else x
           for key, x in arguments.items()}  # fmt: skip
    move = lambda x: x.cuda() if torch.is_tensor(x) else x  # noqa: E731
    low = {key: tree_map(move, x) for key, x in low.items()}
    exact = {key: tree_map(lambda y: y.double() if torch.is_tensor(y) else y, x) for key, x in low.items()}
    module = CASES[name].module
    packed = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device="cuda")}
    expected = gradients(module.chunkwise, exact, **packed)
    got = gradients(module.fused, low, backend="triton", **packed)
    pytorch = gradients(module.chunkwise, low, **packed)
    about = [name, regime, str(dtype).removeprefix("torch."), B, T, H, HV, K, V, bounds is not None]
    return [[*about, key, f"{error(got[key], y):.2e}", f"{error(pytorch[key], y):.2e}"] for key, y in expected.items()]


def cases():
    for name, regime in REGIMES_OF:
        for dtype in DTYPES:
            for K, V in SIZES:
                yield name, regime, dtype, dict(B=2, T=300, H=2, HV=4, K=K, V=V)
            yield name, regime, dtype, dict(B=1, T=300, H=2, HV=4, K=64, V=64, bounds=[0, 0, 1, 130, 130, 300, 300])
    for name, regime in REGIMES_OF:
        for T in (1, 4096, 65536):
            yield name, regime, torch.bfloat16, dict(B=1, T=T, H=1, HV=2, K=128, V=128)


def table(name, chosen):
    """Rows of all cases of one variant and dtype."""
    return [
        row
        for other, regime, dtype, sizes in cases()
        if (other, dtype) == (name, chosen)
        for row in case(name, regime, dtype, **sizes)
    ]


def main(path):
    start = time.time()
    tasks = list(itertools.product(CASES, DTYPES))
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count()), multiprocessing.get_context("spawn")) as pool:
        rows = [row for rows in pool.map(table, *zip(*tasks)) for row in rows]
    write(path, rows)
    print(f"{len(rows)} rows in {time.time() - start:.0f} s")


def write(path, rows):
    """The table as a file, and on the screen the worst error of each variant and dtype."""
    device = torch.cuda.get_device_name()
    with open(path, "w", newline="") as file:
        file.write(f"# {device}, torch {torch.__version__}, triton {triton.__version__}, linattn_edu {linattn_edu.__version__}, ")
        file.write(f"{datetime.date.today()}; relative errors in the Frobenius norm against float64\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)
    worst = {}
    for row in rows:
        key = row[0], row[2]
        worst[key] = max(worst.get(key, (0,)), (float(row[11]), float(row[12]), row[10], row[1], *row[3:10]))
    for (name, dtype), (x, *where) in worst.items():
        print(f"{name:20}{dtype:10}{x:.1e}  {where}")


if __name__ == "__main__":
    main(sys.argv[1])
