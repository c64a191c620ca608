"""Every form on a CPU: what blocks gain over the recurrence, and how time and memory grow with T.

    python -m linattn_edu.bench.cpu --out book/data/cpu_forms.csv

B = 1, H = 4, K = V = 64, float32; Mamba with as many channels (256) and 16 states. The calls that are compared take
turns, so that whatever else the machine does slows them alike, and glibc's allocator keeps the memory that it has:
otherwise a form's time depends on how often it hands memory back to the kernel. transformers' chunkwise gated delta
rule in plain PyTorch runs beside ours where transformers is installed. Measure on an idle machine: with a third busy
process two threads wait for each other at every operation.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from functools import partial

import torch

from linattn_edu import VARIANTS, mamba
from linattn_edu.bench.inputs import arguments as draw
from linattn_edu.bench.record import provenance, write
from linattn_edu.extras import need

tqdm = need("tqdm", "a benchmark").tqdm

ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
OPERATORS = {name: module for name, module in VARIANTS.items() if name != "softmax"} | {"mamba": mamba}
HEADS, WIDTH, STATES = 4, 64, 16
LENGTHS = [2**10, 2**12, 2**14, 2**16]


def arguments(name, T):
    """Inputs of an operator: unit keys, random gates."""
    return draw(name, T=T, H=HEADS, K=WIDTH, N=STATES, dtype=torch.float32)


def forward(f, a):
    with torch.no_grad():
        return f(**a)[0]


def forward_and_backward(f, a):
    a = {name: x.requires_grad_() for name, x in a.items()}
    o = f(**a)[0]
    return torch.autograd.grad(o, list(a.values()), torch.ones_like(o))


PASSES = {"forward": forward, "forward and backward": forward_and_backward}


def race(calls, rounds):
    """Seconds of each named call, `rounds` times in turn after one round of warm-up: `{name: [seconds, ...]}`."""
    spent = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            spent[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in spent.items()}


def ratio(slow, fast):
    """How many times as long `slow` takes: the median over the rounds."""
    return statistics.median(x / y for x, y in zip(slow, fast))


def row(operator, form, passes, T, times, bytes=""):
    low, median, high = (float(f"{x:.4g}") for x in statistics.quantiles(times, n=4, method="inclusive"))
    return {
        "operator": operator, "form": form, "pass": passes, "T": T,
        "seconds": median, "low": low, "high": high, "bytes": bytes,
    }  # fmt: skip


def transformers_chunkwise():
    """`torch_chunk_gated_delta_rule` with our argument names, or None."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return lambda q, k, v, g, beta: torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)


def compare_forms(T, rounds, bar):
    """Recurrent against chunkwise, and ours against transformers': rows, and the ratios in words."""
    rows, said, theirs = [], [], transformers_chunkwise()
    for name, module in OPERATORS.items():
        forms = {"recurrent": module.recurrent, "chunkwise": module.chunkwise}
        a = arguments(name, T)
        for passes, run in PASSES.items():
            bar.set_postfix_str(f"{name}, {passes}")
            times = race({form: partial(run, f, a) for form, f in forms.items()}, rounds)
            rows += [row(name, form, passes, T, spent) for form, spent in times.items()]
            gain = ratio(times["recurrent"], times["chunkwise"])
            said.append(f"{name}, {passes}: recurrent / chunkwise = {gain:.2f}")
            if name == "gated_deltanet" and theirs:
                duel = {"transformers": partial(run, theirs, a), "ours": partial(run, module.chunkwise, a)}
                times = race(duel, 4 * rounds)
                rows += [row(name, f"{side}, in turn", passes, T, spent) for side, spent in times.items()]
                gain = ratio(times["transformers"], times["ours"])
                said.append(f"{name}, {passes}: transformers / chunkwise = {gain:.2f}")
            bar.update()
    return rows, said


def growth(lengths, rounds, bar):
    """Chunkwise, forward: time and the rise of resident memory at each length."""
    rows, said = [], []
    for name, module in OPERATORS.items():
        bar.set_postfix_str(f"{name}, T up to {lengths[-1]}")
        times = race({T: partial(forward, module.chunkwise, arguments(name, T)) for T in lengths}, rounds)
        bytes = {T: rise_in_a_fresh_process(name, T) for T in lengths}
        rows += [row(name, "chunkwise", "forward, growth", T, spent, bytes[T]) for T, spent in times.items()]
        longest, shortest = lengths[-1], lengths[0]
        said.append(
            f"{name}, T {longest} against {shortest}: {ratio(times[longest], times[shortest]):.1f} times the time, "
            f"{bytes[longest] / 2**20:.0f} MiB above the inputs"
        )
        bar.update()
    return rows, said


def rise_in_a_fresh_process(name, T):
    """Bytes by which the peak resident memory of a forward pass lies above the inputs, with glibc's own allocator."""
    asked = ["--rise", name, str(T), "--threads", str(torch.get_num_threads())]
    command = [sys.executable, "-m", "linattn_edu.bench.cpu", *asked]
    env = {key: value for key, value in os.environ.items() if key not in ALLOCATOR}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)


def rise(name, T):
    forward(OPERATORS[name].chunkwise, arguments(name, 128))  # the libraries' own memory
    a = arguments(name, T)
    before = resident("VmRSS")
    forward(OPERATORS[name].chunkwise, a)
    return resident("VmHWM") - before


def resident(field):
    """VmRSS, the resident memory now, or VmHWM, its peak, in bytes (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048, help="T of the comparison of forms")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out")
    parser.add_argument("--rise", nargs=2, metavar=("OPERATOR", "T"), help="print the rise of resident memory and stop")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    if a.rise:
        return print(rise(a.rise[0], int(a.rise[1])))
    if sys.platform == "linux" and any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        command = [sys.executable, "-m", "linattn_edu.bench.cpu", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | ALLOCATOR)
    with tqdm(total=len(OPERATORS) * (len(PASSES) + 1)) as bar:
        rows, said = compare_forms(a.length, a.rounds, bar)
        grown, more = growth(LENGTHS, a.rounds, bar)
    print("\n".join(said + more))
    if a.out:
        sizes = {"B": 1, "H": HEADS, "K": WIDTH, "V": WIDTH, "dtype": "float32"}
        installed = {"transformers": importlib.metadata.version("transformers")} if transformers_chunkwise() else {}
        write(a.out, rows + grown, provenance("cpu", **installed, **sizes, **ALLOCATOR))


if __name__ == "__main__":
    main()
