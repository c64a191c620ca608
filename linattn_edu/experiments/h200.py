"""What needs a large GPU: layers in bfloat16 on the kernels, a model of 100M parameters, a million tokens of context.

python -m linattn_edu.experiments.h200 layers --out book/data/h200_layers.csv
python -m linattn_edu.experiments.h200 hybrid --minutes 2 --out book/data/h200_hybrid.csv
python -m linattn_edu.experiments.h200 decode --out book/data/h200_decode.csv
"""

import argparse
import dataclasses
import time
from functools import partial

import torch

from linattn_edu import data
from linattn_edu.bench.measure import seconds
from linattn_edu.experiments.registry import record
from linattn_edu.layers import Cache
from linattn_edu.layers.attention import AttentionLayer
from linattn_edu.models import LanguageModel, LanguageModelConfig
from linattn_edu.train import adamw, train
from linattn_edu.train.loop import cross_entropy, update

KERNELS = ("linear", "retention", "gla", "mamba2", "deltanet", "gated_deltanet", "kda")
"""The mixers that have kernels. Mamba has none, and attention is torch's."""


def layers(*, device="cuda", mixers=KERNELS, batch=4, length=512, width=256, heads=4, depth=2):
    """One training step of a small model of each mixer in bfloat16 (autocast), with kernels and without.

    Gradients are compared with those of the chunkwise form in float32, in the Frobenius norm over all parameters; the
    step is AdamW's.

    Args:
        device: where it runs.
        mixers: names in `models.MIXERS`.
        batch, length: windows of the novels, and bytes a window.
        width, heads, depth: sizes of the models.

    Returns:
        rows with mixer, form, dtype, loss, loss_after: on the same windows after the step, and gradient_error.
    """
    x, y = next(data.batches("train", batch=batch, length=length))
    rows = []
    for name in mixers:
        config = LanguageModelConfig(width=width, heads=heads, hidden=2 * width, mixers=(name,) * depth)
        exact = None
        for form, bf16 in (("chunkwise", False), ("chunkwise", True), ("fused", True)):
            torch.manual_seed(0)
            model = LanguageModel(config).to(device)
            for block in model.blocks:
                block.mixer.form = form
            loss = update(model, adamw(model, lr=1e-3, weight_decay=0.1), x, y, rate=1e-3, clip=1e9, bf16=bf16)
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
            exact = gradient if exact is None else exact
            with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
                after = cross_entropy(model, x, y).item()
            error = ((gradient - exact).norm() / exact.norm()).item()
            dtype = "bfloat16" if bf16 else "float32"
            rows.append(
                {
                    "mixer": name,
                    "form": form,
                    "dtype": dtype,
                    "loss": loss,
                    "loss_after": after,
                    "gradient_error": error,
                }
            )
    return rows


HYBRID = LanguageModelConfig(
    width=768,
    heads=12,
    hidden=2304,
    mixers=("gated_deltanet", "gated_deltanet", "gated_deltanet", "gated_attention") * 3,
)
"""Three layers of Gated DeltaNet to one of gated attention, 100M parameters."""


def hybrid(*, device="cuda", minutes=2.0, config=HYBRID, batch=32, length=1024, lr=1e-3, seed=0, pilot=8):
    """Train a hybrid on the novels in bfloat16, as many steps as fit in the time.

    Two novels are 1.6 MB: a model of this size knows them by heart after some passes, and the validation loss turns.

    Args:
        device: where it runs.
        minutes: of training; the speed of `pilot` steps tells how many steps that is.
        config: the model.
        batch, length: windows a step, and bytes a window.
        lr: peak learning rate.
        seed: of weights and windows.
        pilot: steps, after some that compile the kernels.

    Returns:
        rows with step, loss, lr, seconds, validation (now and then), tokens_per_second (over the last 10 steps).
    """
    recipe = {"batch": batch, "length": length, "lr": lr, "seed": seed, "bf16": True, "timed": True, "progress": False}

    def fresh():
        torch.manual_seed(seed)
        return LanguageModel(config).to(device)

    train(fresh(), steps=pilot, validate_every=None, **recipe)
    start = time.perf_counter()
    train(fresh(), steps=pilot, validate_every=None, **recipe)
    steps = max(int(60 * minutes / ((time.perf_counter() - start) / pilot)), 2)
    model = fresh()
    rows = train(model, steps=steps, warmup=max(steps // 10, 1), validate_every=max(steps // 12, 1), **recipe)
    for i, row in enumerate(rows):
        then = rows[i - 10]["seconds"] if i >= 10 else 0.0
        row["tokens_per_second"] = round((i + 1 - max(i - 9, 0)) * batch * length / (row["seconds"] - then))
        row.setdefault("validation", "")
    return rows


DECODERS = {
    "softmax": ("softmax",) * 12,
    "gated_deltanet": ("gated_deltanet",) * 12,
    "kda": ("kda",) * 12,
    "gated_deltanet + softmax": ("gated_deltanet", "gated_deltanet", "gated_deltanet", "softmax") * 3,
    "kda + softmax": ("kda", "kda", "kda", "softmax") * 3,
}


def random_cache(model, T, *, device, dtype):
    """A cache of the size that T tokens leave, with random content: its speed and memory are those of a real one."""
    caches = []
    for block in model.blocks:
        layer = block.mixer
        if isinstance(layer, AttentionLayer):
            state = tuple(torch.randn(1, T, *shape, device=device, dtype=dtype) for shape in layer.stored_shapes)
            empty = layer.initial_cache(1, dtype=dtype, device=device)
            caches.append(Cache(state if len(state) > 1 else state[0], seen=empty.seen + T))
        else:
            cache = layer.initial_cache(1, dtype=dtype, device=device)
            caches.append(cache.map(lambda x: torch.randn_like(x) if x.is_floating_point() else x + T))
    return tuple(caches)


@torch.no_grad()
def decode(
    *, device="cuda", contexts=(2**10, 2**15, 2**18, 2**20), models=tuple(DECODERS), width=768, heads=12, budget=0.3
):
    """One token after T tokens of context: speed, and memory of the cache and in all.

    12 layers of width 768, batch 1, weights and KV cache in bfloat16, states in float32. Caches are filled with
    random numbers. A step of softmax attention copies the cache to append to it, and holds it twice at its peak.

    Result: the states of Gated DeltaNet and KDA take 2.5 MB at 1K tokens and at 1M, softmax's cache 38 MB and 39 GB,
    and the hybrids' a quarter of that.

    Args:
        device: where it runs.
        contexts: T.
        models: keys of `DECODERS`.
        width, heads: sizes.
        budget: seconds of measuring a row.

    Returns:
        rows with model, T, seconds (median), low, high (quartiles), tokens_per_second, cache_bytes, peak_bytes.
    """
    rows = []
    for name in models:
        config = LanguageModelConfig(width=width, heads=heads, hidden=8 * width // 3, mixers=DECODERS[name])
        model = LanguageModel(config).to(device, torch.bfloat16).eval()
        for T in contexts:
            try:
                rows.append({"model": name, "T": T, **_decode(model, T, device, budget)})
            except torch.OutOfMemoryError:
                break
    return rows


def _decode(model, T, device, budget):
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    cache = random_cache(model, T, device=device, dtype=torch.bfloat16)
    step = partial(model, ids, cache)
    spent = seconds(step, device=device, budget=budget, warmup=3)
    peak = ""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        peak = torch.cuda.max_memory_allocated(device)
    speed = {"seconds": spent.median, "low": spent.low, "high": spent.high, "tokens_per_second": 1 / spent.median}
    return speed | {"cache_bytes": sum(c.bytes for c in cache), "peak_bytes": peak}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m linattn_edu.experiments.h200", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["layers", "hybrid", "decode"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=2.0, help="of training")
    parser.add_argument("--out", required=True)
    args = parser.parse_args(argv)
    options = {"minutes": args.minutes} if args.what == "hybrid" else {}
    rows = {"layers": layers, "hybrid": hybrid, "decode": decode}[args.what](device=args.device, **options)
    given = {"device": args.device, **options, "out": args.out}
    command = f"python -m linattn_edu.experiments.h200 {args.what} " + " ".join(
        f"--{key} {x}" for key, x in given.items()
    )
    about = {"device": args.device, **options}
    if args.what == "hybrid":
        about |= {"config": dataclasses.asdict(HYBRID), "parameters": _count(HYBRID), "batch": 32, "length": 1024}
    record(args.out, rows, command=command, arguments=about)


def _count(config):
    with torch.device("meta"):
        return LanguageModel(config).parameters_total


if __name__ == "__main__":
    main()
