"""Real images with linear attention: digits as sequences of pixels, and digits drawn from noise."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import data
from linattn_edu.experiments.registry import experiment
from linattn_edu.feature_maps import elu1
from linattn_edu.layers import RMSNorm, SwiGLU
from linattn_edu.models import MIXERS, Block
from linattn_edu.softmax import attend_at_once
from linattn_edu.train import adamw


def schedule(optimizer, step, steps, lr):
    """Warm-up over a tenth of the steps, then a cosine to zero."""
    for group in optimizer.param_groups:
        group["lr"] = lr * min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def step_of(optimizer, loss, model):
    """One step of the optimizer down the gradient, which is clipped to 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


OPTIONS = {
    "linear": {"rope_base": 10_000.0},
    "gated_deltanet": {"conv_size": None},
    "kda": {"conv_size": None},
}


class PixelReader(nn.Module):
    """Pixels one after another, [B, 64] -> logits [B, 10] from what is known after the last.

    With `places` a learnt vector of its place is added to each pixel.
    """

    def __init__(self, mixer, width, heads, depth, places=True):
        super().__init__()
        self.pixel = nn.Linear(1, width)
        self.place = nn.Parameter(0.5 * torch.randn(64, width)) if places else None
        layers = (MIXERS[mixer](width, heads, **OPTIONS.get(mixer, {})) for _ in range(depth))
        self.blocks = nn.ModuleList(Block(layer, SwiGLU(width, 2 * width), lambda: RMSNorm(width)) for layer in layers)
        self.head = nn.Sequential(RMSNorm(width), nn.Linear(width, 10))

    def forward(self, pixels):
        x = self.pixel(pixels[..., None])
        x = x if self.place is None else x + self.place
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x[:, -1])


@experiment(gpu={"width": 128, "depth": 4, "epochs": 60, "batch": 64, "lr": 2e-3}, parts="mixers")
def pixels(
    seed, *, device="cpu", mixers=("softmax", "linear", "gated_deltanet", "kda"), width=32, heads=2, depth=2, epochs=5,
    batch=32, lr=3e-3, places=True,
):  # fmt: skip
    """A digit of 8 x 8 pixels read as 64 tokens, row by row, and named after the last; no short convolution.

    Result, after five passes over 1,438 images: KDA names 0.93 to 0.95 of the unseen ones, more than softmax attention
    with RoPE (0.77 to 0.89) in every seed, and so does Gated DeltaNet, 0.81 to 0.95, by 0.04 to 0.06; linear attention
    has 0.40 to 0.58. These are speeds of learning in tiny models, of which the two with gates have a tenth to a fifth
    more parameters.

    Args:
        seed: draws weights and the order of the images.
        device: where it runs.
        mixers: names in `models.MIXERS`; softmax and linear attention have RoPE.
        width, heads, depth: sizes of the models.
        epochs, batch, lr: of the training.
        places: add a learnt vector of its place to each pixel.

    Returns:
        rows with mixer, accuracy (359 test images), loss (training, last epoch), parameters.
    """
    (x, y), (x_test, y_test) = ([t.to(device) for t in data.digits(split)] for split in ("train", "test"))
    x, x_test, rows = x.flatten(1), x_test.flatten(1), []
    for name in mixers:
        torch.manual_seed(seed)
        model = PixelReader(name, width, heads, depth, places).to(device)
        optimizer = adamw(model, lr=lr, weight_decay=0.05)
        steps, losses = epochs * (len(x) // batch), []
        for step in range(steps):
            if step % (len(x) // batch) == 0:
                order = torch.randperm(len(x)).to(device).split(batch)
            chosen = order[step % (len(x) // batch)]
            schedule(optimizer, step, steps, lr)
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            step_of(optimizer, loss, model)
            losses.append(loss.item())
        with torch.no_grad():
            right = (model(x_test).argmax(-1) == y_test).float().mean().item()
        count = sum(p.numel() for p in model.parameters())
        rows.append(
            {"mixer": name, "accuracy": right, "loss": sum(losses[-len(order) :]) / len(order), "parameters": count}
        )
    return rows


def attend(kind, q, k, v):
    """Tokens [B, H, T, K] read all of [B, H, L, K]: "softmax", "linear" (ELU+1), or "mean", which weighs all alike."""
    if kind == "softmax":
        return attend_at_once(q, k, v, q.shape[-1] ** -0.5, False)
    if kind == "mean":
        return v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1)
    q, k = elu1(q), elu1(k)
    return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


class Attention(nn.Module):
    """x asks y: self-attention for x = y, else cross-attention."""

    def __init__(self, kind, width, heads):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, y):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2).chunk(2, 1)
        return self.out(attend(self.kind, q, k, v).transpose(1, 2).flatten(2))


class Painter(nn.Module):
    """The velocity of an image of 16 patches at time t of its way from noise to a digit of a given class.

    Each block: self-attention of the patches, cross-attention to 4 tokens of the class and one of the time, SwiGLU.
    """

    def __init__(self, kind, width, heads, depth):
        super().__init__()
        self.patch, self.place = nn.Linear(4, width), nn.Parameter(0.5 * torch.randn(16, width))
        self.digit, self.time = nn.Embedding(10, 4 * width), nn.Linear(16, width)
        parts = (kind if kind != "mean" else "mean", "linear" if kind == "mean" else kind)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "self": Attention(parts[0], width, heads),
                "cross": Attention(parts[1], width, heads),
                "mlp": SwiGLU(width, 2 * width),
                "norms": nn.ModuleList(RMSNorm(width) for _ in range(3)),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Sequential(RMSNorm(width), nn.Linear(width, 4))

    def forward(self, x, t, digit):
        """x [B, 16, 4], t [B] from 0 (noise) to 1, digit [B] -> [B, 16, 4]."""
        waves = t[:, None] * math.pi * torch.arange(1, 9, device=t.device)
        time = self.time(torch.cat([waves.cos(), waves.sin()], -1))
        given = torch.cat([self.digit(digit).unflatten(-1, (4, -1)), time[:, None]], 1)
        x = self.patch(x) + self.place + time[:, None]
        for block in self.blocks:
            y = block["norms"][0](x)
            x = x + block["self"](y, y)
            x = x + block["cross"](block["norms"][1](x), given)
            x = x + block["mlp"](block["norms"][2](x))
        return self.head(x)


def to_patches(images):
    """[B, 8, 8] from 0 to 1 -> [B, 16, 4] around 0."""
    return 2 * images.unflatten(1, (4, 2)).unflatten(3, (4, 2)).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4) - 1


def to_images(patches):
    """The inverse of `to_patches`."""
    return (patches.view(-1, 4, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(-1, 8, 8) + 1) / 2


@torch.no_grad()
def paint(model, digits, *, steps=40, generator=None):
    """Images [N, 8, 8] of the wanted digits [N]: Euler steps from noise along the learnt velocity."""
    x = torch.randn(len(digits), 16, 4, generator=generator).to(digits.device)
    for i in range(steps):
        t = torch.full((len(digits),), i / steps, device=digits.device)
        x = x + model(x, t, digits) / steps
    return to_images(x).clamp(0, 1)


def nearest_digit(images, known, names):
    """The name of the nearest known image, for each of `images`."""
    return names[torch.cdist(images.flatten(1), known.flatten(1)).argmin(1)]


@experiment(gpu={"width": 128, "depth": 4, "steps": 5000, "batch": 256, "lr": 1e-3}, parts="kinds")
def flow(
    seed, *, device="cpu", kinds=("softmax", "linear", "mean"), width=64, heads=4, depth=2, steps=600, batch=64, lr=2e-3
):
    """Digits drawn from noise by flow matching, with softmax or linear attention in every self- and cross-attention.

    A judge names each drawn digit: that of the nearest of the real training images. "mean" is the control, in which
    self-attention weighs all patches alike, and cross-attention is linear.

    Result: linear attention drops in at a small price: 0.92 to 0.93 of its digits are recognised, 0.93 to 0.94
    of softmax's, whose loss is the lowest in every seed. But the control is level with linear attention, 0.91 to 0.93:
    16 patches hardly need self-attention, and nothing about larger images follows.

    Args:
        seed: draws weights, noise and images.
        device: where it runs.
        kinds: of `attend`.
        width, heads, depth: sizes of the models.
        steps, batch, lr: of the training.

    Returns:
        rows with attention, accuracy: how often the judge sees the digit that was asked for, in 300 images, judge: how
        often he is right on real test images, and loss (training, last tenth).
    """
    (known, names), (test, wanted) = ([t.to(device) for t in data.digits(split)] for split in ("train", "test"))
    judge = (nearest_digit(test, known, names) == wanted).float().mean().item()
    rows = []
    for kind in kinds:
        model, loss = train_painter(seed, kind, known, names, width, heads, depth, steps, batch, lr)
        digits = torch.arange(300, device=device) % 10
        drawn = paint(model, digits, generator=torch.Generator().manual_seed(10**6 + seed))
        right = (nearest_digit(drawn, known, names) == digits).float().mean().item()
        rows.append({"attention": kind, "accuracy": right, "judge": judge, "loss": loss})
    return rows


def train_painter(seed, kind, known, names, width, heads, depth, steps, batch, lr):
    """Flow matching on straight ways: at x_t = (1 - t) noise + t image the velocity to learn is image - noise.

    Source: Lipman et al. 2023; Liu et al. 2023. Returns the model and its loss over the last tenth of the steps.
    """
    torch.manual_seed(seed)
    model = Painter(kind, width, heads, depth).to(known.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    patches, losses = to_patches(known), []
    for step in range(steps):
        schedule(optimizer, step, steps, lr)
        chosen = torch.randint(len(patches), (batch,)).to(known.device)
        image, noise, t = (
            patches[chosen],
            torch.randn(batch, 16, 4).to(known.device),
            torch.rand(batch).to(known.device),
        )
        x = torch.lerp(noise, image, t[:, None, None])
        loss = (model(x, t, names[chosen]) - (image - noise)).square().mean()
        step_of(optimizer, loss, model)
        losses.append(loss.item())
    return model, sum(losses[-steps // 10 :]) / len(losses[-steps // 10 :])
