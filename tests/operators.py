"""The NumPy recurrence, an oracle that shares no line with the package, and the inputs that the theorems are checked on."""

import numpy as np
import torch

from linattn_edu.check.cases import (  # noqa: F401
    CASES,
    GATED,
    REGIMES,
    REGIMES_OF,
    Case,
    inputs,
    leaves,
    tensors,
    tree_map,
    with_gradients,
)

NUMPY_MAPS = {
    "elu1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    "identity": lambda x: x,
}


def numpy_recurrence(arguments, delta):
    """The one recurrence of the book, in NumPy loops: decay, erase, write, then read. Returns (o, state)."""
    a = {key: tree_map(lambda x: x.numpy() if isinstance(x, torch.Tensor) else x, x) for key, x in arguments.items()}
    q, k, v = a["q"], a["k"], a["v"]
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    normalize = "normalize" not in a and "g" not in a and "beta" not in a or a.get("normalize", False)
    phi = NUMPY_MAPS[a.get("feature_map", "elu1" if normalize else "identity")]
    scale = 1.0 if normalize else K**-0.5
    state = a.get("initial_state")
    S_0, z_0 = state if isinstance(state, tuple) else (state, None)
    o, last_S, last_z = np.zeros((B, T, HV, V)), np.zeros((B, HV, K, V)), np.zeros((B, HV, K))
    for b in range(B):
        for h in range(HV):
            S = np.zeros((K, V)) if S_0 is None else S_0[b, h].copy()
            z = np.zeros(K) if z_0 is None else z_0[b, h].copy()
            for t in range(T):
                q_t, k_t, v_t = phi(q[b, t, h // (HV // H)]), phi(k[b, t, h // (HV // H)]), v[b, t, h]
                if "g" in a:
                    S = np.exp(a["g"][b, t, h]).reshape(-1, 1) * S
                beta = a["beta"][b, t, h] if "beta" in a else 1.0
                erased = S.T @ k_t if delta else 0.0
                S = S + beta * np.outer(k_t, v_t - erased)
                z = z + k_t
                o[b, t, h] = scale * S.T @ q_t / (z @ q_t + 1e-6 if normalize else 1.0)
            last_S[b, h], last_z[b, h] = S, z
    return o, (last_S, last_z) if normalize else last_S
