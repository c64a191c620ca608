"""Mamba as a layer."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import mamba, validate
from linattn_edu.forms import computing_dtype
from linattn_edu.layers import hf, initial, packing
from linattn_edu.layers.recurrent import RecurrentLayer
from linattn_edu.layers.short_convolution import ShortConvolution


def inner_channels(expand, width):
    """expand * width, to the nearest whole number."""
    return validate.count("expand * width", round(validate.number("expand", expand, positive=True) * width))


class Mamba(RecurrentLayer):
    """A selective state space model with its convolution and its gate, which is mixer and feed-forward block in one.

        u'_t, z_t = W_in x_t,   u_t = silu(conv(u')_t),   (d_t, B_t, C_t) = W_x u_t
        Delta_t = softplus(W_dt d_t + dt_bias),   A = -exp(A_log)
        h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t
        y_t = W_o ((h_t C_t + D u_t) * silu(z_t))

    Args:
        width: the width of x.
        expand: inner channels (the D of `linattn_edu.mamba`) as a multiple of width.
        state_dim: N, states a channel.
        dt_rank: width of d_t; ceil(width / 16) if None.
        conv_size: W of the short convolution.
        conv_bias, bias: whether the convolution, W_in and W_o have biases.
        dt_min, dt_max: softplus(dt_bias) is drawn log-uniformly between them.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    The cache holds h [N, inner, state_dim] in float32, and the convolution's last inputs.

    Source: Gu and Dao 2023, section 3.4 and alg. 2. The code discretises B by Euler's rule and not by eq. 4, as here,
    starts exp(A_log) at 1, 2, ..., state_dim in each channel, and D at 1.
    """

    undecayed = ("A_log", "dt_bias", "D")

    def __init__(
        self, width, *, expand=2, state_dim=16, dt_rank=None, conv_size=4, conv_bias=True, bias=False, dt_min=0.001,
        dt_max=0.1, form="fused",
    ):  # fmt: skip
        super().__init__(width, form)
        self.inner = inner_channels(expand, width)
        self.state_dim = validate.count("state_dim", state_dim)
        self.state_shapes = ((self.inner, self.state_dim),)
        self.dt_rank = math.ceil(width / 16) if dt_rank is None else validate.count("dt_rank", dt_rank)
        self.in_proj = nn.Linear(width, 2 * self.inner, bias=bias)
        self.conv = ShortConvolution(self.inner, validate.count("conv_size", conv_size), bias=conv_bias)
        self.conv_shape = self.conv.conv_shape
        self.x_proj = nn.Linear(self.inner, self.dt_rank + 2 * state_dim, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.inner, bias=False)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        self.dt_bias = initial.step_sizes([self.inner], dt_min, dt_max)
        self.A_log = nn.Parameter(torch.arange(1, state_dim + 1.0).log().repeat(self.inner, 1))
        self.D = nn.Parameter(torch.ones(self.inner))
        self.o_proj = nn.Linear(self.inner, width, bias=bias)

    def mix(self, x, cache, cu_seqlens):
        u, z = self.in_proj(x).chunk(2, -1)
        u, conv = self.conv.convolve(u, cache.conv, cu_seqlens)
        d, B, C = self.x_proj(u).split([self.dt_rank, self.state_dim, self.state_dim], -1)
        dtype = computing_dtype(x)
        delta = F.softplus(self.dt_proj(d).to(dtype) + self.dt_bias.to(dtype))
        y, state = self.scan(u, delta, B, C, cache.state, cu_seqlens)
        return self.o_proj(y * F.silu(z)), state, conv

    def scan(self, u, delta, B, C, state, cu_seqlens):
        """The operator. A packed sequence gets a row of its own, filled up with Delta = 0, which changes no state."""
        A = -self.A_log.to(delta.dtype).exp()
        if cu_seqlens is not None:
            mask = packing.rows(cu_seqlens.to(u.device))
            rows = (packing.scatter(each, mask) for each in (u, delta, B, C))
            y, state = self.run_rows(*rows, A, state)
            return y[mask][None], state
        return self.run_rows(u, delta, B, C, A, state)

    def run_rows(self, u, delta, B, C, A, state):
        if u.shape[1] == 1:
            y, state = mamba.step(u[:, 0], delta[:, 0], A, B[:, 0], C[:, 0], state, D=self.D)
            return y[:, None], state
        form = getattr(mamba, self.form)
        return form(u, delta, A, B, C, D=self.D, initial_state=state, output_final_state=True)

    @classmethod
    def from_hf(cls, mixer, *, form="fused"):
        """The layer that computes what `mixer` does, a MambaMixer of transformers, with a copy of its weights.

        Raises:
            TypeError: a module of another class.
            ValueError: an activation other than SiLU.
        """
        hf.expect(mixer, "MambaMixer")
        layer = cls(
            mixer.hidden_size, expand=mixer.intermediate_size / mixer.hidden_size, state_dim=mixer.ssm_state_size,
            dt_rank=mixer.time_step_rank, conv_size=mixer.conv_kernel_size, conv_bias=mixer.use_conv_bias,
            bias=mixer.use_bias, form=form,
        )  # fmt: skip
        names = {"in_proj": "in_proj", "x_proj": "x_proj", "out_proj": "o_proj", "dt_proj.weight": "dt_proj.weight"}
        names |= {"dt_proj.bias": "dt_bias", "A_log": "A_log", "D": "D", "conv1d": "conv"}
        return hf.copy(mixer, layer, names)
