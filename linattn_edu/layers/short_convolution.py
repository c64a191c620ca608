"""The short convolution as a layer."""

import torch
from torch import nn

from linattn_edu import short_conv, validate
from linattn_edu.layers.recurrent import RecurrentLayer


class ShortConvolution(RecurrentLayer):
    """Every channel mixes its last W tokens: `short_conv.causal_conv` with its weight and its memory.

    y_t = f(sum_{j<W} weight_j * x_{t-W+1+j} + bias)

    Args:
        width: channels D.
        size: W, the tokens that an output sees, itself among them.
        bias: add a bias a channel.
        activation: f, None or "silu".

    Source: Gu and Dao 2023 (W = 4); on q, k and v in Yang et al. 2024 (2406.06484). The initial values are those of
    `torch.nn.Conv1d`, uniform within 1 / sqrt(W).
    """

    def __init__(self, width, size=4, *, bias=False, activation="silu"):
        super().__init__(width)
        if activation not in tuple(short_conv.ACTIVATIONS):
            raise ValueError(f"`activation`: got {activation!r}, expected None or 'silu'")
        self.size, self.activation = validate.count("size", size), activation
        self.conv_shape = (self.width, self.size - 1)
        self.weight = nn.Parameter(torch.empty(width, size).uniform_(-(size**-0.5), size**-0.5))
        self.bias = nn.Parameter(torch.empty(width).uniform_(-(size**-0.5), size**-0.5)) if bias else None

    def mix(self, x, cache, cu_seqlens):
        y, conv = self.convolve(x, cache.conv, cu_seqlens)
        return y, None, conv

    def convolve(self, x, state, cu_seqlens):
        """x [B, T, D] and the last W - 1 inputs before it, or None -> y [B, T, D] and the last W - 1 inputs."""
        options = {"activation": self.activation, "initial_state": state, "cu_seqlens": cu_seqlens}
        return short_conv.causal_conv(x, self.weight, self.bias, output_final_state=True, **options)
