"""Beyond the length of training, and where attention goes when it has nothing to look for."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from linattn_edu import data
from linattn_edu.experiments.language import GPU, equalized, fit, parameters, reference
from linattn_edu.experiments.registry import experiment
from linattn_edu.models import LanguageModel
from linattn_edu.train import adamw, learning_rate, loss_by_position

PATTERNS = {
    "softmax": (("softmax", "softmax"), {}),
    "softmax, no positions": (("softmax", "softmax"), {"softmax": {"rope_base": None}}),
    "gated attention": (("gated_attention", "gated_attention"), {}),
    "gated_deltanet": (("gated_deltanet", "gated_deltanet"), {}),
    "kda": (("kda", "kda"), {}),
    "hybrid": (("gated_deltanet", "softmax"), {}),
    "hybrid, no positions": (("gated_deltanet", "softmax"), {"softmax": {"rope_base": None}}),
}
"""Two mixers and their options; a deeper model repeats them."""


def pattern(name, width, heads, depth):
    """The configuration of a model of this pattern, with the parameters of the softmax model."""
    mixers, options = PATTERNS[name]
    target = parameters(reference(width, heads, depth))
    return equalized(reference(width, heads, depth, mixers=mixers * (depth // 2), options=options), target)


@experiment(gpu=GPU | {"longest": 4096}, parts="models")
def extrapolation(
    seed, *, device="cpu", models=tuple(PATTERNS), width=64, heads=2, depth=2, steps=200, batch=8, length=128, lr=4e-3,
    bf16=False, longest=1024,
):  # fmt: skip
    """Models trained on windows of one length read longer ones: the loss by position.

    Result: at 1024 tokens, 8 times the trained length, the loss of softmax attention with RoPE is higher than within it
    by 0.15 to 0.73, with an output gate by 0.6 to 0.9: the gate lowers the loss within the length and repairs nothing
    beyond. Without positions softmax is flat, at a loss that is worse throughout. Gated DeltaNet, KDA and both hybrids
    go on as they were, or better, whether the hybrid's attention has positions or not.

    Args:
        seed: draws weights and windows.
        device: where it runs.
        models: keys of `PATTERNS`.
        width, heads, depth: sizes of the models, of equal numbers of parameters.
        steps, batch, length, lr, bf16: of the training.
        longest: length of the windows in the test.

    Returns:
        rows with model, position (the last one of a stretch of `length`), loss, parameters.
    """
    x, y = data.windows("validation", length=longest, count=16)
    rows = []
    for name in models:
        recipe = {"device": device, "steps": steps, "batch": batch, "length": length, "lr": lr, "bf16": bf16}
        model, row = fit(seed, pattern(name, width, heads, depth), **recipe)
        for i, part in enumerate(loss_by_position(model, x, y, batch=4).split(length)):
            rows.append(
                {
                    "model": name,
                    "position": (i + 1) * length,
                    "loss": part.mean().item(),
                    "parameters": row["parameters"],
                }
            )
    return rows


def yarn_frequencies(channels, base, factor, length, slow=1.0, fast=32.0):
    """YaRN's angles a token, and the factor by which q and k are multiplied, for a context `factor` times as long.

    A pair that turns r = length / wavelength times within the trained length keeps its frequency if r > fast,
    turns `factor` times slower if r < slow, and is blended in between. Scores are multiplied by
    (0.1 ln factor + 1)^2, the root of it on q and on k. Source: Peng et al. 2023 (2309.00071).
    """
    frequency = base ** (-torch.arange(0, channels, 2) / channels)
    turns = length * frequency / (2 * math.pi)
    keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / factor), 0.1 * math.log(factor) + 1


def stretch(model, factor, length):
    """Put YaRN into all attention layers of a trained model; a factor of 1 leaves it as it is."""
    for block in model.blocks:
        layer = block.mixer
        frequency, scale = yarn_frequencies(layer.head_dim, layer.rope_base, factor, length)
        layer.qkv = partial(_stretched_qkv, layer, frequency.to(layer.q_proj.weight.device), scale)


def _stretched_qkv(layer, frequency, scale, x, positions):
    q, k, v = layer.project(x)
    angle = (positions[..., None] * frequency)[:, :, None]
    cos, sin = scale * angle.cos(), scale * angle.sin()

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    return turn(q), turn(k), v


@experiment(gpu=GPU | {"factors": (1, 2, 4, 8), "depth": 4})
def yarn(
    seed,
    *,
    device="cpu",
    factors=(1, 2, 4, 8),
    width=64,
    heads=2,
    depth=2,
    steps=200,
    batch=8,
    length=128,
    lr=4e-3,
    bf16=False,
):
    """Softmax attention with and without an output gate, stretched by YaRN without further training.

    The claim in question: with the gate, less is lost.

    Result: not in models this small. YaRN lowers the loss at 8 times the length in both, and the gate lowers it within
    the length; but from there on the gated model loses more than the plain one, with YaRN as without, in every seed.
    The claim comes from models far larger and trained far longer (Qiu et al. 2025, 2505.06708).

    Args:
        seed: draws weights and windows.
        device: where it runs.
        factors: how many times the trained length is read.
        width, heads, depth: sizes of the two models, of equal numbers of parameters.
        steps, batch, length, lr, bf16: of the training.

    Returns:
        rows with model, factor, yarn (0 or 1), loss: over the last half of the windows.
    """
    rows = []
    for name in ("softmax", "gated attention"):
        recipe = {"device": device, "steps": steps, "batch": batch, "length": length, "lr": lr, "bf16": bf16}
        model, _ = fit(seed, pattern(name, width, heads, depth), **recipe)
        for factor in factors:
            x, y = data.windows("validation", length=factor * length, count=16)
            for used in (0, 1):
                stretch(model, factor if used else 1, length)
                loss = loss_by_position(model, x, y, batch=4)[factor * length // 2 :].mean().item()
                rows.append({"model": name, "factor": factor, "yarn": used, "loss": loss})
    return rows


WORDS, TRIGGERS = 32, 3


def backcopy_batch(draw, batch, length):
    """A chain of words after a start token, id 0; what follows a trigger, the last `TRIGGERS` ids, is the id before it.

    All else follows from the word at hand alone, so that attention has work at triggers only (Guo et al. 2024).
    Returns ids [batch, length + 1].
    """
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    ids = [torch.zeros(batch, dtype=torch.long), torch.randint(1, WORDS + 1 - TRIGGERS, (batch,), generator=draw)]
    while len(ids) <= length:
        new = 1 + torch.multinomial(table[ids[-1] - 1], 1, generator=draw)[:, 0]
        ids.append(torch.where(ids[-1] > WORDS - TRIGGERS, ids[-2], new))
    return torch.stack(ids, 1)


GATED = {
    "softmax": ("softmax", {}),
    "gate a channel": ("gated_attention", {}),
    "gate a head": ("gated_attention", {"gated_attention": {"headwise": True}}),
}


@experiment(gpu={"steps": 3000, "batch": 128}, parts="models")
def sink(seed, *, device="cpu", models=tuple(GATED), width=64, steps=400, batch=32, length=64, lr=3e-3):
    """Attention to the first token where there is nothing to look for, with and without an output gate.

    Result: every model attends to the first token where it has nothing to copy, and hardly at triggers. A gate a head
    closes there, to half of what it is at triggers or less. But in so short a training no gate takes the attention
    off the first token reliably: with a gate the share falls in one seed and in others it grows.

    Args:
        seed: draws weights and sequences.
        device: where it runs.
        models: keys of `GATED`.
        width: D, one layer with one head.
        steps, batch, length, lr: of the training.

    Returns:
        rows with model, at ("triggers" or "others"), first: mean attention to the first token, gate: mean output
        gate (1 without one), and loss.
    """
    rows = []
    for name in models:
        model, loss = _train_on_chains(seed, name, width, device, steps, batch, length, lr)
        ids = backcopy_batch(torch.Generator().manual_seed(10**6 + seed), 64, length)[:, :-1].to(device)
        first, gate = attention_to_the_first(model, ids)
        at = ids[:, 1:] > WORDS - TRIGGERS
        for where, chosen in (("triggers", at), ("others", ~at)):
            means = {"first": first[:, 1:][chosen].mean().item(), "gate": gate[:, 1:][chosen].mean().item()}
            rows.append({"model": name, "at": where, **means, "loss": loss})
    return rows


def _train_on_chains(seed, name, width, device, steps, batch, length, lr):
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    mixer, options = GATED[name]
    base = reference(width, 1, 1, vocabulary=WORDS + 1)
    config = reference(width, 1, 1, mixers=(mixer,), vocabulary=WORDS + 1, options=options)
    model = LanguageModel(equalized(config, parameters(base))).to(device)
    optimizer = adamw(model, lr=lr, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=steps, peak=lr, warmup=max(steps // 10, 1))
        ids = backcopy_batch(draw, batch, length).to(device)
        loss = F.cross_entropy(model(ids[:, :-1])[0].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, loss.item()


@torch.no_grad()
def attention_to_the_first(model, ids):
    """Weight on token 0, and mean output gate, of each token in the first layer: [B, T] each."""
    block = model.blocks[0]
    x = block.mixer_norm(model.embedding(ids))
    q, k, _ = block.mixer.qkv(x)
    scores = q[:, :, 0] @ k[:, :, 0].mT / q.shape[-1] ** 0.5
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    gated = hasattr(block.mixer, "gate_proj")
    return weights[..., 0], block.mixer.gate_proj(x).sigmoid().mean(-1) if gated else torch.ones_like(weights[..., 0])
