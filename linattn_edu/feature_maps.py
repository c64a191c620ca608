"""Feature maps phi: what linear attention puts in place of the exponential.

With kappa(q, k) = phi(q)^T phi(k) >= 0 the weights of a row are kappa(q_t, k_i) / sum_j kappa(q_t, k_j). The exponential
kernel exp(q^T k) itself has no finite phi, so every map here makes another attention, not an approximation of softmax.
All act on the last axis: `[..., K] -> [..., D]`, with D = K for the named ones.
"""

import torch
import torch.nn.functional as F

from linattn_edu.validate import describe


def elu1(x):
    """ELU(x) + 1: exp(x) for x < 0, 1 + x above; positive, with a gradient everywhere (Katharopoulos et al. 2020, eq. 7).

    Written without the cancellation of `F.elu(x) + 1`, which rounds to 0 in float32 below x = -17.3.
    """
    return torch.where(x > 0, x + 1, torch.exp(torch.clamp(x, max=0)))


def relu(x):
    """max(x, 0): not negative, but a row whose features are all 0 has no normaliser."""
    return F.relu(x)


def relu2(x):
    """max(x, 0)^2: ReLU's zeros, with larger contrast between large scores."""
    return F.relu(x).square()


def exp(x):
    """exp(x) per channel: sum_i exp(q_i + k_i), which is not exp(q^T k); overflows in float32 beyond x = 88.7."""
    return torch.exp(x)


def softmax(x):
    """softmax over the channels of one token (the "exp feature"): positive, sums to 1, never overflows."""
    return torch.softmax(x, dim=-1)


def identity(x):
    """x itself: the choice of RetNet, Mamba-2, GLA and the delta family, which drop the normaliser."""
    return x


FEATURE_MAPS = {f.__name__: f for f in (elu1, relu, relu2, exp, softmax, identity)}


def feature_map(phi):
    """A feature map by name, or the callable itself."""
    if isinstance(phi, str):
        if phi not in FEATURE_MAPS:
            raise ValueError(f"`feature_map`: got {phi!r}, expected a callable or one of {', '.join(FEATURE_MAPS)}")
        return FEATURE_MAPS[phi]
    if not callable(phi):
        raise TypeError(f"`feature_map`: got {describe(phi)}, expected a callable or one of {', '.join(FEATURE_MAPS)}")
    return phi
