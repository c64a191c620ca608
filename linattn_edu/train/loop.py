"""Train and judge a byte-level language model; every loss is the mean cross-entropy in nats per byte."""

import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import data, validate
from linattn_edu.extras import need
from linattn_edu.forms import computing_dtype
from linattn_edu.train import parallel
from linattn_edu.train.checkpoint import identity, resume, save

RECIPE = ("source", "steps", "batch", "length", "lr", "warmup", "weight_decay", "clip", "seed", "validate_every", "bf16")
"""The arguments of `train` on which its result depends."""


def cross_entropy(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"):
    """-ln p(target): inputs and targets [B, T] -> the mean, or with reduction="none" the losses [B * T].

    The bytes go to the device of the model.
    """
    inputs, targets = (ids.to(next(model.parameters()).device) for ids in (inputs, targets))
    logits, _ = model(inputs)
    return F.cross_entropy(logits.to(computing_dtype(logits)).flatten(0, 1), targets.flatten(), reduction=reduction)


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
    return peak * (min(1.0, (step + 1) / max(warmup, 1)) * (0.5 * (1 + math.cos(math.pi * step / steps))))


def adamw(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices alone, embeddings and the taps of short convolutions among them.

    Norm weights, biases and other vectors are left free, and so is what a layer names in `undecayed`: a rate or step
    size that is pulled to 0 on the logarithmic scale of A_log and dt_bias is pulled to no sensible value. The codes of
    Mamba and of its successors exempt A_log, dt_bias and D as well.
    """
    free = {id(getattr(module, name)) for module in model.modules() for name in getattr(module, "undecayed", ())}
    groups = {weight_decay: [], 0.0: []}
    for p in model.parameters():
        groups[weight_decay if p.ndim >= 2 and id(p) not in free else 0.0].append(p)
    groups = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def train(
    model: nn.Module, source: str = "train", *, steps: int, batch: int = 8, length: int = 256, lr: float = 4e-3,
    warmup: int = 100, weight_decay: float = 0.1, clip: float = 1.0, seed: int = 0, validate_every: int | None = 500,
    bf16: bool = False, checkpoint: str | os.PathLike | None = None, checkpoint_every: int = 500, timed: bool = False,
    progress: bool = True,
) -> list[dict]:
    """Train in place; return one record a step: step, loss, lr, and now and then validation.

    Under `torchrun` each process trains on its share of every batch, and the losses are those of one process.

    Args:
        model: its weights are the caller's, as is its device.
        source: a split or a text of `linattn_edu.data`.
        steps: of the optimizer.
        batch, length: windows a step, over all processes, and bytes a window.
        lr, warmup: peak of `learning_rate`, and the steps up to it, 0 for no warm-up.
        weight_decay: of matrices, see `adamw`.
        clip: the gradient is shortened to this norm; `math.inf` leaves it.
        seed: chooses the windows.
        validate_every: `evaluate(model)` is recorded after so many steps, and after the last; never if None or 0.
        bf16: compute in bfloat16 where `torch.autocast` does; weights stay as they are.
        checkpoint: a file, written after every `checkpoint_every` steps and the last, its folder made; if it
            exists, training goes on from it, and ends with the same weights and records to the bit.
        timed: records also tell the seconds since the beginning.
        progress: show a bar, which needs tqdm.

    Raises:
        ValueError: a number out of range, a batch that the processes cannot share evenly, or a checkpoint of another
            run or model.
        TypeError: what should be a number, or True or False, is none.
        ImportError: a bar without tqdm.

    The model is left in eval mode.
    """
    steps, batch, length = map(validate.count, ("steps", "batch", "length"), (steps, batch, length))
    warmup, seed = validate.count("warmup", warmup, least=0), validate.count("seed", seed, least=0)
    lr, weight_decay = validate.number("lr", lr), validate.number("weight_decay", weight_decay)
    clip = math.inf if clip == math.inf else validate.number("clip", clip, positive=True)
    validate_every = None if validate_every is None else validate.count("validate_every", validate_every, least=0)
    checkpoint_every = validate.count("checkpoint_every", checkpoint_every)
    validate.flag("bf16", bf16)
    rank, size = parallel.place()
    if batch % size:
        raise ValueError(f"`batch`: got {batch}, expected a multiple of the {size} processes")
    recipe = {name: x for name, x in locals().items() if name in RECIPE} | identity(model)
    if checkpoint is not None:
        Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
    optimizer = adamw(model, lr=lr, weight_decay=weight_decay)
    records = [] if checkpoint is None else resume(checkpoint, model, optimizer, recipe)
    began = time.perf_counter() - (records[-1].get("seconds", 0.0) if records else 0.0)
    start, stream = len(records), data.batches(source, batch=batch, length=length, seed=seed, start=len(records))
    tokens = {"total": steps * batch * length, "initial": start * batch * length}
    bar = _bar(**tokens) if progress and rank == 0 else None
    for step, (x, y) in zip(range(start, steps), stream):
        rate, last = learning_rate(step, steps=steps, peak=lr, warmup=warmup), step + 1 == steps
        loss = update(model.train(), optimizer, *parallel.share(x, y), rate=rate, clip=clip, bf16=bf16)
        records.append({"step": step + 1, "loss": loss, "lr": rate})
        if timed:
            records[-1]["seconds"] = round(time.perf_counter() - began, 3)
        if validate_every and rank == 0 and ((step + 1) % validate_every == 0 or last):
            records[-1]["validation"] = evaluate(model.eval())
        if rank == 0 and checkpoint is not None and ((step + 1) % checkpoint_every == 0 or last):
            save(checkpoint, model, optimizer, records, recipe)
        if bar is not None:
            bar.set_postfix(summary(records), refresh=False)
            bar.update(batch * length)
    if bar is not None:
        bar.close()
    model.eval()
    return records


def _bar(**tokens):
    return need("tqdm", "the bar (progress=False leaves it out)").tqdm(**tokens, unit="tok", unit_scale=True)


def update(
    model: nn.Module, optimizer, x: torch.Tensor, y: torch.Tensor, *, rate: float, clip: float, bf16: bool = False
) -> float:
    """One step of the optimizer at learning rate `rate`; the loss before it, over the batch of all processes."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=bf16):
        loss = cross_entropy(model, x, y)
    optimizer.zero_grad()
    loss.backward()
    mean = loss.detach()
    parallel.average([mean, *(p.grad for p in model.parameters() if p.grad is not None)])
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return mean.item()


def summary(records: list[dict], last: int = 100) -> dict:
    """Mean loss of the last steps and the latest validation loss, for the progress bar and the record."""
    losses = [r["loss"] for r in records[-last:]]
    latest = next((r for r in reversed(records) if "validation" in r), {})
    return {"loss": sum(losses) / len(losses)} | {k: latest[k] for k in latest if k == "validation"}
