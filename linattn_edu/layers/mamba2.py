"""Mamba-2 as a layer."""

import torch
import torch.nn.functional as F
from torch import nn

from linattn_edu import decay, validate
from linattn_edu.forms import computing_dtype
from linattn_edu.layers import hf, initial
from linattn_edu.layers.mamba import inner_channels
from linattn_edu.layers.norm import RMSNorm
from linattn_edu.layers.recurrent import RecurrentLayer
from linattn_edu.layers.short_convolution import ShortConvolution


class Mamba2(RecurrentLayer):
    """Mamba with one decay a head, which makes it linear attention: C is the query, B the key, Delta u the value.

        z_t, w_t, d_t = W_in x_t,   (u_t, B_t, C_t) = silu(conv(w)_t),   Delta_t = softplus(d_t + dt_bias)
        S_t = exp(-Delta_t exp(A_log)) S_{t-1} + B_t (Delta_t u_t)^T
        y_t = W_o norm((S_t^T C_t + D u_t) * silu(z_t))

    Args:
        width: the width of x.
        expand: inner channels as a multiple of width.
        head_dim: V; there are HV = expand width / head_dim heads.
        state_dim: K.
        groups: H, pairs of B and C, each shared by HV / H heads; also the number of norms side by side.
        conv_size: W of the short convolution.
        conv_bias, bias: whether the convolution, W_in and W_o have biases.
        norm_before_gate: norm(...) * silu(z_t) instead of norm(... * silu(z_t)).
        A_range: exp(A_log) is drawn uniformly from it.
        dt_min, dt_max: softplus(dt_bias) is drawn log-uniformly between them.
        dt_limit: (low, high), to which Delta_t is clamped; high may be infinite.
        eps: of the norm.
        form: "fused", "chunkwise", "parallel" or "recurrent", how the operator computes.

    A tiny model may need slower gates than the paper's: `initial.py` says why, and which.

    Source: Dao and Gu 2024 (2405.21060), the Mamba2 layer of the code. One Delta_t sets decay and write at once; Gated
    DeltaNet keeps its gate and drops Delta_t from the write.
    """

    undecayed = ("A_log", "dt_bias", "D")

    def __init__(
        self, width, *, expand=2, head_dim=64, state_dim=128, groups=1, conv_size=4, conv_bias=True, bias=False,
        norm_before_gate=False, A_range=(1.0, 16.0), dt_min=0.001, dt_max=0.1, dt_limit=(0.0, float("inf")), eps=1e-5,
        form="fused",
    ):  # fmt: skip
        super().__init__(width, form)
        self.inner = inner_channels(expand, width)
        head_dim, self.groups = validate.count("head_dim", head_dim), validate.count("groups", groups)
        if self.inner % head_dim or self.inner // head_dim % groups:
            raise ValueError(
                f"`head_dim`: got {head_dim}, expected one that divides expand * width = {self.inner} "
                f"into a multiple of groups = {groups} heads"
            )
        self.heads, self.state_dim = self.inner // head_dim, validate.count("state_dim", state_dim)
        self.channels = [self.inner, groups * state_dim, groups * state_dim]
        self.dt_limit = validate.interval("dt_limit", dt_limit, endless=True)
        self.state_shapes = ((self.heads, state_dim, head_dim),)
        self.in_proj = nn.Linear(width, self.inner + sum(self.channels) + self.heads, bias=bias)
        self.conv = ShortConvolution(sum(self.channels), validate.count("conv_size", conv_size), bias=conv_bias)
        self.conv_shape = self.conv.conv_shape
        self.A_log = initial.rates([self.heads], A_range)
        self.dt_bias = initial.step_sizes([self.heads], dt_min, dt_max)
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = RMSNorm(self.inner, eps=eps, gate="silu", gate_first=not norm_before_gate, groups=groups)
        self.o_proj = nn.Linear(self.inner, width, bias=bias)

    def mix(self, x, cache, cu_seqlens):
        z, w, d = self.in_proj(x).split([self.inner, sum(self.channels), self.heads], -1)
        w, conv = self.conv.convolve(w, cache.conv, cu_seqlens)
        u, B, C = w.split(self.channels, -1)
        u = u.unflatten(-1, (self.heads, -1))
        B, C = (each.unflatten(-1, (self.groups, -1)) for each in (B, C))
        dtype = computing_dtype(x)
        delta = F.softplus(d.to(dtype) + self.dt_bias.to(dtype)).clamp(*self.dt_limit)
        g = -self.A_log.to(dtype).exp() * delta
        v = (delta[..., None] * u).to(u.dtype)
        y, state = self.run(decay, C, B, v, cache.state, cu_seqlens, g=g, scale=1.0)
        y = y + (self.D[:, None].to(dtype) * u).to(u.dtype)
        return self.o_proj(self.norm(y.flatten(2), z)), state, conv

    @classmethod
    def from_hf(cls, mixer, *, form="fused"):
        """The layer that computes what `mixer` does, a Mamba2Mixer of transformers, with a copy of its weights.

        Raises:
            TypeError: a module of another class.
            ValueError: an activation other than SiLU.
        """
        hf.expect(mixer, "Mamba2Mixer")
        layer = cls(
            mixer.hidden_size, expand=mixer.intermediate_size / mixer.hidden_size, head_dim=mixer.head_dim,
            state_dim=mixer.ssm_state_size, groups=mixer.n_groups, conv_size=mixer.conv_kernel_size,
            conv_bias=mixer.use_conv_bias, bias=mixer.use_bias, dt_limit=tuple(mixer.time_step_limit),
            eps=mixer.layer_norm_epsilon, form=form,
        )  # fmt: skip
        names = {"in_proj": "in_proj", "out_proj": "o_proj", "norm": "norm", "conv1d": "conv"}
        return hf.copy(mixer, layer, names | {"A_log": "A_log", "dt_bias": "dt_bias", "D": "D"})
