"""What needs a large GPU: layers in bfloat16 on the kernels, a model of 100M parameters, a million tokens of context.

python -m linattn_edu.experiments.h200 layers --out book/data/h200_layers.csv
python -m linattn_edu.experiments.h200 hybrid --seconds 150 --out book/data/h200_hybrid.csv
python -m linattn_edu.experiments.h200 decode --out book/data/h200_decode.csv

A row is printed and written as soon as it is known. With --tiny the sizes are those of a test on a CPU.
"""

import argparse
import dataclasses
import os
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import islice
from multiprocessing import get_context

import torch

from linattn_edu import data
from linattn_edu.bench import measure
from linattn_edu.bench import record as tables
from linattn_edu.experiments.language import equal_recipes
from linattn_edu.layers import Cache, ShortConvolution
from linattn_edu.layers.attention import AttentionLayer
from linattn_edu.models import LanguageModel, LanguageModelConfig
from linattn_edu.train import adamw, evaluate, learning_rate
from linattn_edu.train.loop import cross_entropy, update

KERNELS = ("linear", "retention", "gla", "mamba2", "deltanet", "gated_deltanet", "kda", "mamba")
"""The mixers that have kernels; attention is torch's."""


def layers(*, device="cuda", mixers=KERNELS, batch=4, length=512, width=256, heads=4, depth=2, workers=1):
    """One training step of a small model of each mixer in bfloat16 (autocast), with kernels and without.

    Gradients are compared with those of the chunkwise form in float32, in the Frobenius norm; the step is AdamW's. All
    mixers have the same K and V, and a short convolution.

    Result on an H200: with kernels the error of the whole gradient, 0.006 to 0.027, is that of the chunkwise form to a
    tenth. That of the worst parameter is at most a seventh larger. (Linear attention had 0.028 in a W_q instead of 0.011
    while dO met values and state in bfloat16: what its normaliser leaves of dQ is a small difference.)

    Args:
        device: where it runs.
        mixers: names in `models.MIXERS`.
        batch, length: windows of the novels, and bytes a window.
        width, heads, depth: sizes of the models.
        workers: mixers at a time, each in a process of its own: most of the time goes into compiling kernels.

    Yields:
        rows with mixer, form, dtype, loss, loss_after: on the same windows after the step, gradient_error: over all
        parameters, worst_error: of the parameter with the largest error, worst: its name.
    """
    job = partial(_one_step, device=device, batch=batch, length=length, width=width, heads=heads, depth=depth)
    if workers == 1:
        for name in mixers:
            yield from job(name)
        return
    errors = []
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(job, name) for name in mixers]):
            errors += filter(None, [done.exception()])
            yield from [] if done.exception() else done.result()
    if errors:
        raise errors[0]


def _one_step(name, *, device, batch, length, width, heads, depth):
    mixer, options = equal_recipes(width, heads).get(name, (name, {}))
    config = LanguageModelConfig(
        width=width, heads=heads, hidden=2 * width, mixers=(mixer,) * depth, options={mixer: options}
    )
    x, y = next(data.batches("train", batch=batch, length=length))
    rows, exact = [], None
    for form, bf16 in (("chunkwise", False), ("chunkwise", True), ("fused", True)):
        torch.manual_seed(0)
        model = LanguageModel(config).to(device)
        for block in model.blocks:
            block.mixer.form = form
        loss = update(model, adamw(model, lr=1e-3, weight_decay=0.1), x, y, rate=1e-3, clip=1e9, bf16=bf16)
        gradient = {key: p.grad.double() for key, p in model.named_parameters()}
        exact = gradient if exact is None else exact
        with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16, enabled=bf16):
            after = cross_entropy(model, x, y).item()
        row = {"mixer": name, "form": form, "dtype": "bfloat16" if bf16 else "float32", "loss": loss}
        rows.append(row | {"loss_after": after, **gradient_errors(gradient, exact)})
    return rows


def gradient_errors(gradient, exact):
    """|x - y| / |y| over all parameters together, and of the worst of them."""
    off = {key: (gradient[key] - exact[key]).norm().item() for key in exact}
    size = {key: exact[key].norm().item() for key in exact}
    each = {key: off[key] / size[key] for key in exact if size[key] > 0}
    worst = max(each, key=each.get)
    whole = (sum(x**2 for x in off.values()) / sum(x**2 for x in size.values())) ** 0.5
    return {"gradient_error": whole, "worst_error": each[worst], "worst": worst}


def disagreements(rows):
    """The mixers whose kernels are less exact in bfloat16 than the chunkwise form: by half its error, and 0.005 more.

    Args:
        rows: of `layers`.

    Returns:
        a list of names.
    """
    error = {(row["mixer"], row["form"], row["dtype"]): row for row in rows}
    columns, found = ("gradient_error", "worst_error"), []
    for name in dict.fromkeys(row["mixer"] for row in rows):
        fused, torchs = (error[name, form, "bfloat16"] for form in ("fused", "chunkwise"))
        if not all(fused[column] <= 1.5 * torchs[column] + 0.005 for column in columns):  # also if it is not a number
            found.append(name)
    return found


HYBRID = LanguageModelConfig(
    width=768,
    heads=12,
    hidden=2304,
    mixers=("gated_deltanet", "gated_deltanet", "gated_deltanet", "gated_attention") * 3,
)
"""Three layers of Gated DeltaNet to one of gated attention, 100M parameters."""


def hybrid(*, device="cuda", seconds=150.0, config=HYBRID, batch=32, length=1024, lr=1e-3, seed=0, validations=15):
    """Train a hybrid on the novels in bfloat16 for some time; the learning rate follows the clock, not the steps.

    Two novels are 1.6 MB: a model of this size knows them by heart after some passes, and the validation loss turns.
    Three steps of another model and a validation come before the clock starts, since they compile the kernels.

    Result on an H200: 169,000 bytes a second. The validation loss is lowest after 30 seconds, 1.277 nats per byte after
    3 passes, and 2.69 at the end of 150, when the training loss is 0.03.

    Args:
        device: where it runs.
        seconds: of training, with its validations.
        config: the model.
        batch, length: windows a step, and bytes a window.
        lr: peak learning rate.
        seed: of weights and windows.
        validations: how often the loss on 64 windows of the unseen novel is taken, at the end for the last time.

    Yields:
        rows with step, loss, lr, seconds, tokens_per_second (of this step), validation (or "").
    """
    judge, recipe = partial(_judge, length=length), {"clip": 1.0, "bf16": True}
    model, optimizer, batches = _fresh(config, device, seed, batch, length)
    for x, y in islice(batches, 3):
        update(model.train(), optimizer, x, y, rate=lr, **recipe)
    judge(model)
    model, optimizer, batches = _fresh(config, device, seed, batch, length)
    began, judged, now = time.perf_counter(), 0, 0.0
    for step, (x, y) in enumerate(batches, 1):
        rate = learning_rate(now, steps=seconds, peak=lr, warmup=seconds / 10)
        start = time.perf_counter()
        loss = update(model.train(), optimizer, x, y, rate=rate, **recipe)
        speed = batch * length / (time.perf_counter() - start)
        now = time.perf_counter() - began
        row = {"step": step, "loss": loss, "lr": rate, "seconds": round(now, 3), "tokens_per_second": round(speed)}
        due = now >= seconds * (judged + 1) / validations
        yield row | {"validation": judge(model) if due else ""}
        now, judged = time.perf_counter() - began, judged + due
        if now >= seconds and due:
            return


def _fresh(config, device, seed, batch, length):
    torch.manual_seed(seed)
    model = LanguageModel(config).to(device)
    return model, adamw(model, lr=0.0, weight_decay=0.1), data.batches("train", batch=batch, length=length, seed=seed)


def _judge(model, length):
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        return evaluate(model.eval(), length=length, count=64)


def convolution_share(*, device="cuda", config=HYBRID, batch=32, length=1024):
    """How much of a training step the short convolutions take, forward and backward, each timed alone.

    Args:
        device: where it runs.
        config: the model.
        batch, length: windows a step, and bytes a window.

    Returns:
        seconds of a step, and of it those of all short convolutions.
    """
    model, optimizer, batches = _fresh(config, device, 0, batch, length)
    x, y = next(batches)
    train = partial(update, model, optimizer, x, y, rate=0.0, clip=1.0, bf16=True)
    step = measure.seconds(train, device=device, warmup=3)
    convolutions = [layer for layer in model.modules() if isinstance(layer, ShortConvolution)]
    each = {layer.width: layer for layer in convolutions}
    spent = {width: _both_ways(layer, batch, length, device) for width, layer in each.items()}
    return step.median, sum(spent[layer.width] for layer in convolutions)


def _both_ways(layer, batch, length, device):
    """Seconds of a layer forward and backward in bfloat16."""
    x = torch.randn(batch, length, layer.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    inputs, dy = [x, *layer.parameters()], torch.randn_like(x)
    return measure.seconds(lambda: torch.autograd.grad(layer(x)[0], inputs, dy), device=device).median


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
    random numbers, and grow by each token, into memory of which an eighth is spare.

    Result on an H200: the states of Gated DeltaNet and KDA take 2.5 MB at 1K tokens and at 1M, softmax's cache 38 MB
    and 39 GB, and the hybrids' a quarter of that. As a graph, a token takes Gated DeltaNet 2.1 ms and KDA 2.2 ms at any
    length, softmax 1.6 ms at 1K and 10.5 ms at 1M, the hybrids 1.9 to 2.0 and 4.2 to 4.3 ms. Eager steps take 17 ms
    and more, which is the host's time.

    Args:
        device: where it runs.
        contexts: T.
        models: keys of `DECODERS`.
        width, heads: sizes.
        budget: seconds of measuring a row, for 20 steps at least.

    A row that does not fit in memory, or whose launches cannot be recorded, is left out, and so are longer contexts.

    Yields:
        rows with model, T, timing: "eager", with all that the host does to launch a step, or on a GPU also "graph",
        the launches replayed as a CUDA graph; seconds (median), low, high (quartiles), tokens_per_second, cache_bytes,
        and for eager steps peak_bytes.
    """
    gpu = torch.device(device).type == "cuda"
    for timing in ("eager", "graph") if gpu else ("eager",):
        for name in models:
            config = LanguageModelConfig(width=width, heads=heads, hidden=8 * width // 3, mixers=DECODERS[name])
            model = LanguageModel(config).to(device, torch.bfloat16).eval()
            for T in contexts:
                try:
                    yield {"model": name, "T": T, "timing": timing, **_decode(model, T, device, timing, budget)}
                except RuntimeError as error:
                    if timing == "eager" and not isinstance(error, torch.OutOfMemoryError):
                        raise
                    print(f"{name}, T {T}, {timing}: {error}", file=sys.stderr, flush=True)
                    break


def _decode(model, T, device, timing, budget):
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    cache = random_cache(model, T, device=device, dtype=next(model.parameters()).dtype)
    held, peak = sum(c.bytes for c in cache), ""

    def step():
        nonlocal cache
        _, cache = model(ids, cache)

    options = {"at_least": 20, "budget": budget, "warmup": 3}
    step()  # the cache moves to where there is room behind it
    if timing == "graph":
        spent = measure.replay_seconds(step, **options)
    else:
        spent = measure.seconds(step, device=device, **options)
        if torch.device(device).type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            peak = torch.cuda.max_memory_allocated(device)
    speed = {"seconds": spent.median, "low": spent.low, "high": spent.high, "tokens_per_second": 1 / spent.median}
    return speed | {"cache_bytes": held, "peak_bytes": peak}


TINY = {
    "layers": {"batch": 1, "length": 16, "width": 32, "heads": 2, "depth": 1},
    "hybrid": {"config": dataclasses.replace(HYBRID, width=32, heads=2, hidden=64), "batch": 2, "length": 32},
    "decode": {"contexts": (2**6, 2**10), "width": 48, "heads": 2, "budget": 0.0},
}
"""Sizes for a test on a CPU."""


def main(argv=None):
    parser = argparse.ArgumentParser("python -m linattn_edu.experiments.h200", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["layers", "hybrid", "decode"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training (hybrid)")
    parser.add_argument("--workers", type=int, default=min(len(KERNELS), os.cpu_count()), help="processes (layers)")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--out", required=True, help="a CSV file")
    args = parser.parse_args(argv)
    sizes = {"device": args.device} | (TINY[args.what] if args.tiny else {})
    command = shlex.join(["python", "-m", "linattn_edu.experiments.h200", *(sys.argv[1:] if argv is None else argv)])
    about = tables.provenance(args.device) | {"command": command}
    if args.what == "hybrid":
        about |= _about_hybrid(sizes)
    more = {"layers": {"workers": args.workers}, "hybrid": {"seconds": args.seconds}, "decode": {}}[args.what]
    measured, rows = {"layers": layers, "hybrid": hybrid, "decode": decode}[args.what](**sizes, **more), []
    for row in tables.stream(args.out, measured, about):
        told = (f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in row.items())
        print(*told, sep=", ", flush=True)
        rows.append(row)
    if args.what == "layers" and (wrong := disagreements(rows)):
        sys.exit(f"less exact with kernels than without: {', '.join(wrong)}")


def _about_hybrid(sizes):
    sizes = {"config": HYBRID, "batch": 32, "length": 1024} | sizes
    step, convolution = convolution_share(**sizes)
    with torch.device("meta"):
        parameters = LanguageModel(sizes["config"]).parameters_total
    about = {"config": dataclasses.asdict(sizes["config"]), "parameters": parameters}
    about |= {"batch": sizes["batch"], "length": sizes["length"]}
    return about | {"seconds_a_step": f"{step:.4f}", "of_it_short_convolutions": f"{convolution:.4f}"}


if __name__ == "__main__":
    main()
