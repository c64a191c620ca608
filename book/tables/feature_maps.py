"""Feature maps compared on queries and keys of a trained model: the table that note C announces and lacks."""

import math

import torch
import torch.nn.functional as F

from linattn_edu import data, feature_maps, models

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife."


def dpfp(x):
    """Deterministic parameter-free projection, nu = 1: products of neighbours in relu([x, -x])."""
    r = F.relu(torch.cat([x, -x], -1))
    return r * r.roll(1, -1)


def favor(x, features=256):
    """Positive random features: exp(w^T x - |x|^2 / 2) / sqrt(m) is an unbiased estimate of the exponential kernel."""
    W = torch.randn(features, x.shape[-1], generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    return (x @ W.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(features)


def taylor(x):
    """1 + q^T k + (q^T k)^2 / 2 as a product of features: the exponential series up to its second term."""
    square = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, square], -1)


MAPS = {
    "identity": (feature_maps.identity, "$x$"),
    "ELU+1": (feature_maps.elu1, r"$\operatorname{ELU}(x) + 1$"),
    "ReLU": (feature_maps.relu, r"$\max(x, 0)$"),
    "squared ReLU": (feature_maps.relu2, r"$\max(x, 0)^2$"),
    "exp": (feature_maps.exp, r"$e^{x}$ by channel"),
    "softmax": (feature_maps.softmax, r"$\operatorname{softmax}(x)$ over the channels"),
    "DPFP-1": (dpfp, r"$r_i\, r_{i-1}$, $r = \max([x, -x], 0)$"),
    "FAVOR+": (favor, r"$e^{w_i^\top x - \lVert x \rVert^2/2} / \sqrt m$, random $w_i$"),
    "Taylor": (taylor, r"$1,\ x,\ x_i x_j / \sqrt 2$"),
}


def head(model):
    """Queries and keys `[T, K]` of the first head of the first layer on a sentence, each times K^(-1/4)."""
    with torch.no_grad():
        q, k, _ = model.qkv(data.encode(TEXT)[None])[0]
    return (x[0, :, 0].double() * x.shape[-1] ** -0.25 for x in (q, k))


def compare(phi, q, k):
    """Width, positivity, zeros, and the distance of the causal weights to softmax's."""
    fq, fk = phi(q), phi(k)
    lower = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    exact = (q @ k.T).masked_fill(~lower, -torch.inf).softmax(-1)
    scores = (fq @ fk.T) * lower
    zeros = (torch.cat([fq, fk]) == 0).double().mean().item()
    if scores[lower].min() < 0:
        return fq.shape[-1], "no", zeros, None, None
    P = scores / (scores.sum(-1, keepdim=True) + 1e-30)
    distance = (P - exact).abs().sum(-1).mean().item() / 2
    entropy = -torch.special.xlogy(P, P).sum(-1).mean().item()
    return fq.shape[-1], "yes" if scores[lower].min() > 0 else "zeros", zeros, distance, entropy


def table():
    """One row a map, and softmax attention itself for comparison."""
    q, k = head(models.pretrained())
    rows = [["Map", r"$\phi(x)$", "$D$", "Kernel positive", "Zero features", "Distance to softmax", "Entropy"]]
    for name, (phi, formula) in MAPS.items():
        D, positive, zeros, distance, entropy = compare(phi, q, k)
        figures = ["–", "–"] if distance is None else [f"{distance:.2f}", f"{entropy:.2f}"]
        rows.append([name, formula, f"{D:,}", positive, f"{zeros:.0%}", *figures])
    exact = (q @ k.T).masked_fill(~torch.ones(len(q), len(q), dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    rows.append(["softmax attention", r"none of finite width", "–", "yes", "–", "0", f"{-torch.special.xlogy(exact, exact).sum(-1).mean():.2f}"])
    return rows
