"""The bill of attention against T, measured: softmax in three ways and linear attention, side by side.

    python -m linattn_edu.bench.sweep --device cuda --dtype bfloat16 --out book/data/sweep_h200_bf16.csv

A row is one form at one length: seconds a forward pass (median and quartiles) and the bytes allocated at its peak.
`decode` measures one token after a context of L tokens: the KV cache against the state.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F

from linattn_edu import linear, softmax
from linattn_edu.bench.ceilings import ceilings
from linattn_edu.bench.measure import peak_bytes, seconds
from linattn_edu.bench.record import provenance, read, recorded, write  # noqa: F401
from linattn_edu.extras import need

tqdm = need("tqdm", "a benchmark").tqdm

FORMS = {
    "softmax, T x T matrix": softmax.parallel,
    "softmax, online": softmax.chunkwise,
    "softmax, SDPA": softmax.fused,
    "linear, chunkwise": linear.chunkwise,
    "linear, recurrent": linear.recurrent,
    "linear, fused": linear.fused,
}


def sweep(forms, lengths, *, B=1, H=1, K=64, V=64, dtype=torch.float32, device="cpu", slowest=2.0, budget=0.2, progress=True):
    """Time and memory of `form(q, k, v)` for each named form at each length.

    A form is left out from the length at which its next call would take more than `slowest` seconds (by the growth
    from its last two lengths) or did not fit in memory. Returns a list of rows (dicts).
    """
    rows = []
    with torch.no_grad(), tqdm(total=len(forms) * len(lengths), disable=not progress) as bar:
        for name, form in forms.items():
            spent = []
            for T in lengths:
                bar.set_postfix_str(f"{name}, T = {T}")
                growth = spent[-1] / spent[-2] if len(spent) > 1 else 4.0
                if spent and spent[-1] * growth > slowest:
                    break
                draw = torch.Generator(device).manual_seed(0)
                q, k, v = (torch.randn(B, T, H, d, generator=draw, device=device, dtype=dtype) for d in (K, K, V))
                try:
                    call = partial(form, q, k, v)
                    t = seconds(call, device=device, budget=budget)
                    memory = peak_bytes(call, device=device)  # after the libraries' own workspaces exist
                except torch.OutOfMemoryError:
                    break
                finally:
                    bar.update()
                spent.append(t.median)
                rows.append({"form": name, "T": T, "seconds": t.median, "low": t.low, "high": t.high, "bytes": memory})
    return rows


def decode(contexts, *, B=1, H=1, K=64, V=64, dtype=torch.float32, device="cpu", budget=0.2, progress=True):
    """Time of one token after L tokens of context (column `T`), and the bytes in which that context is kept.

    Softmax is one query of SDPA over a cache that is in place already, linear attention is `linear.step`.
    """
    rows = []
    with torch.no_grad():
        for L in tqdm(contexts, disable=not progress):
            draw = torch.Generator(device).manual_seed(0)
            q, k, v = (torch.randn(B, 1, H, d, generator=draw, device=device, dtype=dtype) for d in (K, K, V))
            cache = tuple(torch.randn(B, L, H, d, generator=draw, device=device, dtype=dtype) for d in (K, V))
            _, state = linear.chunkwise(q, k, v, output_final_state=True)
            calls = {
                "softmax, SDPA over the cache": (cache, partial(_attend, q, *cache)),
                "linear, step": (state, partial(linear.step, q[:, 0], k[:, 0], v[:, 0], state)),
            }
            for name, (kept, call) in calls.items():
                t = seconds(call, device=device, budget=budget)
                held = sum(x.numel() * x.element_size() for x in kept)
                rows.append({"form": name, "T": L, "seconds": t.median, "low": t.low, "high": t.high, "bytes": held})
    return rows


def _attend(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4096, help="the lengths are 128, 256, ... up to this")
    parser.add_argument("--slowest", type=float, default=2.0, help="seconds of a call from which a form is left out")
    parser.add_argument("--decode", action="store_true", help="one token after a context, in place of a forward pass")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    sizes = {"H": a.heads, "K": a.dim, "V": a.dim, "dtype": getattr(torch, a.dtype), "device": a.device}
    lengths = [2**i for i in range(7, a.longest.bit_length())]
    rows = decode(lengths, **sizes) if a.decode else sweep(FORMS, lengths, slowest=a.slowest, **sizes)
    about = provenance(a.device, what="decode" if a.decode else "forward", B=1, H=a.heads, K=a.dim, V=a.dim, dtype=a.dtype)
    write(a.out, rows, about | ceilings(sizes["dtype"], a.device))


if __name__ == "__main__":
    main()
