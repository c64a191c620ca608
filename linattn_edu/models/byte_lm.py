"""A plain language model over bytes: pre-norm blocks, one sequence mixer a layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import VARIANTS

VOCABULARY = 256
MIXERS = ("softmax", "linear")


@dataclass(frozen=True)
class ByteLMConfig:
    """Sizes of a ByteLM; `mixers` names one entry of VARIANTS a layer, first layer first."""

    width: int = 64
    heads: int = 2
    mixers: tuple[str, ...] = ("softmax", "softmax", "softmax")
    hidden: int = 192
    rope: tuple[str, ...] = ("softmax",)
    rope_base: float = 10_000.0
    tied: bool = True

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise ValueError(f"`width`: got {self.width}, expected a multiple of 2 * heads = {2 * self.heads}")
        for field in ("mixers", "rope"):
            object.__setattr__(self, field, tuple(getattr(self, field)))  # JSON gives lists
            for name in getattr(self, field):
                if name not in MIXERS:
                    raise ValueError(f"`{field}`: got {name!r}, expected names among {', '.join(MIXERS)}")


def rope(x: torch.Tensor, *, base: float = 10_000.0, start: int = 0) -> torch.Tensor:
    """Rotate channels (i, i + K/2) of x [B, T, H, K] at position t by the angle t * base^(-2i/K).

    Then q_s . k_t depends on positions through s - t alone. `start` is the position of the
    first token. RoFormer (Su et al. 2021); the paper pairs (2i, 2i + 1), which
    is the same up to a permutation of channels.
    """
    T, K = x.shape[1], x.shape[-1]
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequency = base ** (-torch.arange(0, K, 2, device=x.device, dtype=exact) / K)
    angle = torch.outer(torch.arange(start, start + T, device=x.device, dtype=exact), frequency)
    cos, sin = (f.to(x.dtype)[:, None, :] for f in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Mixer(nn.Module):
    """Projections around one operator of VARIANTS: x [B, T, D] -> y [B, T, D]."""

    def __init__(self, config: ByteLMConfig, name: str):
        super().__init__()
        self.name, self.heads, self.base = name, config.heads, config.rope_base
        self.rotate = name in config.rope
        self.project = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def qkv(self, x: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the operator sees: q, k (after RoPE) and v, each [B, T, H, K]."""
        B, T, D = x.shape
        q, k, v = self.project(x).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        if self.rotate:
            q, k = (rope(each, base=self.base, start=start) for each in (q, k))
        return q, k, v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        o, _ = VARIANTS[self.name].fused(*self.qkv(x))
        return self.out(o.flatten(2))


class SwiGLU(nn.Module):
    """W3 (silu(W1 x) * W2 x) (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ByteLMConfig, mixer: str):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mixer = Mixer(config, mixer)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = SwiGLU(config.width, config.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """p(byte_{t+1} | bytes up to t): ids [B, T], int64, 0 to 255 -> logits [B, T, 256]."""

    def __init__(self, config: ByteLMConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, name) for name in config.mixers)
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialize()
        if config.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def _initialize(self):
        """Normal weights that keep the variance; what is added to the stream starts small (GPT-2)."""
        layers = len(self.blocks)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                added = name.endswith(("out.weight", "down.weight"))
                weight.normal_(std=weight.shape[1] ** -0.5 * ((2 * layers) ** -0.5 if added else 1.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def qkv(self, ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The (q, k, v) of every layer for a text, first layer first, each [B, T, H, K]."""
        seen, x = [], self.embedding(ids)
        for block in self.blocks:
            seen.append(block.mixer.qkv(block.mixer_norm(x)))
            x = block(x)
        return seen
