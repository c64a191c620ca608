"""The few products that every variant is written in."""

import torch


def outer(k, v):
    """The outer product k v^T: `k [..., K]`, `v [..., V]` -> `[..., K, V]`."""
    return k[..., :, None] * v[..., None, :]


def read(S, q):
    """The state asked with a query, S^T q: `S [..., K, V]`, `q [..., K]` -> `[..., V]`."""
    return (q[..., None, :] @ S)[..., 0, :]


def l2norm(x):
    """Scale vectors to (almost) unit length: x * rsqrt(sum(x^2) + 1e-6), over the last axis, in the dtype of `x`.

    A zero vector stays zero and has a finite gradient. Same as FLA's `l2norm` (eps inside the root).
    """
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
