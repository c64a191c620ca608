"""Norms and scales by channel."""

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import validate
from linattn_edu.forms import computing_dtype

GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}


class RMSNorm(nn.Module):
    """Divide by the root mean square of the channels: y = x / sqrt(mean(x^2) + eps) * w.

    With a gate z, y = norm(x) * f(z), or norm(x * f(z)) with `gate_first`. The arithmetic is in float32 (float64 for
    float64 inputs), the output in the dtype of x.

    Args:
        width: channels, the last axis of x.
        eps: under the root.
        zero_centred: scale by 1 + w, where w starts at 0; weight decay then pulls the scale to 1 and not to 0.
        weight: False leaves w out.
        gate: None, "silu" or "sigmoid", the f of the second argument of `forward`.
        gate_first: gate before the norm, as Mamba-2 does.
        groups: norms of width / groups channels each, side by side; the weight remains one a channel.

    Raises:
        ValueError: a wrong size, or an unknown gate.

    Source: Zhang and Sennrich 2019; the gated norms as in Mamba-2 (Dao and Gu 2024), Gated DeltaNet (SiLU, after the
    norm) and Kimi Linear (sigmoid); zero-centred as in Qwen3-Next.
    """

    def __init__(self, width, *, eps=1e-6, zero_centred=False, weight=True, gate=None, gate_first=False, groups=1):
        super().__init__()
        self.width, self.groups = validate.count("width", width), validate.count("groups", groups)
        if width % groups:
            raise ValueError(f"`groups`: got {groups}, expected a divisor of width = {width}")
        if gate is not None and gate not in GATES:
            raise ValueError(f"`gate`: got {gate!r}, expected None, 'silu' or 'sigmoid'")
        if zero_centred and not weight:
            raise ValueError("`zero_centred`: got True without a weight, expected one to centre")
        self.eps, self.zero_centred = validate.number("eps", eps), validate.flag("zero_centred", zero_centred)
        if self.eps < 0:
            raise ValueError(f"`eps`: got {eps}, expected a number of at least 0")
        self.gate, self.gate_first = gate, gate_first
        self.weight = nn.Parameter(torch.zeros(width) if zero_centred else torch.ones(width)) if weight else None

    def forward(self, x, z=None):
        """x [..., width], and with a gate z of the same shape -> y [..., width]."""
        if (z is None) != (self.gate is None):
            raise TypeError(f"`z`: got {validate.describe(z)}, expected {'no' if self.gate is None else 'a'} gate")
        y = x.to(computing_dtype(x))
        gate = None if z is None else GATES[self.gate](z.to(y.dtype))
        y = self.normalize(y * gate) if self.gate_first and gate is not None else self.normalize(y)
        return (y if gate is None or self.gate_first else y * gate).to(x.dtype)

    def normalize(self, x):
        """The norm itself, in the dtype of x."""
        y = F.rms_norm(x.unflatten(-1, (self.groups, -1)), (self.width // self.groups,), eps=self.eps).flatten(-2)
        if self.weight is None:
            return y
        return y * (self.weight.to(x.dtype) + self.zero_centred)

    def extra_repr(self):
        gate = f", gate={self.gate}" if self.gate else ""
        return f"{self.width}, eps={self.eps}, zero_centred={self.zero_centred}, groups={self.groups}{gate}"


class LayerScale(nn.Module):
    """Scale a residual branch by channel, y = gamma * x, with a small gamma at first: the block starts near x -> x.

    Args:
        width: channels, the last axis of x.
        initial: gamma at the start of training.

    Source: Touvron et al. 2021 (CaiT), eq. 4: 0.1 up to a depth of 18 layers, 1e-5 up to 24, 1e-6 beyond.
    """

    def __init__(self, width, *, initial=0.1):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((validate.count("width", width),), validate.number("initial", initial)))

    def forward(self, x):
        """x [..., width] -> the same shape and dtype."""
        return x * self.gamma.to(x.dtype)
