"""Recall that is learnt: multi-query associative recall (MQAR), and MQAR where keys are bound again.

    k1 v1 k2 v2 ... kN vN  q1 q2 ... qM        wanted after each q: the value that its key has

One layer of `linattn_edu.layers` between an embedding and a head, no MLP. Every mixer has a short convolution, since
a value must meet the key before it; softmax attention, whose layer has none, gets one in front.

Source of the task: Arora et al. 2023 (2312.04927).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu.experiments.registry import experiment
from linattn_edu.layers import RMSNorm, ShortConvolution
from linattn_edu.models import MIXERS

KEYS = VALUES = 64
SLOW = {"A_range": (1.0, 1.0), "dt_min": 0.007, "dt_max": 0.007}
"""Gates of a half-life of 99 tokens at first. With the published ones a single head may forget too fast to start."""


def mixer(name, width, key_dim, gates=SLOW):
    """The layer `name` with one head and a state of key_dim x width numbers; attention has a head of full width."""
    sizes = {"key_dim": key_dim, "value_dim": width}
    match name:
        case "softmax":
            return MIXERS[name](width, 1)
        case "mamba2":
            return MIXERS[name](width, expand=1, head_dim=width, state_dim=key_dim, **gates)
        case "linear" | "retention" | "gla":
            return MIXERS[name](width, 1, **sizes, conv_size=4)
        case "gated_deltanet" | "kda":
            return MIXERS[name](width, 1, **sizes, **gates)
        case _:
            return MIXERS[name](width, 1, **sizes)


class Recaller(nn.Module):
    """Embedding, one mixer or several, head: ids [B, T] -> logits [B, T, VALUES]."""

    def __init__(self, mixers, width, key_dim, gates=SLOW):
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, width)
        self.mixers = nn.ModuleList(mixer(name, width, key_dim, gates) for name in mixers)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in mixers)
        self.convs = nn.ModuleList(ShortConvolution(width) if name == "softmax" else None for name in mixers)
        self.head = nn.Sequential(RMSNorm(width), nn.Linear(width, VALUES, bias=False))

    def forward(self, ids):
        x = self.embedding(ids)
        for norm, conv, layer in zip(self.norms, self.convs, self.mixers):
            y = norm(x)
            y = y if conv is None else y + conv(y)[0]
            x = x + layer(y)[0]
        return self.head(x)


def recall_batch(draw, batch, pairs):
    """Every key is bound once, and asked for: ids [batch, 3 pairs], answers [batch, pairs]."""
    keys = torch.rand(batch, KEYS, generator=draw).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (batch, pairs), generator=draw)
    asked = torch.rand(batch, pairs, generator=draw).argsort(1)
    return _sequence(keys, values, keys.gather(1, asked)), values.gather(1, asked)


def rebinding_batch(draw, batch, writes, keys=8):
    """`keys` keys are bound writes / keys times each, in random order; the latest value counts."""
    names = torch.rand(batch, KEYS, generator=draw).argsort(1)[:, :keys]
    order = torch.rand(batch, writes, generator=draw).argsort(1) % keys
    values = torch.randint(VALUES, (batch, writes), generator=draw)
    latest = torch.zeros(batch, keys, dtype=torch.long)
    for t in range(writes):
        latest.scatter_(1, order[:, t : t + 1], values[:, t : t + 1])
    return _sequence(names.gather(1, order), values, names), latest


def _sequence(keys, values, queries):
    pairs = torch.stack([keys, KEYS + values], 2).flatten(1)
    return torch.cat([pairs, queries], 1)


def fit(model, draw, make, plan, *, batch, lr, device):
    """Train on `make(draw, batch, n)` for every n of the plan; the loss is that at the queries."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for step, n in enumerate(plan):
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / len(plan)))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 30) * cosine
        ids, wanted = (x.to(device) for x in make(draw, batch, n))
        logits = model(ids)[:, -wanted.shape[1] :]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


@torch.no_grad()
def score(model, draw, make, n, *, device, sequences=256):
    """Accuracy at the queries of new sequences."""
    ids, wanted = (x.to(device) for x in make(draw, sequences, n))
    return (model(ids)[:, -wanted.shape[1] :].argmax(-1) == wanted).float().mean().item()


def curriculum(seed, steps, pairs):
    """The numbers of pairs, step by step: few at first, then mixed, then all."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [n for n in (4, 8, 16, 32, 64) if n <= pairs]
    mixed = [sizes[i] for i in torch.randint(len(sizes), (steps // 2,), generator=draw)]
    early = steps * 3 // 20
    return [min(8, pairs)] * early + mixed[early:] + [pairs] * (steps - steps // 2)


def _measure(seed, mixers, make, plan, n, *, width, key_dim, batch, lr, device, gates=SLOW):
    torch.manual_seed(seed)
    model = Recaller(mixers, width, key_dim, gates).to(device)
    loss = fit(model, torch.Generator().manual_seed(seed), make, plan, batch=batch, lr=lr, device=device)
    right = score(model, torch.Generator().manual_seed(10**6 + seed), make, n, device=device)
    held = sum(layer.cache_bytes(2 * n) for layer in model.mixers)
    return {"accuracy": right, "loss": loss, "cache_bytes": held}


@experiment(gpu={"pairs": (16, 32, 64), "steps": 2000, "width": 128, "key_dim": 32, "lr": 3e-3}, parts="mixers")
def mqar(
    seed, *, device="cpu", mixers=("softmax", "linear", "mamba2", "deltanet", "gated_deltanet", "kda"), pairs=(16,),
    width=64, key_dim=16, steps=400, batch=64, lr=1e-2,
):  # fmt: skip
    """MQAR after a short training: every key is bound once.

    Result: softmax solves it, the delta rule with and without gates recalls more than 96 in 100, linear attention
    with ELU+1 and Mamba-2 at most 90 in the same time. These are speeds of learning: the states could hold more.

    Args:
        seed: draws weights and sequences.
        device: where it runs.
        mixers: names in `models.MIXERS`.
        pairs: N, the pairs of a sequence.
        width, key_dim: D and K; the state has K x D numbers.
        steps, batch, lr: of the training.

    Returns:
        rows with mixer, pairs, accuracy, loss, and cache_bytes: what is remembered when the queries come.
    """
    sizes = {"width": width, "key_dim": key_dim, "batch": batch, "lr": lr, "device": device}
    return [
        {"mixer": name, "pairs": n, **_measure(seed, [name], recall_batch, curriculum(seed, steps, n), n, **sizes)}
        for n in pairs
        for name in mixers
    ]


@experiment(gpu={"keys": 16, "writes": 128, "steps": 2000, "width": 128, "key_dim": 32, "lr": 3e-3}, parts="mixers")
def mqar_rebinding(
    seed, *, device="cpu", mixers=("softmax", "linear", "gla", "deltanet", "gated_deltanet"), keys=4, writes=16,
    width=64, key_dim=16, steps=400, batch=64, lr=1e-2,
):  # fmt: skip
    """MQAR where each key is bound several times: only the latest value is right.

    Result: linear attention, which only adds, recalls 0.30 to 0.31, little more than a guess among the four values of
    a key. GLA, which can forget, recalls 0.46 to 0.85. The delta rule recalls more than 0.98 and softmax with RoPE
    more than 0.95; Gated DeltaNet learns more slowly here than the delta rule alone, 0.76 to 0.96.

    Args:
        seed: draws weights and sequences.
        device: where it runs.
        mixers: names in `models.MIXERS`.
        keys: number of keys in a sequence.
        writes: pairs of a sequence, a multiple of `keys`.
        width, key_dim: D and K; the state has K x D numbers.
        steps, batch, lr: of the training.

    Returns:
        rows with mixer, writes, accuracy, loss, cache_bytes.
    """
    sizes = {"width": width, "key_dim": key_dim, "batch": batch, "lr": lr, "device": device}
    make, plan = partial(rebinding_batch, keys=keys), [writes] * steps
    return [{"mixer": name, "writes": writes, **_measure(seed, [name], make, plan, writes, **sizes)} for name in mixers]


@experiment(gpu={"steps": 2000, "width": 128, "key_dim": 32, "lr": 3e-3}, parts="mixers")
def gate_start(
    seed, *, device="cpu", mixers=("gated_deltanet", "kda"), pairs=16, width=64, key_dim=16, steps=400, batch=64,
    lr=1e-2,
):  # fmt: skip
    """Do the gates' first values decide whether a layer of one head learns recall? Slow ones, or those published.

    Args:
        seed: draws weights and sequences.
        device: where it runs.
        mixers: names in `models.MIXERS` of layers with a gate of Mamba-2's kind.
        pairs: N.
        width, key_dim: D and K.
        steps, batch, lr: of the training.

    Returns:
        rows with mixer, gates ("slow" or "published"), accuracy, loss, cache_bytes.
    """
    sizes = {"width": width, "key_dim": key_dim, "batch": batch, "lr": lr, "device": device}
    plan, rows = curriculum(seed, steps, pairs), []
    for name in mixers:
        for start, gates in (("slow", SLOW), ("published", {})):
            scores = _measure(seed, [name], recall_batch, plan, pairs, gates=gates, **sizes)
            rows.append({"mixer": name, "gates": start, **scores})
    return rows
