"""Inputs and the NumPy recurrence for every variant: what the theorems in the test files are checked on.

Usual test inputs hide faults: with gates drawn as logsigmoid(randn) a block of 64 tokens keeps e^-52 of its incoming
state, so that dropping the state changes nothing. Hence three gate regimes, signed keys, a state that is not zero,
lengths that no block divides, and K != V.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

import linattn_edu

REGIMES = {"strong": (-8.0, -2.0), "weak": (-0.02, -0.001), "zero": (0.0, 0.0)}


@dataclass(frozen=True)
class Case:
    """A variant with its options: `gates` maps a gate argument to its axes, without B and T."""

    variant: str
    gates: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def module(self):
        return linattn_edu.VARIANTS[self.variant]

    @property
    def tuple_state(self):
        return self.variant == "linear" and self.options.get("normalize", True)

    @property
    def width(self):
        return self.options.get("width", lambda K: K)


CASES = {
    "linear": Case("linear"),
    "linear-softmax-map": Case("linear", options={"feature_map": "softmax"}),
    "linear-plain": Case("linear", options={"feature_map": "identity", "normalize": False}),
    "linear-plain-relu2": Case("linear", options={"feature_map": "relu2", "normalize": False}),
    "decay": Case("decay", {"g": "HV"}),
    "gla": Case("gla", {"g": "HV K"}),
    "deltanet": Case("deltanet", {"beta": "HV"}),
    "gated_deltanet": Case("gated_deltanet", {"g": "HV", "beta": "HV"}),
    "kda": Case("kda", {"g": "HV K", "beta": "HV"}),
}
CASES = {name: case for name, case in CASES.items() if case.variant in linattn_edu.VARIANTS}
GATED = [name for name, case in CASES.items() if "g" in case.gates]
REGIMES_OF = [(name, regime) for name, case in CASES.items() for regime in (REGIMES if "g" in case.gates else ["zero"])]


def inputs(name, regime="weak", *, B=2, T=37, H=2, HV=4, K=5, V=7, N=None, dtype=torch.float64, seed=0, state=True, beta_max=1.0):
    """Keyword arguments for the forms of case `name`: q, k, v, gates, options and a state for N sequences."""
    case, draw = CASES[name], torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=draw, dtype=torch.float64)

    sizes = {"HV": HV, "K": K}
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
    if "beta" in case.gates:
        k = linattn_edu.l2norm(k)
    arguments = {"q": q, "k": k, "v": v}
    for gate, axes in case.gates.items():
        low, high = REGIMES[regime] if gate == "g" else (0.05 * beta_max, beta_max)
        arguments[gate] = uniform(low, high, B, T, *(sizes[x] for x in axes.split()))
    if state:
        N = B if N is None else N
        S = normal(N, HV, K, V)
        arguments["initial_state"] = (S, uniform(0.5, 2.0, N, HV, K)) if case.tuple_state else S
    arguments = {key: tree_map(lambda x: x.to(dtype), x) for key, x in arguments.items()}
    return arguments | case.options


def tree_map(f, x):
    return tuple(f(y) for y in x) if isinstance(x, tuple) else f(x)


def leaves(x):
    return [] if x is None else list(x) if isinstance(x, tuple) else [x]


def tensors(arguments):
    """The tensors among the arguments, in order, those of a tuple state included."""
    return [y for x in arguments.values() for y in leaves(x) if isinstance(y, torch.Tensor) and y.is_floating_point()]


def with_gradients(arguments):
    """A copy of the arguments whose floating tensors are leaves that require a gradient."""
    return {
        key: tree_map(lambda y: y.detach().clone().requires_grad_() if isinstance(y, torch.Tensor) else y, x)
        for key, x in arguments.items()
    }


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
