"""The gated feed-forward layer that follows every mixer."""

import torch.nn.functional as F
from torch import nn

from linattn_edu import validate


class SwiGLU(nn.Module):
    """W3 (silu(W1 x) * W2 x), token by token.

    Args:
        width: D, channels of x [..., D] and of the result.
        hidden: channels of the product.

    `up` holds W1 above W2. Source: Shazeer 2020 (2002.05202).
    """

    def __init__(self, width, hidden):
        super().__init__()
        width, hidden = validate.count("width", width), validate.count("hidden", hidden)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(gated(self.up(x)))


def gated(projected):
    """silu(a) * b for the halves a, b of the last axis."""
    a, b = projected.chunk(2, dim=-1)
    return F.silu(a) * b
