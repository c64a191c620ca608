"""From what a layer projects to gates: log-decays g <= 0 and write strengths beta.

A decay is exp(g), so a gate needs no sigmoid of its own: any map onto (-infinity, 0] will do. All maps compute in
float32, or in float64 for float64 inputs, whatever the layer computes in: a running sum of gates in bfloat16 stands
still as soon as a gate is below 1/512 of it.
"""

import torch
import torch.nn.functional as F

from linattn_edu import validate
from linattn_edu.forms import computing_dtype
from linattn_edu.validate import Sizes


@validate.named
def mamba2_decay(x, A_log, dt_bias):
    """The gate of Mamba-2 and Gated DeltaNet, g = -exp(A_log) * softplus(x + dt_bias): rate times step size.

    exp(A_log) is the head's rate of forgetting, positive by construction; softplus(x + dt_bias) the token's step size
    Delta. Mamba-2 also scales what is written by Delta, Gated DeltaNet does not.

    Args:
        x: [B, T, HV], or [B, HV] for one token.
        A_log, dt_bias: [HV].

    Returns:
        g in the shape of x.

    Raises:
        ValueError: a wrong shape, dtype or device.
        TypeError: an argument that is missing or no tensor.

    Source: Dao and Gu 2024, Mamba2 layer; Yang, Kautz and Hatamizadeh 2025, footnote 4. Initial values in the code:
    exp(A_log) uniform in (1, 16), in Gated DeltaNet (0, 16); softplus(dt_bias) log-uniform in (0.001, 0.1).
    """
    x, A_log, dt_bias = _upcast(x, A_log, dt_bias, "HV")
    return -A_log.exp() * F.softplus(x + dt_bias)


@validate.named
def kda_decay(x, A_log, dt_bias):
    """KDA's gate, that of Mamba-2 in every key channel: g = -exp(A_log) * softplus(x + dt_bias).

    All channels of a head share its rate exp(A_log).

    Args:
        x: [B, T, HV, K], or [B, HV, K] for one token.
        A_log: [HV].
        dt_bias: [HV, K]; a checkpoint of FLA holds it flat, [HV * K]: pass its `view(HV, K)`.

    Returns:
        g in the shape of x.

    Raises:
        ValueError: a wrong shape, dtype or device.
        TypeError: an argument that is missing or no tensor.

    Source: Kimi Team 2025, section 4; the official code has A_log and dt_bias.
    """
    x, A_log, dt_bias = _upcast(x, A_log, dt_bias, "HV K")
    return -A_log.exp()[:, None] * F.softplus(x + dt_bias)


@validate.named
def kda_bounded_decay(x, A_log, dt_bias, *, lower_bound=-5.0):
    """KDA's bounded gate, g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias)), between lower_bound and 0.

    Sixteen tokens then keep at least exp(-80), which float32 and bfloat16 hold as well as its inverse: kernels may
    divide by the decay of a block of 16. It is another function than `kda_decay`, with parameters of the same names
    that do not fit the other: here exp(A_log) makes the sigmoid steep, there it is the rate.

    Args:
        x: [B, T, HV, K], or [B, HV, K] for one token.
        A_log: [HV].
        dt_bias: [HV, K].
        lower_bound: the strongest log-decay, below 0.

    Returns:
        g in the shape of x.

    Raises:
        ValueError: a wrong shape, dtype, device or value.
        TypeError: an argument that is missing, or is no tensor or number.

    Source: the official code of FlashKDA (2026) and FLA's `safe_gate`; not in the paper of 2025.
    """
    bound = validate.number("lower_bound", lower_bound, negative=True)
    x, A_log, dt_bias = _upcast(x, A_log, dt_bias, "HV K")
    return bound * torch.sigmoid(A_log.exp()[:, None] * (x + dt_bias))


@validate.named
def gla_decay(x, *, tau=16.0):
    """GLA's gate, alpha = sigmoid(x)^(1/tau), that is g = logsigmoid(x) / tau.

    The root makes forgetting slow: x = 0 halves the state after tau tokens instead of at every token.

    Args:
        x: any shape, [B, T, HV, K] for `gla`.
        tau: the temperature, positive.

    Returns:
        g in the shape of x.

    Raises:
        ValueError: a wrong dtype or value.
        TypeError: an argument that is missing, or is no tensor or number.

    Source: Yang et al. 2024 (2312.06635), section 4.4.
    """
    tau = validate.number("tau", tau, positive=True)
    return F.logsigmoid(_floating(x)) / tau


@validate.named
def write_strength(x, *, negative_eigenvalues=False):
    """beta = sigmoid(x) in (0, 1), or 2 sigmoid(x) in (0, 2).

    For a unit key the delta rule's transition has the eigenvalue 1 - beta along k: from 1 (write nothing) to 0
    (replace), or on to -1 (reflect), with which a state can count parity.

    Args:
        x: any shape, [B, T, HV] for the delta rule.
        negative_eigenvalues: let beta go up to 2.

    Returns:
        beta in the shape of x.

    Raises:
        ValueError: a wrong dtype.
        TypeError: an argument that is missing, or is no tensor or flag.

    Source: Yang et al. 2024 (2406.06484); Grazzi et al. 2025 (2411.12537) for (0, 2).
    """
    validate.flag("negative_eigenvalues", negative_eigenvalues)
    beta = torch.sigmoid(_floating(x))
    return 2 * beta if negative_eigenvalues else beta


def _floating(x):
    validate.floating("x", x)
    return x.to(computing_dtype(x))


def _upcast(x, A_log, dt_bias, axes):
    """Check the three tensors and bring them to one dtype; `axes` are those that a token has."""
    sizes, T = Sizes(), "T " if isinstance(x, torch.Tensor) and x.dim() == len(axes.split()) + 2 else ""
    validate.floating_tensor("x", x, f"B {T}{axes}", sizes)
    validate.floating_tensor("A_log", A_log, "HV", sizes, like=("x", x))
    validate.floating_tensor("dt_bias", dt_bias, axes, sizes, like=("x", x))
    return (y.to(computing_dtype(x)) for y in (x, A_log, dt_bias))
