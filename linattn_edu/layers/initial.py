"""How fast a gate forgets before training: exp(A_log) times a step size softplus(dt_bias), drawn at random.

The published ranges suit many heads and long training. In a tiny model they are a trap: a single head draws
exp(A_log) = 8 and a step of 0.03, say, and halves its memory every three tokens; what a task asks for later is gone, no
gradient tells the gate so, and recall may never start. Slow gates avoid it: `A_range=(1, 1)` with
`dt_min=dt_max=0.007` keeps alpha = 0.993 of the state a token, a half-life of 99 tokens.
"""

import math

import torch
from torch import nn

from linattn_edu import validate


def rates(shape, A_range):
    """A_log, such that exp(A_log) is uniform within A_range = (low, high)."""
    low, high = validate.interval("A_range", A_range)
    return nn.Parameter((high - (high - low) * torch.rand(shape)).log())  # never low itself, which may be 0


def step_sizes(shape, dt_min, dt_max):
    """dt_bias, such that softplus(dt_bias) is log-uniform between dt_min and dt_max."""
    low, high = validate.number("dt_min", dt_min, positive=True), validate.number("dt_max", dt_max, positive=True)
    if low > high:
        raise ValueError(f"`dt_max`: got {dt_max}, expected at least dt_min = {dt_min}")
    dt = torch.exp(math.log(low) + (math.log(high) - math.log(low)) * torch.rand(shape))
    return nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus(x) = log(1 + exp(x)), inverted
