"""Advice on training linear attention that is passed around, put to the test; a loss is in nats per byte."""

import dataclasses

import torch
from torch import nn

from linattn_edu import data
from linattn_edu.experiments.language import GPU, parameters, reference
from linattn_edu.experiments.registry import experiment
from linattn_edu.feature_maps import elu1
from linattn_edu.models import LanguageModel
from linattn_edu.train import adamw, evaluate, learning_rate
from linattn_edu.train.loop import update

TIPS = {
    "baseline": {},
    "warm-up 30 %": {"warmup": 0.3},
    "rate x 1.5": {"lr": 1.5},
    "rate x 2": {"lr": 2.0},
    "rate x 2, warm-up 30 %": {"lr": 2.0, "warmup": 0.3},
    "LayerScale 0.1": {"layer_scale": 0.1},
    "LayerNorm": {"norm": "layer"},
    "q, k, v twice as wide": {"wide": 2},
    "softmax first": {"softmax": 0.3},
    "W_q, W_k from N(0, 0.02^2)": {"spread": 0.02},
    "W_q, W_k from N(0, 1)": {"spread": 1.0},
}
"""What changes against the baseline: RMSNorm, warm-up over 10 % of the steps, W_q and W_k from N(0, 1/D)."""


def _changed(config, tip):
    """The configuration, with what the tip changes of it."""
    change, mixer = TIPS[tip], config.mixers[0]
    config = dataclasses.replace(config, norm=change.get("norm", "rms"), layer_scale=change.get("layer_scale"))
    if "wide" not in change:
        return config
    each = change["wide"] * config.width // config.heads
    sizes = {"head_dim": each} if mixer == "softmax" else {"key_dim": each, "value_dim": each}
    return dataclasses.replace(config, options={mixer: config.options.get(mixer, {}) | sizes})


def _models(seed, config, tip):
    """The model that training begins with, and the one that takes over its weights at the swap."""
    torch.manual_seed(seed)
    mixers = ("softmax",) * len(config.mixers) if "softmax" in TIPS[tip] else config.mixers
    model = LanguageModel(dataclasses.replace(config, mixers=mixers))
    for block in model.blocks if "spread" in TIPS[tip] else ():
        for projection in (block.mixer.q_proj, block.mixer.k_proj):
            nn.init.normal_(projection.weight, std=TIPS[tip]["spread"])
    return model, LanguageModel(config)


def _train(model, other, swap, *, seed, device, steps, batch, length, lr, warmup, bf16=False):
    """Train `model`; after `swap` steps `other` takes over its weights. Returns the model that ends."""
    model.to(device)
    optimizer = adamw(model, lr=lr, weight_decay=0.05)
    for step, (x, y) in zip(range(steps), data.batches("train", batch=batch, length=length, seed=seed)):
        if step == swap:
            other.load_state_dict(model.state_dict())
            model = other.to(device)
            optimizer = adamw(model, lr=lr, weight_decay=0.05)
        rate = learning_rate(step, steps=steps, peak=lr, warmup=warmup)
        update(model, optimizer, x, y, rate=rate, clip=1.0, bf16=bf16)
    return model


@experiment(gpu=GPU | {"lr": 1e-3})
def training_tips(
    seed, *, device="cpu", tips=tuple(TIPS), mixer="linear", width=64, heads=2, depth=2, steps=100, batch=8, length=128,
    lr=4e-3, bf16=False,
):  # fmt: skip
    """Longer warm-up, larger rates, LayerScale, the norm, width, softmax first, initial values: one change at a time.

    Result, after 100 steps: a rate 1.5 or 2 times as large helps in every seed (by 0.02 to 0.04), which says that the
    baseline's was low. A warm-up over 30 % of the steps and softmax attention in the first 30 % hurt in every seed (by
    0.01 to 0.02). RMSNorm instead of LayerNorm makes a difference of at most 0.003, and not in its favour.
    LayerScale, wider projections (a third more parameters) and smaller W_q and W_k help in some seeds and hurt in
    others. Nothing here is about stability: no run diverged.

    Args:
        seed: draws weights and windows: the same windows for every tip.
        device: where it runs.
        tips: keys of `TIPS`.
        mixer: "linear" (with RoPE) or "softmax".
        width, heads, depth: sizes of the models.
        steps, batch, length, lr, bf16: of the training.

    Returns:
        rows with tip, mixer, validation, parameters, and gain: how much lower than the baseline of this seed.
    """
    options = {"linear": {"rope_base": 10_000.0}}
    base, rows = reference(width, heads, depth, mixers=(mixer,) * depth, options=options), []
    for tip in ("baseline", *(tip for tip in tips if tip != "baseline")):
        change, config = TIPS[tip], _changed(base, tip)
        swap = round(steps * change["softmax"]) if "softmax" in change else None
        model = _train(
            *_models(seed, config, tip), swap, seed=seed, device=device, steps=steps, batch=batch, length=length,
            lr=lr * change.get("lr", 1.0), warmup=max(round(steps * change.get("warmup", 0.1)), 1), bf16=bf16,
        )  # fmt: skip
        loss = evaluate(model.eval(), length=length, count=48)
        gain = rows[0]["validation"] - loss if rows else 0.0
        rows.append({"tip": tip, "mixer": mixer, "validation": loss, "parameters": parameters(config), "gain": gain})
    return rows


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _error(x, exact):
    """|x - exact| / |exact| in the Frobenius norm, over what is finite, and the share of what is not."""
    finite = x.isfinite()
    off = ((x.double() - exact)[finite].norm() / exact[finite].norm()).item() if finite.any() else float("nan")
    return {"error": off, "not_finite": 1 - finite.float().mean().item()}


@experiment(gpu={"T": 4096})
def division_order(seed, *, device="cpu", T=1024, sizes=(48, 64), scales=(1.0, 8.0)):
    """O = Q (K^T V) / sqrt(d) with the division at the end, as advised, or on Q before: which is more exact?

    K^T V is not causal here and Q, K are features ELU(x) + 1, as in the advice's code; float64 is the exact result.

    Result: the advice is the wrong way round. With d = 64 dividing by 8 rounds nothing, and both orders agree to the
    bit where nothing overflows. With d = 48 the division at the end rounds once more: in half precision the error is a
    quarter to a third larger. And float16 overflows in Q (K^T V) for most entries at a scale of 8, where dividing first
    loses a few in a hundred.

    Args:
        seed: draws q, k, v.
        device: where it runs.
        T: tokens.
        sizes: d.
        scales: standard deviations of q, k and v.

    Returns:
        rows with order, dtype, d, scale, error (relative, of the finite entries), not_finite (their share).
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    for d in sizes:
        for scale in scales:
            q, k, v = (scale * torch.randn(T, d, generator=draw).to(device) for _ in range(3))
            q, k = elu1(q), elu1(k)
            for name, dtype in DTYPES.items():
                low = [x.to(dtype) for x in (q, k, v)]
                exact = low[0].double() @ (low[1].double().T @ low[2].double()) / d**0.5
                last = low[0] @ (low[1].T @ low[2]) / d**0.5
                first = (low[0] / d**0.5) @ (low[1].T @ low[2])
                for order, o in (("divide last", last), ("divide q first", first)):
                    rows.append({"order": order, "dtype": name, "d": d, "scale": scale, **_error(o, exact)})
    return rows


@experiment(gpu={"lengths": (256, 1024, 4096, 16384, 65536)})
def half_precision(seed, *, device="cpu", lengths=(256, 1024, 4096, 16384), d=64):
    """What must not be in float16: softmax's exponentials, as advised, or the running sums of linear attention.

    One query at the end of T keys, all in float16; softmax with its maximum subtracted, linear attention with ELU+1,
    its sums S and z taken token by token.

    Result: the advice holds for softmax: with its sum in float16, which stands still once a term is below half a unit
    in the last place, the error grows from 0.002 at 256 tokens to 0.8 at 16K; in float32 it stays at 0.0003. Linear
    attention needs it more: from 1024 tokens on q^T z passes 65504, the largest float16, and the output is 0. With
    sums in float32 it is the more exact of the two.

    Args:
        seed: draws q, k, v.
        device: where it runs.
        lengths: T.
        d: K and V.

    Returns:
        rows with attention, inside: the dtype of exponentials or sums, T, error, not_finite.
    """
    draw, rows = torch.Generator().manual_seed(seed), []
    for T in lengths:
        q = torch.randn(8, 1, d, generator=draw).to(device, torch.float16)
        k, v = (torch.randn(8, T, d, generator=draw).to(device, torch.float16) for _ in range(2))
        scores = (q @ k.mT).double() / d**0.5
        exact = scores.softmax(-1) @ v.double()
        phi_q, phi_k = elu1(q.double()), elu1(k.double())
        exact_linear = phi_q @ (phi_k.mT @ v.double()) / (phi_q @ phi_k.sum(1)[..., None])
        for name in ("float16", "float32"):
            dtype = DTYPES[name]
            p = ((q @ k.mT) / d**0.5).to(dtype)
            p = (p - p.amax(-1, keepdim=True)).exp()
            p = (p / running_sum(p[..., None].transpose(1, 2)[:, :, 0])[:, None]).to(torch.float16)
            rows.append({"attention": "softmax", "inside": name, "T": T, **_error(p @ v, exact)})
            S, z = (
                running_sum(elu1(k).to(dtype)[..., :, None] * v.to(dtype)[..., None, :]),
                running_sum(elu1(k).to(dtype)),
            )
            o = (elu1(q).to(dtype) @ S) / (elu1(q).to(dtype) @ z[..., None])
            rows.append({"attention": "linear", "inside": name, "T": T, **_error(o, exact_linear)})
    return rows


def running_sum(x):
    """x_1 + ... + x_T along the axis 1, rounded to the dtype of x after every token: a recurrent state, [B, T, ...]."""
    total = torch.zeros_like(x[:, 0])
    for x_t in x.unbind(1):
        total = total + x_t
    return total
