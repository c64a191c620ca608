"""Train and judge a byte-level language model; every loss is the mean cross-entropy in nats per byte."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from linattn_edu import data


def cross_entropy(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"):
    """-ln p(target): inputs and targets [B, T] -> the mean, or with reduction="none" the losses [B * T].

    The bytes go to the device of the model.
    """
    inputs, targets = (ids.to(next(model.parameters()).device) for ids in (inputs, targets))
    return F.cross_entropy(model(inputs)[0].flatten(0, 1), targets.flatten(), reduction=reduction)


@torch.no_grad()
def loss_by_position(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, batch: int = 16
) -> torch.Tensor:
    """Loss with 1, 2, ..., T bytes of context, averaged over windows [N, T] -> [T], float64.

    The model sees `batch` windows at a time. `.mean()` of the result is the loss of the windows.
    """
    total = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for x, y in zip(inputs.split(batch), targets.split(batch)):
        total += cross_entropy(model, x, y, "none").view(y.shape).sum(0, dtype=torch.float64).cpu()
    return total / len(inputs)


def evaluate(model: nn.Module, source: str = "validation", *, length: int = 256, count: int | None = 64) -> float:
    """Loss on `count` fixed windows of a text or split, or on all of them (None)."""
    return loss_by_position(model, *data.windows(source, length=length, count=count)).mean().item()


def learning_rate(step: int, *, steps: int, peak: float, warmup: int) -> float:
    """The rate of step 0, 1, ...: a linear warm-up over `warmup` steps times a cosine from `peak` to 0 over `steps`."""
    return peak * (min(1.0, (step + 1) / warmup) * (0.5 * (1 + math.cos(math.pi * step / steps))))


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices alone: norm weights and other vectors are left free."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def train(
    model: nn.Module, source: str = "train", *, steps: int, batch: int = 8, length: int = 256, lr: float = 4e-3,
    warmup: int = 100, weight_decay: float = 0.1, clip: float = 1.0, seed: int = 0, validate_every: int = 500,
    progress: bool = True,
) -> list[dict]:
    """Train in place; return one record a step: step, loss, lr, and now and then validation.

    `seed` chooses the windows; the model's weights are the caller's. `batch` windows of `length`
    bytes a step, gradients clipped to norm `clip`. The validation loss is `evaluate(model)`,
    every `validate_every` steps and after the last; the model is left in eval mode.
    """
    optimizer = adamw(model, lr=lr, weight_decay=weight_decay)
    records, bar = [], tqdm(total=steps * batch * length, unit="tok", unit_scale=True, disable=not progress)
    for step, (x, y) in zip(range(steps), data.batches(source, batch=batch, length=length, seed=seed)):
        rate = learning_rate(step, steps=steps, peak=lr, warmup=warmup)
        loss = update(model.train(), optimizer, x, y, rate=rate, clip=clip)
        records.append({"step": step + 1, "loss": loss, "lr": rate})
        if (step + 1) % validate_every == 0 or step + 1 == steps:
            records[-1]["validation"] = evaluate(model.eval())
        bar.set_postfix(summary(records), refresh=False)
        bar.update(batch * length)
    bar.close()
    return records


def update(model: nn.Module, optimizer, x: torch.Tensor, y: torch.Tensor, *, rate: float, clip: float) -> float:
    """One step of the optimizer at learning rate `rate`; the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = cross_entropy(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def summary(records: list[dict], last: int = 100) -> dict:
    """Mean loss of the last steps and the latest validation loss, for the progress bar and the record."""
    losses = [r["loss"] for r in records[-last:]]
    latest = next((r for r in reversed(records) if "validation" in r), {})
    return {"loss": sum(losses) / len(losses)} | {k: latest[k] for k in latest if k == "validation"}
