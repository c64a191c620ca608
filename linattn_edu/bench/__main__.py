"""Time, memory and error of every operator's forms beside their rivals.

    python -m linattn_edu.bench --ops gla kda --shapes 8x2048x16x128 2x8192x16x128 --out table.csv --plot table.png
    python -m linattn_edu.bench --passes decode --shapes 64x2048x16x128 --forms step FLA SDPA

A shape is B x T x H x K, then V and HV if they differ from K and H. A row is one form and one pass at one shape:

    wall_ms      eager calls, host work included: the median, and beside it the quartiles
    device_ms    the same launches replayed as a CUDA graph, so that the device alone counts; empty on a CPU
    peak_MiB     the most that the call had allocated, above what was held before
    error        of the output, forward and backward of the worst gradient, decode of the output and the new state:
                 |x - y| / |y| in the Frobenius norm against float64, on the first head of the first sequence

`linear` is without feature map and normaliser, softmax is SDPA, FLA is flash-linear-attention if it is installed (there
`kda` with its gates promised to be at least -5). Decode is one token after T tokens, over as many states in turn as do
not fit in a cache; `copy` moves as many bytes as a state read and written, and no step is faster.
"""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from linattn_edu import doctor
from linattn_edu.bench import rivals
from linattn_edu.bench.ceilings import ceilings
from linattn_edu.bench.record import provenance, write
from linattn_edu.bench.rows import OWN, decoding, training
from linattn_edu.extras import need

tqdm = need("tqdm", "a benchmark").tqdm

OPS = ("softmax", "linear", "decay", "gla", "deltanet", "gated_deltanet", "kda", "mamba")
FORMS = (*OWN, "step", "step in PyTorch", "copy", "SDPA", "FLA")
PASSES = ("forward", "forward+backward", "decode")
SHAPES = {
    "cuda": ["8x512x16x128", "1x1024x16x128", "8x2048x16x128", "2x8192x16x128", "1x32768x16x128", "8x4096x16x64"],
    "cpu": ["1x256x4x64", "1x1024x4x64", "1x4096x4x64"],
}

def sizes_of(text):
    """ "8x2048x16x128" as B, T, H, K, V, HV."""
    numbers = [int(x) for x in text.split("x")]
    if not 4 <= len(numbers) <= 6 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected BxTxHxK, BxTxHxKxV or BxTxHxKxVxHV")
    B, T, H, K, V, HV = [*numbers, *(None, None)][:6] if len(numbers) < 6 else numbers
    return {"B": B, "T": T, "H": H, "K": K, "V": V or K, "HV": HV or H}


def warm_up(op, form, shapes, passes, dtype, device):
    """Every call once, so that its kernels are compiled; what cannot run says so when it is measured."""
    os.environ["FLA_CACHE_RESULTS"] = "0"  # it shall choose its configurations later, on a device that is not shared
    guard = rivals.lift_guard()
    for s in shapes:
        list(measured_at(s, op, [form], passes, dtype, torch.device(device), None, guard))


def measured_at(s, op, forms, passes, dtype, device, budget, guard):
    """The rows of an operator at a shape."""
    whole = [name for name in passes if name != "decode"]
    if whole:
        yield from training(op, forms, whole, s, dtype, device, budget, guard)
    if "decode" in passes:
        yield from decoding(op, forms, s, dtype, device, budget)


def compile_side_by_side(jobs, ops, forms, shapes, passes, dtype, device):
    """Compile in `jobs` processes what will be timed: for each K and V at the smallest shape, since kernels know no B and T."""
    smallest = {(s["K"], s["V"]): s for s in sorted(shapes, key=lambda s: -s["B"] * s["T"])}
    wanted = {"FLA"} | {"step" if name == "decode" else "fused" for name in passes}
    compiled = [form for form in forms if form in wanted]
    tasks = [(op, form, [s]) for s in smallest.values() for form in reversed(compiled) for op in ops]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(warm_up, *task, passes, dtype, device) for task in tasks]
        for task in tqdm(waiting, desc="compiling"):
            task.result()


def parse(arguments=None):
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m linattn_edu.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16 on a GPU, else float32")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, metavar="FORM", help=", ".join(FORMS))
    parser.add_argument("--passes", nargs="+", default=["forward", "forward+backward"], choices=PASSES, metavar="PASS", help=", ".join(PASSES))
    parser.add_argument("--shapes", nargs="+", type=sizes_of, metavar="BxTxHxK", help="also BxTxHxKxV and BxTxHxKxVxHV")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds of repetitions behind one figure (default 0.2)")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile the kernels before anything is timed")
    parser.add_argument("--out", help="the table as CSV")
    parser.add_argument("--plot", help="the table as a figure (needs matplotlib)")
    a = parser.parse_args(arguments)
    kind = torch.device(a.device).type
    a.dtype = getattr(torch, a.dtype or ("bfloat16" if kind == "cuda" else "float32"))
    a.shapes = a.shapes or [sizes_of(x) for x in SHAPES[kind]]
    own = ("fused", "step") if kind == "cuda" else ("parallel", "chunkwise", "step")
    a.forms = a.forms or [*own, "copy", "SDPA", *(["FLA"] if kind == "cuda" else [])]
    return a


def table(a, guard):
    """All rows, measured one after another."""
    with tqdm(total=len(a.ops) * len(a.shapes)) as bar:
        for op in a.ops:
            for s in a.shapes:
                bar.set_postfix_str(f"{op}, B{s['B']} T{s['T']}")
                yield from measured_at(s, op, a.forms, a.passes, a.dtype, torch.device(a.device), a.budget, guard)
                bar.update()


def line(r):
    """A row as it is printed."""
    size = f"B{r['B']} T{r['T']} H{r['HV']} K{r['K']} V{r['V']}"
    name = f"{r['op']:15}{r['form']:16}{r['pass']:17}{size:28}"
    if not r["wall_ms"]:
        return name + r["note"]
    device = f"{float(r['device_ms']):10.3f}" if r["device_ms"] else " " * 10
    return f"{name}{float(r['wall_ms']):10.3f}{device}{float(r['peak_MiB']):10.0f} {r['error']:>9}  {r['note']}".rstrip()


def main(arguments=None):
    a = parse(arguments)
    if a.plot:
        need("matplotlib", "--plot")  # now, not when all is measured
        Path(a.plot).parent.mkdir(parents=True, exist_ok=True)
    if a.jobs:
        compile_side_by_side(a.jobs, a.ops, a.forms, a.shapes, a.passes, a.dtype, a.device)
    guard = rivals.lift_guard() if "FLA" in a.forms else ""
    packages = {"triton": doctor.version_of("triton"), "fla": rivals.fla_version()}
    about = provenance(a.device, dtype=str(a.dtype).removeprefix("torch."), **{name: x for name, x in packages.items() if x})
    about |= ceilings(a.dtype, a.device)
    print("\n".join(f"{key}: {x}" for key, x in about.items()))
    rows = []
    for row in table(a, guard):
        rows.append(row)
        if a.out:
            write(a.out, rows, about)  # at once: a benchmark that is cut short keeps what it has
    print(f"{'op':15}{'form':16}{'pass':17}{'shape':28}{'wall ms':>10}{'device ms':>10}{'peak MiB':>10} {'error':>9}")
    print("\n".join(map(line, rows)))
    if a.plot and rows:
        from linattn_edu.bench.plot import plot

        plot(rows, about, a.plot)


if __name__ == "__main__":
    main()
