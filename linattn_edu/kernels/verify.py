"""All kernels on this machine's GPU against float64: ``python -m linattn_edu.kernels.verify errors.csv``.

A line is one case: every variant in every dtype, gate regime and size, packed sequences, long sequences, one token, the
selective scan; CUDA graphs, torch.compile, a call that must not wait for the device, more than 2^31 elements, a second
device, the first call of a fresh process. The columns of the tensors hold |x - y| / |y| in the Frobenius norm, where y
is the chunkwise form in float64 on the same, already rounded inputs; two calls must agree to the bit.

`reference` is the error of PyTorch's chunkwise form with the same kind of products: float32 for float32 inputs, TF32 for
float16, bfloat16 operands for bfloat16. A case is `ok` if no tensor is beyond three times its reference (and 1e-6).

The gradient of beta of one token is as many numbers as there are heads, and of two errors of two normal numbers each,
alike in size, the first is beyond three times the second in one case of ten: the ratio of their squares has an
F-distribution. So one token of two heads is drawn many times. The columns then hold |x - y| / |y| over all draws, and the
note counts, for a tensor that is beyond in some draw by itself, those draws and those where its reference is.
"""

import contextlib
import csv
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from unittest import mock

import torch

from linattn_edu import forms, mamba
from linattn_edu.bench.record import provenance
from linattn_edu.check.cases import CASES, REGIMES_OF, inputs, leaves, tensors, tree_map, with_gradients

SIZES = [(64, 64), (128, 128), (100, 60), (256, 512)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VARIANTS = ["linear-plain", "decay", "gla", "deltanet", "gated_deltanet", "kda"]
TENSORS = ["o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state", "du", "ddelta", "dA", "dB", "dC", "dD"]
ABOUT = ["check", "variant", "regime", "dtype", "B", "T", "H", "HV", "K", "V"]
COLUMNS = [*ABOUT, "ok", "worst", "error", "reference", *TENSORS, "seconds", "note"]
BOUNDS = [0, 0, 1, 130, 130, 300, 300]
MANY = 2**20 + 64
DRAWS = 100


def rounded(arguments, dtype, device):
    """q, k, v in `dtype`, gates and state in float32, all on the device."""

    def place(key, x):
        return x.to(device, dtype if key in "qkv" else torch.float32) if torch.is_tensor(x) else x

    return {key: tree_map(lambda y, key=key: place(key, y), x) for key, x in arguments.items()}


def results(form, arguments, *, seed=1, **more):
    """Named outputs and gradients of one call, for a fixed random weight of every output; states are tuples."""
    arguments = with_gradients(arguments)
    o, state = form(**arguments, output_final_state=True, **more)
    draw = torch.Generator("cpu").manual_seed(seed)
    outputs = [o, *leaves(state)]
    weights = [torch.randn(x.shape, generator=draw).to(x) for x in outputs]
    found = iter(torch.autograd.grad(outputs, tensors(arguments), weights))
    named = {"o": (o,), "state": tuple(leaves(state))}
    for key, x in arguments.items():
        if leaves(x) and torch.is_tensor(leaves(x)[0]):
            named[f"d{key}"] = tuple(next(found) for _ in leaves(x))
    return {name: tuple(x.detach() for x in xs) for name, xs in named.items()}


@contextlib.contextmanager
def products_like(dtype, device):
    """PyTorch's chunkwise form with the kind of products that the kernels make of inputs of a dtype."""
    solve, tf32 = torch.linalg.solve_triangular, torch.backends.cuda.matmul.allow_tf32

    def low(x):
        return torch.autocast(torch.device(device).type, torch.bfloat16) if dtype == torch.bfloat16 else contextlib.nullcontext()

    def solve_in_float32(A, X, **options):
        return solve(A.float(), X.float(), **options)

    torch.backends.cuda.matmul.allow_tf32 = dtype == torch.float16
    with mock.patch.object(forms, "full_precision", low), mock.patch.object(torch.linalg, "solve_triangular", solve_in_float32):
        yield
    torch.backends.cuda.matmul.allow_tf32 = tf32


def distance(x, y):
    norm = y.norm()
    return ((x.double() - y).norm() / norm).item() if norm > 0 else x.abs().max().item()


def errors(found, exact):
    """The worst error under each name."""
    return {name: max(distance(x, y) for x, y in zip(found[name], ys, strict=True)) for name, ys in exact.items()}


def line(check, variant="", regime="", dtype="", *, ok, sizes=None, ours=None, reference=None, seconds="", note=""):
    """A line of the table."""
    about = {"check": check, "variant": variant, "regime": regime, "dtype": str(dtype).removeprefix("torch."), **(sizes or {})}
    row = dict.fromkeys(COLUMNS, "") | about | {"ok": ok, "seconds": seconds, "note": note}
    if ours:
        worst = max(ours, key=lambda name: ours[name] / max(reference[name], 1e-12) if reference else ours[name])
        row |= {"worst": worst, "error": f"{ours[worst]:.2e}", "reference": f"{reference[worst]:.2e}" if reference else ""}
        row |= {name: f"{x:.2e}" for name, x in ours.items()}
    return row


def computed(name, regime, dtype, seed, bounds, device, sizes):
    """One draw: `fused` twice, the chunkwise form with such products, and in float64."""
    N = None if bounds is None else len(bounds) - 1
    arguments = rounded(inputs(name, regime, N=N, seed=seed, **sizes), dtype, device)
    module, packed = CASES[name].module, {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, device=device)}
    double = {key: tree_map(lambda y: y.double() if torch.is_tensor(y) else y, x) for key, x in arguments.items()}
    first, second = (results(module.fused, arguments, seed=seed + 1, backend="triton", **packed) for _ in range(2))
    with products_like(dtype, device):
        theirs = results(module.chunkwise, arguments, seed=seed + 1, **packed)
    return first, second, theirs, results(module.chunkwise, double, seed=seed + 1, **packed)


def together(draws):
    """The results of several draws as one."""
    return {name: tuple(map(torch.stack, zip(*(x[name] for x in draws), strict=True))) for name in draws[0]}


def beyond(ours, theirs):
    """The tensors with an error of more than three times the other, and not just of float32."""
    return [key for key, x in ours.items() if x > max(3 * theirs[key], 1e-6)]


def luck(ours, theirs):
    """In words, how often each tensor is beyond the other by itself, from the errors of several draws."""
    more, less = (Counter(key for pair in zip(*both) for key in beyond(*pair)) for both in ((ours, theirs), (theirs, ours)))
    return ", ".join([f"{len(ours)} draws", *(f"{key} beyond in {n} and its reference in {less[key]}" for key, n in more.items())])


def case(name, regime, dtype, *, bounds=None, draws=1, device="cuda", **sizes):
    """One variant at one size against the reference."""
    found = [computed(name, regime, dtype, seed, bounds, device, sizes) for seed in range(draws)]
    first, second, reference, exact = map(together, zip(*found, strict=True))
    ours, theirs = errors(first, exact), errors(reference, exact)
    repeats = same(first, second)
    check = "packed" if bounds else "long" if sizes["T"] > 1024 else "whole"
    notes = [] if repeats else ["two calls differ"]
    if draws > 1:
        notes.append(luck([errors(x, y) for x, _, _, y in found], [errors(x, y) for _, _, x, y in found]))
    ok = repeats and not beyond(ours, theirs)
    return line(check, name, regime, dtype, ok=ok, sizes=sizes, ours=ours, reference=theirs, note="; ".join(notes))


def one_token(name, regime, dtype, *, device="cuda", **sizes):
    """`step` in place against float64."""
    a = rounded(inputs(name, regime, T=1, **sizes), dtype, device)
    state = a.pop("initial_state")
    token = {f"{key}_t" if key in "qkv" else key: x[:, 0] if torch.is_tensor(x) else x for key, x in a.items()}
    double = {key: x.double() if torch.is_tensor(x) else x for key, x in token.items()}
    step = CASES[name].module.step
    with torch.no_grad():
        exact = step(**double, state=tree_map(torch.Tensor.double, state))
        theirs = step(**token, state=state, backend="torch")
        found = step(**token, state=tree_map(torch.clone, state), inplace=True, backend="triton")
    named = [{"o": (o,), "state": tuple(leaves(S))} for o, S in (found, theirs, exact)]
    ours, reference = (errors(x, named[2]) for x in named[:2])
    ok = all(x <= max(3 * reference[key], 1e-6) for key, x in ours.items())
    return line("step", name, regime, dtype, ok=ok, sizes={"T": 1, **sizes}, ours=ours, reference=reference)


def mamba_inputs(dtype, device="cuda", *, B, T, D, N, step, seed=0):
    """u, B, C in `dtype`, the rest in float32; the decay of a token reaches exp(-2 step)."""
    draw = torch.Generator("cpu").manual_seed(seed)
    low = lambda *shape: torch.randn(*shape, generator=draw).to(device, dtype)  # noqa: E731
    a = {"u": low(B, T, D), "delta": step * torch.rand(B, T, D, generator=draw), "A": -2 * torch.rand(D, N, generator=draw)}
    a |= {"B": low(B, T, N), "C": low(B, T, N), "D": torch.randn(D, generator=draw), "initial_state": torch.randn(B, D, N, generator=draw)}
    return {name: x.to(device) for name, x in a.items()}


def selective_scan(discretization, regime, dtype, *, device="cuda", **sizes):
    """Mamba's scan twice, PyTorch's in float32, and float64."""
    a = mamba_inputs(dtype, device, **sizes, step={"strong": 30.0, "weak": 0.01}[regime])
    options = {"discretization": discretization}
    exact = results(mamba.chunkwise, {name: x.double() for name, x in a.items()}, **options)
    theirs = errors(results(mamba.chunkwise, a, **options), exact)
    first, second = (results(mamba.fused, a, backend="triton", **options) for _ in range(2))
    ours = errors(first, exact)
    repeats = same(first, second)
    ok = repeats and all(x <= max(3 * theirs[name], 1e-6) for name, x in ours.items())
    shown = {"B": sizes["B"], "T": sizes["T"], "H": sizes["D"], "K": sizes["N"]}
    note = "H: channels, K: states" if repeats else "two calls differ"
    return line("scan", f"mamba {discretization}", regime, dtype, ok=ok, sizes=shown, ours=ours, reference=theirs, note=note)


def same(first, second):
    return all(torch.equal(x, y) for name in first for x, y in zip(first[name], second[name], strict=True))


def usual(name, dtype=torch.bfloat16, device="cuda", seed=0, **sizes):
    """Inputs of a moderate size, and the sizes."""
    sizes = {"B": 2, "T": 300, "H": 2, "HV": 4, "K": 64, "V": 64} | sizes
    return rounded(inputs(name, "weak" if "g" in CASES[name].gates else "zero", seed=seed, **sizes), dtype, device), sizes


def in_a_graph(name):
    """Forward and backward captured once, replayed on other inputs."""
    a, sizes = usual(name)
    other, _ = usual(name, seed=1)
    fused = CASES[name].module.fused
    results(fused, a, backend="triton")
    static = with_gradients(a)
    weights = None
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def run():
        nonlocal weights
        o, state = fused(**static, output_final_state=True, backend="triton")
        weights = weights or [torch.ones_like(o), *(torch.ones_like(x) for x in leaves(state))]
        return [o, *leaves(state), *torch.autograd.grad([o, *leaves(state)], tensors(static), weights)]

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        captured = run()
    with torch.no_grad():
        for x, y in zip(tensors(static), tensors(other)):
            x.copy_(y)
    graph.replay()
    replayed = [x.clone() for x in captured]
    ok = all(torch.equal(x, y) for x, y in zip(replayed, run(), strict=True))
    return line("CUDA graph", name, dtype=torch.bfloat16, ok=ok, sizes=sizes)


def compiled(name):
    """torch.compile(fullgraph=True), forward and backward; a second length makes no second kernel."""
    a, sizes = usual(name)
    module = CASES[name].module

    def whole(**x):
        return module.fused(**x, backend="triton")

    found = results(torch.compile(whole, fullgraph=True), a)
    expected = results(whole, a)
    ours = errors(found, {key: tuple(x.double() for x in xs) for key, xs in expected.items()})
    return line("torch.compile", name, dtype=torch.bfloat16, ok=max(ours.values()) < 1e-6, sizes=sizes, ours=ours)


def without_waiting(name):
    """No call waits for the device, packed or not: torch raises if one does."""
    a, sizes = usual(name, B=1)
    bounds = torch.tensor([0, 100, 300], device="cuda")
    states = {"initial_state": tree_map(lambda x: x.expand(2, *x.shape[1:]).clone(), a["initial_state"])}
    calls = [(a, {}), (a | states, {"cu_seqlens": bounds})]
    for arguments, packed in calls:
        results(CASES[name].module.fused, arguments, backend="triton", **packed)
    note = ""
    for arguments, packed in calls:
        leaf = with_gradients(arguments)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            o, _ = CASES[name].module.fused(**leaf, backend="triton", **packed)
            torch.autograd.grad(o, tensors(leaf), torch.ones_like(o))
        except RuntimeError as problem:
            note = f"{'packed: ' if packed else ''}{str(problem).splitlines()[0]}"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return line("no wait", name, dtype=torch.bfloat16, ok=not note, sizes=sizes, note=note)


def another_device(name):
    """Tensors on the second device while the first is the current one."""
    if torch.cuda.device_count() < 2:
        return None
    a, sizes = usual(name)
    b = {key: tree_map(lambda y: y.to("cuda:1") if torch.is_tensor(y) else y, x) for key, x in a.items()}
    first, second = (results(CASES[name].module.fused, x, backend="triton") for x in (a, b))
    ok = same(first, {key: tuple(x.to("cuda:0") for x in xs) for key, xs in second.items()})
    return line("second device", name, dtype=torch.bfloat16, ok=ok, sizes=sizes)


def many_elements(name, T=MANY, H=16, K=128):
    """More than 2^31 elements in one call against its two halves, the state and its gradient handed over."""
    draw = torch.Generator("cuda").manual_seed(0)
    axes = {"HV": H, "K": K}
    q, k, v, do = (torch.randn(1, T, H, K, generator=draw, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    a = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1, out=k), "v": v}
    for gate, letters in CASES[name].gates.items():
        x = torch.rand(1, T, *(axes[letter] for letter in letters.split()), generator=draw, device="cuda")
        a[gate] = -0.1 * x if gate == "g" else x
    f = CASES[name].module.fused
    options = CASES[name].options | {"backend": "triton", "output_final_state": True}

    def run(piece, S, dS):
        leaf = {key: x[:, piece].detach().requires_grad_() for key, x in a.items()}
        S = S.detach().requires_grad_()
        o, last = f(**leaf, **options, initial_state=S)
        found = torch.autograd.grad([o, last], [*leaf.values(), S], [do[:, piece], dS])
        return [o.detach(), *found[:-1]], last.detach(), found[-1]

    zero, half = torch.zeros(1, H, K, K, device="cuda"), T // 2
    whole, last, dS = run(slice(0, T), zero, zero)
    with torch.no_grad():
        middle = f(**{key: x[:, :half] for key, x in a.items()}, **options)[1]
    late, last_half, dS_middle = run(slice(half, T), middle, zero)
    names = ["o", *(f"d{key}" for key in a)]
    ours = {key: distance(x[:, half:], y.double()) for key, x, y in zip(names, whole, late)}
    del late
    early, _, dS_half = run(slice(0, half), zero, dS_middle)
    ours |= {key: max(ours[key], distance(x[:, :half], y.double())) for key, x, y in zip(names, whole, early)}
    ours |= {"state": distance(last, last_half.double()), "dinitial_state": distance(dS, dS_half.double())}
    sizes = {"B": 1, "T": T, "H": H, "HV": H, "K": K, "V": K}
    return line("over 2^31", name, dtype=torch.bfloat16, ok=max(ours.values()) < 1e-2, sizes=sizes, ours=ours, note="against halves")


FIRST = """
import time, torch
from linattn_edu.kernels import verify
a, _ = verify.usual({name!r}, T=1024, K=128, V=128)
torch.cuda.synchronize()
start = time.perf_counter()
verify.results(verify.CASES[{name!r}].module.fused, a, backend="triton")
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_call(name):
    """Seconds of the first call, forward and backward, in a fresh process with an empty cache of kernels."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        done = subprocess.run([sys.executable, "-c", FIRST.format(name=name)], capture_output=True, text=True, env=environment)
    said = done.stdout.split()  # there also where the process aborts as it leaves, which is no less a failure
    seconds = float(said[-1]) if said else float("inf")
    note = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    return line("first call", name, dtype=torch.bfloat16, ok=seconds <= 10 and done.returncode == 0, seconds=f"{seconds:.1f}", note=note)


def attempt(check, *arguments, **options):
    """The line of a check; what it raises is a line too."""
    start = time.perf_counter()
    try:
        row = check(*arguments, **options)
    except Exception as problem:
        said = (str(problem).splitlines() or [""])[0][:200]
        words = dict(zip(("variant", "regime", "dtype"), arguments))
        sizes = {key: x for key, x in options.items() if key in COLUMNS}
        row = line(check.__name__, **words, ok=False, sizes=sizes, note=f"{type(problem).__name__}: {said}")
    torch.cuda.empty_cache()
    if row is not None and not row["seconds"]:
        row["seconds"] = f"{time.perf_counter() - start:.2f}"
    return [row] if row else []


def small():
    """Checks that may run side by side."""
    for name in VARIANTS:
        yield from ((check, name) for check in (in_a_graph, compiled, without_waiting, another_device))
    for discretization, regime, dtype in itertools.product(("euler", "zoh"), ("strong", "weak"), DTYPES):
        for D, N in ((64, 16), (100, 7), (24, 100)):
            yield selective_scan, discretization, regime, dtype, dict(B=2, T=300, D=D, N=N)
    for name, regime in REGIMES_OF:
        for dtype in DTYPES:
            for K, V in SIZES:
                yield case, name, regime, dtype, dict(B=2, T=300, H=2, HV=4, K=K, V=V)
                yield one_token, name, regime, dtype, dict(B=2, H=2, HV=4, K=K, V=V)
            yield case, name, regime, dtype, dict(B=1, T=300, H=2, HV=4, K=64, V=64, bounds=BOUNDS)
        yield case, name, regime, torch.bfloat16, dict(B=1, T=1, H=1, HV=2, K=128, V=128, draws=DRAWS)
        for T in (1, 2, 40):
            yield case, name, regime, torch.bfloat16, dict(B=1, T=T, H=8, HV=16, K=128, V=128)


def large():
    """Checks that fill the device's memory."""
    for name, regime in REGIMES_OF:
        for T in (4096, 65536):
            yield case, name, regime, torch.bfloat16, dict(B=1, T=T, H=1, HV=2, K=128, V=128)
    yield from ((many_elements, name) for name in ("decay", "gated_deltanet"))


def grouped(tasks):
    """Tasks of one variant and dtype follow one another in one process, which then compiles each kernel once."""
    groups = {}
    for check, *arguments in tasks:
        options = arguments.pop() if isinstance(arguments[-1], dict) else {}
        dtype = arguments[2] if len(arguments) > 2 else check.__name__
        groups.setdefault((arguments[0], dtype), []).append((check, arguments, options))
    return list(groups.values())


def run_group(group, deadline):
    rows = []
    for check, arguments, options in group:
        if time.time() > deadline:
            words = dict(zip(("variant", "regime", "dtype"), arguments))
            rows.append(line(check.__name__, **words, ok="", sizes={k: x for k, x in options.items() if k in COLUMNS}, note="no time left"))
        else:
            rows += attempt(check, *arguments, **options)
    return rows


def run(tasks, workers, deadline):
    """All lines; a process that dies takes its own group with it and no other."""
    rows = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=8) as pool:
        waiting = [pool.submit(run_group, group, deadline) for group in grouped(tasks)]
        for done in as_completed(waiting):
            rows += done.result()
    return rows


def write(path, rows):
    """The table as a file; on the screen what failed, and the worst error of each check and dtype."""
    with open(path, "w", newline="") as file:
        import triton

        about = provenance("cuda" if torch.cuda.is_available() else "cpu", triton=triton.__version__)
        file.writelines(f"# {key}: {x}\n" for key, x in about.items())
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    worst = {}
    for row in rows:
        if row["ok"] is not True:
            print(*(f"{key}={x}" for key, x in row.items() if x != "" and key not in TENSORS))
        if row["error"]:
            key = row["check"], row["dtype"], row["variant"]
            worst[key] = max(worst.get(key, (-1.0,)), (float(row["error"]), row["reference"], row["worst"], row["regime"], row["K"]))
    for key, x in sorted(worst.items()):
        print("{:14}{:10}{:20}".format(*key), *x)
    print(f"{sum(row['ok'] is True for row in rows)} of {len(rows)} cases ok")


def main(path, seconds=280):
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes here are enough
    deadline = time.time() + float(seconds)
    workers = os.cpu_count()
    rows = run(((first_call, name) for name in VARIANTS), 2, deadline)  # each compiles on several cores
    rows += run(small(), workers, deadline)
    rows += run(large(), max(1, workers // 5), deadline)
    write(path, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
