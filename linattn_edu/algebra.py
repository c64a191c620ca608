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


def solve_unit_lower(A, *right):
    """(I + A)^{-1} X for each X of `right`, by forward substitution; only what `A` holds below its diagonal counts.

    Row i is X_i - sum_{j<i} A_ij (row j), no inverse is formed. The series I - A + A^2 - ... and its doubling
    (I - A)(I + A^2)(I + A^4)... end too, since A^C = 0, but their terms grow far beyond the sum where keys are alike.
    """
    solution = torch.linalg.solve_triangular(A, torch.cat(right, -1), upper=False, unitriangular=True)
    return solution.split([x.shape[-1] for x in right], -1)
