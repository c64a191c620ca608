"""The rows of the table of `python -m linattn_edu.bench`: one form and one pass at one shape, timed and checked."""

from functools import partial

import torch
import torch.nn.functional as F

from linattn_edu import VARIANTS, mamba
from linattn_edu.bench import inputs, rivals
from linattn_edu.bench.measure import peak_bytes, replay_seconds, seconds

MODULES = VARIANTS | {"mamba": mamba}
OPTIONS = {"linear": {"feature_map": "identity", "normalize": False}}
OWN = ("recurrent", "parallel", "chunkwise", "fused")
STEPS = {"softmax": ("SDPA",), "mamba": ("step", "copy")}
"""The forms of a decoding step, where they are not `step`, `step in PyTorch`, `copy` and `FLA`."""

LONGEST = {"parallel": 4096, "recurrent": 8192}
"""Beyond these T the T x T form takes the memory, and the recurrence the time, of everything else together."""

CACHE = 2**28
"""Bytes of states that no cache of a GPU holds."""

MEASURED = ("wall_ms", "wall_low", "wall_high", "device_ms", "device_low", "device_high", "peak_MiB", "error", "note")


def form_of(op, form):
    """The function behind a form of an operator, or None if there is none."""
    if form == "SDPA":
        return rivals.sdpa if op == "softmax" else None
    if form == "FLA":
        return rivals.fla(rivals.CHUNK, op)
    if form in OWN and not (op == "softmax" and form == "fused"):
        return partial(getattr(MODULES[op], form), **OPTIONS.get(op, {}))
    return None


def first_head(op, name, x):
    """The part of an input, an output or a gradient that the first head of the first sequence knows; None if it shares."""
    if op == "mamba":
        return None if name == "A" else x[:1]
    return x[:1, :, :1]


def relative(x, y):
    norm = y.norm()
    return ((x.double() - y).norm() / norm).item() if norm > 0 else x.abs().max().item()


def gradients(f, a, do):
    """Outputs and gradients of one call."""
    a = {name: x.detach().requires_grad_() for name, x in a.items()}
    o = f(**a)[0]
    return [o, *torch.autograd.grad(o, list(a.values()), do)]


class Exact:
    """Output and gradients in float64 of the first head of the first sequence, computed when they are first asked for."""

    def __init__(self, op, a, do):
        self.op, self.names, self.values = op, ["o", *a], None
        self.shared = {"q", "k"} if op != "mamba" and do.shape[2] > a["q"].shape[2] else set()
        self.inputs = {name: x if name == "A" else first_head(op, name, x) for name, x in a.items()}
        self.do = first_head(op, "o", do)

    def error(self, results):
        """The worst error of what a form returned, or nothing where the exact values would take too long."""
        if self.op == "softmax" and self.do.shape[1] > 8192:
            return ""
        if self.values is None:
            a = {name: x.double() for name, x in self.inputs.items()}
            exact = rivals.sdpa if self.op == "softmax" else form_of(self.op, "chunkwise")
            self.values = gradients(exact, a, self.do.double())
        pairs = zip(self.names, results, self.values)
        known = [(first_head(self.op, name, x), y) for name, x, y in pairs if name not in self.shared]
        return f"{max(relative(x, y) for x, y in known if x is not None):.2e}"


def measured(run, device, budget, calls=1):
    """The columns of time and memory of `run()`, which makes `calls` calls."""
    gpu = device.type == "cuda"
    row = {}
    for name, clock in (("wall", partial(seconds, device=device, warmup=3)), ("device", replay_seconds)):
        t = clock(run, at_least=20 if gpu else 5, budget=budget) if gpu or name == "wall" else None
        for column, x in (("ms", "median"), ("low", "low"), ("high", "high")):
            row[f"{name}_{column}"] = f"{1e3 * getattr(t, x) / calls:.5f}" if t else ""
    row["peak_MiB"] = f"{peak_bytes(run, device=device) / 2**20:.1f}"
    return row


def row(op, form, passes, s, dtype, result):
    """A row of the table; `result()` gives its measured columns, and what stops it is written down in their place."""
    empty = dict.fromkeys(MEASURED, "")
    about = {"op": op, "form": form, "pass": passes, **s, "dtype": str(dtype).removeprefix("torch.")}
    try:
        return about | empty | result()
    except Exception as problem:  # whatever a rival raises belongs in its row
        return about | empty | {"note": f"{type(problem).__name__}: {str(problem).splitlines()[0][:160] if str(problem) else ''}"}


def training(op, forms, passes, s, dtype, device, budget, guard=""):
    """Rows of the passes over whole sequences; `guard` goes beside the gradients that FLA would refuse.

    With a budget of None each call is made once and nothing is measured.
    """
    a = inputs.arguments(op, **s, dtype=dtype, device=device)
    o_like = a["u"] if op == "mamba" else a["v"]
    do = torch.randn(o_like.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    exact = Exact(op, a, do)
    for form in forms:
        f = form_of(op, form)
        if f is None or s["T"] > LONGEST.get(form, s["T"]):
            continue

        def forward(f=f):
            with torch.no_grad():
                return [f(**a)[0]]

        runs = {"forward": forward, "forward+backward": partial(gradients, f, a, do)}
        for name in passes:
            guarded = form == "FLA" and op in rivals.GUARDED and name != "forward"

            def result(run=runs[name], note=guard if guarded else ""):
                found = run()
                if budget is None:
                    return {}
                error = exact.error(found)
                return measured(run, device, budget) | {"error": error, "note": note}

            yield row(op, form, name, s, dtype, result)


def step_of(op, form, a):
    """One token as a function of the state, or None; `a` are the arguments of a sequence of one token."""
    if form not in STEPS.get(op, ("step", "step in PyTorch", "copy", "FLA")):
        return None
    if form == "SDPA":
        return lambda cache: (F.scaled_dot_product_attention(a["q"].transpose(1, 2), *cache), None)
    if form == "copy":
        other = torch.empty(0, device=next(iter(a.values())).device)
        return lambda S: other.resize_(S.shape).copy_(S)
    if form == "FLA":
        f = rivals.fla(rivals.DECODE, op)
        return f and (lambda S: f(**a, initial_state=S, output_final_state=True))
    token = {name if name in ("A", "g", "beta") else f"{name}_t": x if name == "A" else x[:, 0] for name, x in a.items()}
    options = OPTIONS.get(op, {}) | ({"backend": "torch"} if form == "step in PyTorch" else {})
    return lambda S: MODULES[op].step(**token, state=S, **options, inplace=True)


def states(op, s, dtype, device):
    """As many states, or key-value caches, as do not fit into a GPU's cache together, but at most 32."""
    if op == "softmax":
        return [tuple(torch.randn(s["B"], s["H"], s["T"], s[x], device=device, dtype=dtype) for x in "KV")]
    S = inputs.state(op, **s, device=device)
    count = min(32, -(-CACHE // (S.numel() * 4))) if device.type == "cuda" else 1
    return [S, *(S.clone() for _ in range(count - 1))]


def step_error(op, form, a, step, S):
    """Of the output and the new state."""
    if form in ("SDPA", "copy"):
        return ""
    exact = step_of(op, "step" if op == "mamba" else "step in PyTorch", {name: x.double() for name, x in a.items()})
    pairs = [(x.reshape(y.shape), y) for x, y in zip(step(S.clone()), exact(S.double()))]
    return f"{max(relative(x, y) for x, y in pairs):.2e}"


def decoding(op, forms, s, dtype, device, budget):
    """Rows of one token after T tokens."""
    a = inputs.arguments(op, **s | {"T": 1}, dtype=dtype, device=device)
    for form in forms:
        step = step_of(op, form, a)
        if step is None:
            continue

        def result(form=form, step=step):
            turns = states(op, s, dtype, device)
            if budget is None:
                step(turns[0])
                return {}
            error = step_error(op, form, a, step, turns[0])

            def run():
                for S in turns:
                    step(S)

            return measured(run, device, budget, len(turns)) | {"error": error}

        with torch.no_grad():
            yield row(op, form, "decode", s, dtype, result)
